"""`POST /topics/T/events`: CloudEvents, in each of the three modes of HTTP."""

from __future__ import annotations

from aiohttp import web

from gateway.rest.produce.idempotency import request_key
from gateway.rest.produce.storing import Storing
from gateway.rest.server.answers import control_answer
from gateway.rest.server.body import BodyReader
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.rest.server.overload import OverloadGuard
from gateway.rest.server.request_login import forbidden
from mapping.record import GW_CLIENT, GW_PROTOCOL
from mapping.rest import PROTOCOL, event_record, trace_headers
from protocols.rest.cloud_events import BATCH_TYPE, EVENT_TYPE, from_batch, from_fields, from_json
from protocols.rest.responses import encode_results


class CloudEvents(OperationSet):
    """The operation that stores CloudEvents."""

    def __init__(self, storing: Storing, overload: OverloadGuard, bodies: BodyReader, max_events: int) -> None:
        self._storing = storing
        self._overload = overload
        self._bodies = bodies
        self._max_events = max_events
        self.operations = {"sendEvents": self.send}

    async def send(self, call: Call, topic: str) -> web.StreamResponse:
        """`POST /topics/{topicname}/events`."""
        request, grant = call.request, call.grant
        fields = request.headers
        if not grant.publish.some(topic):
            raise forbidden(f"publish to {topic}")
        key = request_key(request)
        with self._overload.enter(topic, request):
            body = await self._bodies.read(request)
            content_type = fields.get("Content-Type")
            essence = "" if content_type is None else content_type.partition(";")[0].strip().lower()
            if essence == EVENT_TYPE:
                events = [from_json(body)]
            elif essence == BATCH_TYPE:
                events = from_batch(body, self._max_events)
            else:
                events = [from_fields(fields.items(), content_type, body)]
            standard = ((GW_PROTOCOL, PROTOCOL), (GW_CLIENT, grant.identity.name.encode()))
            trace = trace_headers(fields.get("traceparent"), fields.get("tracestate"))
            records = [event_record(event, topic, standard, trace) for event in events]
            if not records:
                return control_answer(encode_results(()))
            storing = self._storing.store(call, records, body, key)
            del events, records, body  # as in `Produce`
            return await storing
