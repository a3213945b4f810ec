"""paho under the line protocol of drivers.py: commands on standard input, answers and events on standard output."""

from __future__ import annotations

import base64
import sys
import threading
from collections.abc import Callable
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt import __version__
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from tests.interop.python.lines import decode, say

BYTES = ("CorrelationData", "AuthenticationData")
OWN_NAMES = {"user_properties": "UserProperty", "subscription_identifiers": "SubscriptionIdentifier"}
NAMES = {own: name for name, own in OWN_NAMES.items()}


def to_library(kind: int, properties: dict[str, Any] | None) -> Properties:
    out = Properties(kind)
    for name, value in (properties or {}).items():
        own = OWN_NAMES.get(name) or "".join(part.capitalize() for part in name.split("_"))
        if own == "UserProperty":
            out.UserProperty = [tuple(pair) for pair in value]
        else:
            setattr(out, own, base64.b64decode(value) if own in BYTES else value)
    return out


def from_library(properties: Properties | None) -> dict[str, Any]:
    out = {}
    for own in () if properties is None else properties.names:
        attribute = own.replace(" ", "")
        if not hasattr(properties, attribute):
            continue
        value = getattr(properties, attribute)
        if attribute in BYTES:
            value = base64.b64encode(value).decode()
        out[NAMES.get(attribute) or own.lower().replace(" ", "_")] = value
    return out


class ResendingClient(paho.Client):
    """Calls `on_resent` after CONNACK and after what has to be sent again.

    paho calls `on_connect` before that, in its own thread: another thread's next message would overtake.
    """

    on_resent: Callable[[], None]

    def _handle_connack(self) -> MQTTErrorCode:
        result = super()._handle_connack()
        self.on_resent()
        return result


