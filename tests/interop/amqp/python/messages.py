"""Conversion of messages and values between the line protocol and proton, and code that both proton drivers share."""

from __future__ import annotations

import base64
import uuid
from typing import Any

from proton import (
    Condition,
    Data,
    Described,
    Disposition,
    Link,
    Message,
    SSLDomain,
    Terminus,
    int32,
    symbol,
    timestamp,
    uint,
    ulong,
)

FIELDS = {  # the line protocol's name: proton's name
    "id": "id",
    "correlation_id": "correlation_id",
    "to": "address",
    "subject": "subject",
    "reply_to": "reply_to",
    "content_type": "content_type",
    "content_encoding": "content_encoding",
    "group_id": "group_id",
    "group_sequence": "group_sequence",
    "reply_to_group_id": "reply_to_group_id",
}
TYPES: dict[str, Any] = {
    "@binary": base64.b64decode,
    "@uuid": uuid.UUID,
    "@symbol": symbol,
    "@timestamp": timestamp,
    "@ulong": ulong,
    "@uint": uint,
    "@int": int32,
}
TAGS: list[tuple[type, str, Any]] = [
    (symbol, "@symbol", str),
    (timestamp, "@timestamp", int),
    (ulong, "@ulong", int),
    (uint, "@uint", int),
    (int32, "@int", int),
    (uuid.UUID, "@uuid", str),
]
OUTCOMES = {
    "accepted": Disposition.ACCEPTED,
    "rejected": Disposition.REJECTED,
    "released": Disposition.RELEASED,
    "modified": Disposition.MODIFIED,
}
SELECTOR = ulong(0x0000468C00000004)


def value_of(told: Any) -> Any:
    """Convert a value of the line protocol to proton's."""
    if isinstance(told, list):
        return [value_of(one) for one in told]
    if not isinstance(told, dict):
        return told
    tag, content = next(iter(told.items()), ("", None))
    return TYPES[tag](content) if tag in TYPES else {key: value_of(value) for key, value in told.items()}


def from_value(value: Any) -> Any:
    """Convert a value of proton to the line protocol's."""
    for kind, tag, plain in TAGS:
        if isinstance(value, kind):
            return {tag: plain(value)}
    if isinstance(value, bytes | memoryview):
        return {"@binary": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, dict):
        return {str(key): from_value(one) for key, one in value.items()}
    return [from_value(one) for one in value] if isinstance(value, list) else value


def to_proton(told: dict[str, Any]) -> Message:
    """Convert a message of the line protocol to proton's, which has only one Data or Sequence section."""
    message = Message()
    for name, own in FIELDS.items():
        if name in told:
            setattr(message, own, value_of(told[name]))
    if "user_id" in told:
        message.user_id = value_of(told["user_id"])
    if "durable" in told:
        message.durable = told["durable"]
    if "priority" in told:
        message.priority = told["priority"]
    if "ttl" in told:
        message.ttl = told["ttl"] / 1000
    if "expiry" in told:
        message.expiry_time = told["expiry"] / 1000
    if "creation" in told:
        message.creation_time = told["creation"] / 1000
    message.annotations = {symbol(key): value_of(one) for key, one in told.get("annotations", {}).items()}
    message.properties = {key: value_of(one) for key, one in told.get("application", {}).items()}
    if "value" in told:
        message.body = value_of(told["value"])
    else:
        [section] = told["data"] if "data" in told else told["sequences"]
        message.inferred = True
        message.body = base64.b64decode(section) if "data" in told else value_of(section)
    return message


def from_proton(message: Message, number: int, settled: bool) -> dict[str, Any]:
    """Convert a received message to the line protocol's."""
    told: dict[str, Any] = {
        "delivery": number,
        "settled": settled,
        "durable": message.durable,
        "priority": message.priority,
        "ttl": round(message.ttl * 1000) or None,
        "delivery_count": message.delivery_count,
        "user_id": from_value(message.user_id) if message.user_id else None,
        "expiry": round(message.expiry_time * 1000) or None,
        "creation": round(message.creation_time * 1000) or None,
        "annotations": {str(key): from_value(one) for key, one in (message.annotations or {}).items()},
        "application": {str(key): from_value(one) for key, one in (message.properties or {}).items()},
    }
    for name, own in FIELDS.items():
        value = getattr(message, own)
        if isinstance(value, symbol):
            told[name] = str(value)
        elif name in {"id", "correlation_id"} and isinstance(value, int):
            told[name] = {"@ulong": value}
        else:
            told[name] = from_value(value) or None
    if isinstance(message.body, bytes | memoryview) and message.inferred:
        told["data"] = [base64.b64encode(bytes(message.body)).decode()]
    elif message.inferred and isinstance(message.body, list):
        told["sequences"] = [from_value(message.body)]
    else:
        told["value"] = from_value(message.body)
    return {name: one for name, one in told.items() if one is not None or name == "value"}


