"""Checks of a CONNECT after authentication, and the properties that CONNACK announces (sections 3.1 and 3.2.2.3)."""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.mqtt.connection.publishing import EXACTLY_ONCE
from gateway.mqtt.session.session import Session
from gateway.mqtt.state.records import PendingWill
from gateway.security.rights.authorization import Grant
from gateway.settings.config import MqttConfig
from protocols.mqtt.packets import Connect, Version
from protocols.mqtt.properties import NONE, Properties
from protocols.mqtt.reasons import ReasonCode

STOPPING: Final = "the gateway is stopping"
LIMITS: Final = {"connections": ReasonCode.QUOTA_EXCEEDED, "connects": ReasonCode.CONNECTION_RATE_EXCEEDED}
"""CONNACK codes for exceeded limits of simultaneous connections and of logins a second (`gateway.limits`)."""


def pending_will(connect: Connect, grant: Grant) -> PendingWill | None:
    """Return the will of a CONNECT with its whole topic, tenant prefix included."""
    will = connect.will
    if will is None:
        return None
    topic = grant.names.mqtt(will.topic)
    return PendingWill(will if topic == will.topic else msgspec.structs.replace(will, topic=topic), connect.version)


def check_will(pending: PendingWill | None, grant: Grant, config: MqttConfig) -> tuple[ReasonCode, str] | None:
    """Return why a will is refused, or None."""
    if pending is None:
        return None
    will = pending.will
    if will.qos > config.maximum_qos:
        return ReasonCode.QOS_NOT_SUPPORTED, f"QoS {will.qos} is not available"  # [MQTT-3.2.2-12]
    if not grant.mqtt_publish.of_topic(will.topic):
        return ReasonCode.NOT_AUTHORIZED, "not allowed to publish to the will's topic"
    return None


def check_rights(session: Session, grant: Grant, config: MqttConfig) -> tuple[str, bool] | None:
    """Return why a client with changed rights must be disconnected and whether its will is published, or None."""
    if check_will(session.will, grant, config) is not None:
        return "no longer allowed to publish to the will's topic", False
    refused = session.refused_by(grant)
    return None if refused is None else (f"no longer allowed to subscribe to {grant.names.own_mqtt(refused)}", True)


def shutdown_disconnect(config: MqttConfig, code: ReasonCode) -> tuple[ReasonCode, str, Properties]:
    """Return DISCONNECT's arguments at shutdown: `code`, or a redirect to another server (section 4.11)."""
    if config.server_reference is None:
        return code, STOPPING, NONE
    return ReasonCode.USE_ANOTHER_SERVER, STOPPING, Properties(server_reference=config.server_reference)


def session_expiry(connect: Connect, asked: Properties, config: MqttConfig) -> int:
    """Return the Session Expiry Interval in seconds, capped by the configuration."""
    longest = config.session_expiry_max_s
    if connect.version is not Version.V5:
        return 0 if connect.clean_start else longest  # Clean Session 0 means as long as possible
    return min(asked.session_expiry_interval or 0, longest)


def announcement(  # noqa: PLR0917 - the request, and its result
    connect: Connect, client_id: str, asked: Properties, proof: Properties, expiry: int, config: MqttConfig
) -> Properties:
    """Return CONNACK's properties that differ from request or defaults; `proof` ends enhanced authentication."""
    too_long = connect.keep_alive == 0 or connect.keep_alive > config.max_keep_alive_s
    information = None
    if asked.request_response_information and config.response_information is not None:
        information = config.response_information.replace("{client}", client_id)
    return Properties(
        session_expiry_interval=None if expiry == (asked.session_expiry_interval or 0) else expiry,
        receive_maximum=config.receive_maximum,
        maximum_qos=config.maximum_qos if config.maximum_qos < EXACTLY_ONCE else None,
        assigned_client_identifier=None if connect.client_id else client_id,
        topic_alias_maximum=config.topic_alias_maximum,
        server_keep_alive=config.max_keep_alive_s if too_long else None,
        response_information=information,
        authentication_method=proof.authentication_method,
        authentication_data=proof.authentication_data,
    )
