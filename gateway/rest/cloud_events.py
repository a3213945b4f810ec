"""CloudEvents by HTTP, in the binary mode of the Kafka binding (CloudEvents 1.0.2); an optional part."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.rest.parts import RestParts
from gateway.rest.produce.idempotency import request_key
from gateway.rest.server.answers import control_answer
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.request_login import forbidden
from mapping.record import GW_CLIENT, GW_PROTOCOL
from mapping.rest.events import event_record
from mapping.rest.incoming import PROTOCOL, trace_headers
from protocols.rest.cloud_events import BATCH_TYPE, ENVELOPES, EVENT_TYPE, from_batch, from_fields, from_json
from protocols.rest.errors import Fault, RestError
from protocols.rest.responses import encode_results


class CloudEvents(OperationSet):
    """The operation that stores CloudEvents."""

    def __init__(self, rest: RestParts) -> None:
        self._storing = rest.storing
        self._overload = rest.overload
        self._max_events = rest.services.config.max_records
        self.operations = {"sendEvents": self.send}

    async def send(self, call: Call, topic: str) -> web.StreamResponse:
        """`POST /topics/{topicname}/events`."""
        fields, grant = call.request.headers, call.grant
        if not grant.publish.some(topic):
            raise forbidden(f"publish to {topic}")
        key = request_key(call.request)
        with call.enter(self._overload, topic) as slot:
            content = body = await call.unchecked_body()
            content_type = fields.get("Content-Type")
            essence = "" if content_type is None else content_type.partition(";")[0].strip().lower()
            if essence == EVENT_TYPE:
                events = [from_json(body)]
            elif essence == BATCH_TYPE:
                events = from_batch(body, self._max_events)
            elif essence.startswith(ENVELOPES):
                raise RestError(415, f"Events are {EVENT_TYPE} or {BATCH_TYPE}, or in header fields", fault=Fault.MEDIA)
            else:
                events = [from_fields(fields.items(), content_type, body)]
                content = msgspec.json.encode(sorted(events[0].attributes.items())) + body
            standard = ((GW_PROTOCOL, PROTOCOL), (GW_CLIENT, grant.identity.name.encode()))
            trace = trace_headers(fields.get("traceparent"), fields.get("tracestate"))
            records = [event_record(event, topic, standard, trace) for event in events]
            slot.count_records(len(records), len(body))
            if not records:
                return control_answer(encode_results(()))
            storing = self._storing.store(call, records, content, key)
            del events, records, content, body  # see `gateway.rest.produce.requests.Produce.send`
            return await storing


OPERATIONS = (CloudEvents,)