class Options:
    """The fields of an attach, applied to a link before it is opened (proton's LinkOption)."""

    def __init__(self, command: dict[str, Any]) -> None:
        self.command = command

    def test(self, link: Link) -> bool:
        return True

    def apply(self, link: Link) -> None:
        command = self.command
        if command.get("settled"):
            link.snd_settle_mode = Link.SND_SETTLED
        terminus = link.source if command["role"] == "receiver" else link.target
        terminus.dynamic = bool(command.get("dynamic"))
        if command.get("durable"):
            terminus.durability = Terminus.DELIVERIES
            terminus.expiry_policy = Terminus.EXPIRE_NEVER
        if command.get("copy"):
            terminus.distribution_mode = Terminus.DIST_MODE_COPY
        capabilities = [symbol(name) for name in command.get("capabilities", ())]
        if capabilities:
            terminus.capabilities.put_array(False, Data.SYMBOL)
            terminus.capabilities.enter()
            for name in capabilities:
                terminus.capabilities.put_symbol(name)
        filters = {
            symbol(name): Described(SELECTOR if "selector" in name else symbol(name), value_of(value))
            for name, value in command.get("filters", ())
        }
        if filters:
            terminus.filter.put_object(filters)


def attached(link: Link, role: str) -> dict[str, Any]:
    """Return the answer with the fields of the gateway's attach."""
    if role == "sender":
        return {"address": link.remote_target.address}
    filters = link.remote_source.filter
    filters.rewind()
    names = [str(name) for name in filters.get_object() or {}] if filters.next() else []
    return {"address": link.remote_source.address, "filters": names}


def connecting(command: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `Container.connect`."""
    options: dict[str, Any] = {"reconnect": False}
    tls = command.get("tls")
    scheme = "amqps" if tls else "amqp"
    options["url"] = f"{scheme}://{command['host']}:{command['port']}"
    if tls:
        domain = SSLDomain(SSLDomain.MODE_CLIENT)
        domain.set_trusted_ca_db(tls["ca"])
        if tls.get("cert"):
            domain.set_credentials(tls["cert"], tls["key"], None)
        domain.set_peer_authentication(SSLDomain.VERIFY_PEER)
        options["ssl_domain"] = domain
    if command.get("mechanism") == "NONE":
        options["sasl_enabled"] = False
    elif command.get("mechanism"):
        options["allowed_mechs"] = command["mechanism"]
    if command.get("user"):
        options.update(user=command["user"], password=command["password"], allow_insecure_mechs=True)
    if command.get("idle_ms"):
        options["heartbeat"] = command["idle_ms"] / 1000
    if command.get("frame_bytes"):
        options["max_frame_size"] = command["frame_bytes"]
    return options


def condition_of(endpoint: Any) -> str:
    """Return an endpoint's remote error."""
    found = endpoint.remote_condition
    return "closed without an error" if found is None else f"{found.name}: {found.description}"


def outcome_of(delivery: Any) -> dict[str, Any]:
    """Return the outcome of a sent delivery."""
    told: dict[str, Any] = {"name": getattr(delivery.remote_state, "name", str(delivery.remote_state)).lower()}
    condition = delivery.remote.condition
    if condition is not None:
        told.update(condition=str(condition.name), description=condition.description)
    return told


def prepare(delivery: Any, command: dict[str, Any]) -> None:
    """Set the fields of an outcome."""
    if command.get("condition"):
        delivery.local.condition = Condition(command["condition"], command.get("description", "no"))
    if command["outcome"] == "modified":
        delivery.local.failed = bool(command.get("failed"))
        delivery.local.undeliverable = bool(command.get("undeliverable"))