class Client:
    """One paho client, which keeps its state from connection to connection."""

    def __init__(self, name: str, command: dict[str, Any]) -> None:
        self.name = name
        self.is_5 = command["version"] == 5
        self.noting = threading.Lock()
        self.waiting: dict[Any, Callable[..., None]] = {}
        self.early: dict[Any, dict[str, Any]] = {}
        self.held: list[tuple[int, int]] = []
        self.holds = bool(command.get("hold"))
        options: dict[str, Any] = {"protocol": paho.MQTTv5 if self.is_5 else paho.MQTTv311}
        if not self.is_5:
            options["clean_session"] = command["clean"]
        if command.get("path"):
            options["transport"] = "websockets"
        self.connack: dict[str, Any] = {}  # what the last one said
        self.paho = ResendingClient(
            CallbackAPIVersion.VERSION2, command["id"], manual_ack=self.holds, reconnect_on_failure=False, **options
        )
        self.paho.max_queued_messages_set(0)
        self.paho.max_inflight_messages_set(200)  # paho ignores Receive Maximum
        if command.get("path"):
            self.paho.ws_set_options(path=command["path"])
        self.paho.on_connect = self.on_connect
        self.paho.on_resent = self.on_resent
        self.paho.on_disconnect = self.on_disconnect
        self.paho.on_message = self.on_message
        self.paho.on_subscribe = self.on_codes
        self.paho.on_unsubscribe = self.on_codes
        self.paho.on_publish = lambda _c, _d, mid, reason, properties: self.answered(
            mid, reason=reason.value, properties=from_library(properties)
        )

    def connect(self, command: dict[str, Any], done: Callable[..., None]) -> None:
        self.paho.loop_stop()  # ends the thread of the previous connection
        self.sent("connect", done)
        if command.get("user") is not None:
            self.paho.username_pw_set(command["user"], command.get("password"))
        will = command.get("will")
        if will is not None:
            properties = to_library(PacketTypes.WILLMESSAGE, will.get("properties")) if self.is_5 else None
            payload = base64.b64decode(will["payload"])
            self.paho.will_set(will["topic"], payload, will["qos"], will["retain"], properties)
        options: dict[str, Any] = {"keepalive": command["keep_alive"]}
        if self.is_5:
            options["clean_start"] = command["clean"]
            options["properties"] = to_library(PacketTypes.CONNECT, command.get("properties"))
        self.paho.connect(command["host"], command["port"], **options)
        self.paho.loop_start()

    def subscribe(self, command: dict[str, Any], done: Callable[..., None]) -> None:
        filters = []
        for one in command["filters"]:
            options = SubscribeOptions(one["qos"], one["no_local"], one["retain_as_published"], one["retain_handling"])
            filters.append((one["filter"], options if self.is_5 else one["qos"]))
        properties = to_library(PacketTypes.SUBSCRIBE, command.get("properties")) if self.is_5 else None
        self.sent(self.paho.subscribe(filters, properties=properties)[1], done)

    def unsubscribe(self, command: dict[str, Any], done: Callable[..., None]) -> None:
        self.sent(self.paho.unsubscribe(command["filters"])[1], done)

    def publish(self, command: dict[str, Any], done: Callable[..., None]) -> None:
        properties = to_library(PacketTypes.PUBLISH, command.get("properties")) if self.is_5 else None
        payload = base64.b64decode(command["payload"])
        info = self.paho.publish(command["topic"], payload, command["qos"], command["retain"], properties)
        if info.rc not in {paho.MQTT_ERR_SUCCESS, paho.MQTT_ERR_NO_CONN}:
            raise RuntimeError(paho.error_string(info.rc))
        self.sent(info.mid, done)

    def flush(self, _command: dict[str, Any], done: Callable[..., None]) -> None:
        done()

    def acknowledge(self, command: dict[str, Any], done: Callable[..., None]) -> None:
        for mid, qos in self.held[: command["count"]]:
            self.paho.ack(mid, qos)
        del self.held[: command["count"]]
        done()

    def disconnect(self, command: dict[str, Any], done: Callable[..., None]) -> None:
        self.sent("disconnect", done)
        if self.is_5:
            reason = paho.ReasonCode(PacketTypes.DISCONNECT, identifier=command["reason"])
            self.paho.disconnect(reason, to_library(PacketTypes.DISCONNECT, command.get("properties")))
        else:
            self.paho.disconnect()

    def release(self, _command: dict[str, Any], done: Callable[..., None]) -> None:
        self.paho.disconnect()
        self.paho.loop_stop()
        done()

    def sent(self, mid: int | None, done: Callable[..., None]) -> None:
        """Record which command a packet's answer completes; it may have come already, in paho's thread."""
        with self.noting:
            result = self.early.pop(mid, None)
            if result is None:
                self.waiting[mid] = done
        if result is not None:
            done(**result)

    def answered(self, mid: Any, **result: Any) -> None:
        with self.noting:
            done = self.waiting.pop(mid, None)
            if done is None:
                self.early[mid] = result
        if done is not None:
            done(**result)

    def on_connect(self, _client: Any, _data: Any, flags: Any, reason: Any, properties: Any) -> None:
        self.connack = {
            "reason": reason.value,
            "session_present": flags.session_present,
            "properties": from_library(properties),
        }

    def on_resent(self) -> None:
        if self.connack:
            self.answered("connect", **self.connack)
            self.connack = {}

    def on_disconnect(self, _client: Any, _data: Any, flags: Any, reason: Any, properties: Any) -> None:
        said = reason.value if flags.is_disconnect_packet_from_server else None
        say(client=self.name, event="closed", reason=said, properties=from_library(properties))
        if flags.is_disconnect_packet_from_server is False and reason.value == 0:
            self.answered("disconnect")

    def on_codes(self, _client: Any, _data: Any, mid: int, codes: Any, properties: Any) -> None:
        self.answered(mid, reasons=[code.value for code in codes], properties=from_library(properties))

    def on_message(self, _client: Any, _data: Any, message: paho.MQTTMessage) -> None:
        if self.holds:
            self.held.append((message.mid, message.qos))
        say(
            client=self.name,
            event="message",
            topic=message.topic,
            payload=base64.b64encode(message.payload).decode(),
            qos=message.qos,
            retain=message.retain,
            dup=message.dup,
            properties=from_library(message.properties if self.is_5 else None),
        )


def main() -> None:
    clients: dict[str, Client] = {}
    say(event="ready", name="paho", version=__version__)
    for line in sys.stdin:
        command = decode(line)
        number, name, verb = command["n"], command["client"], command["do"]
        if name not in clients:
            clients[name] = Client(name, command)

        def done(number: int = number, **result: Any) -> None:
            say(n=number, result=result)

        try:
            getattr(clients[name], verb)(command, done)
            if verb == "release":
                del clients[name]
        except Exception as error:  # report any error to the test
            say(n=number, error=repr(error))


if __name__ == "__main__":
    main()
