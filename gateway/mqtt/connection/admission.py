"""The way of one client from CONNECT to its session: login, checks of what CONNECT asks for, opening the session."""

from __future__ import annotations

import secrets
from typing import Final

import msgspec
import structlog

from gateway.kafka.contracts import Refused, in_time
from gateway.limits.limits import LimitExceeded
from gateway.mqtt.connection.connack import (
    LIMITS,
    announcement,
    check_will,
    pending_will,
    session_expiry,
    shutdown_disconnect,
)
from gateway.mqtt.connection.login import EnhancedAuthentication, identify, login_refusal
from gateway.mqtt.connection.publishing import is_servers_own
from gateway.mqtt.connection.services import MqttServices
from gateway.mqtt.connection.subscribing import ANSWER_S
from gateway.mqtt.session.client_port import ClientPort
from gateway.mqtt.session.session import Session
from gateway.net.pump import Pump
from gateway.runtime.audited import audit, where_of
from gateway.security.fair_queue import Busy, Unavailable
from gateway.security.identity import Identity
from gateway.security.login.exchange import Done, Failed
from gateway.security.rights.authorization import Grant
from gateway.security.tenancy import NoTenantError
from mapping.outcomes import Outcome
from protocols.mqtt import packets
from protocols.mqtt.connection import Connection
from protocols.mqtt.packets import Connect
from protocols.mqtt.properties import NONE, Properties
from protocols.mqtt.reasons import ReasonCode

log = structlog.get_logger(__name__)


class Admitted(msgspec.Struct, frozen=True):
    """An authenticated client with its session; the caller sends CONNACK."""

    identity: Identity
    grant: Grant
    session: Session
    present: bool  # whether the session existed before
    announced: Properties  # of CONNACK


class _RefusedError(Exception):
    """CONNECT is answered with an error."""

    def __init__(self, code: ReasonCode, reason: str, properties: Properties = NONE) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.properties = properties


class ConnectAdmission:
    """Admits or refuses one client, and re-authenticates it later."""

    __slots__ = ("_client", "_connection", "_enhanced", "_pump", "_services")

    def __init__(self, client: ClientPort, connection: Connection, pump: Pump, services: MqttServices) -> None:
        """`client` gets its client id, grant and limits as soon as they are known."""
        self._client = client
        self._connection = connection
        self._pump = pump
        self._services = services
        self._enhanced: EnhancedAuthentication | None = None

    @property
    def continues(self) -> bool:
        """Whether AUTH packets may follow."""
        return self._enhanced is not None

    def end(self) -> None:
        """The connection has ended."""
        if self._enhanced is not None:
            self._enhanced.end()

    async def process(self, event: packets.Connect | packets.Auth) -> Admitted | None:
        """Process CONNECT or AUTH. None means that the client was refused, must send AUTH, or was admitted before."""
        try:
            if isinstance(event, packets.Connect):
                return await self._connect(event)
            return await self._authenticate(event)
        except _RefusedError as refused:
            if not self._client.left:
                busy = refused.code == ReasonCode.SERVER_BUSY
                self._report_refusal(refused.reason, busy=busy, audited=refused.code in _AUDITED)
                self._client.disconnect(refused.code, refused.reason, refused.properties)
        return None

    async def _connect(self, event: packets.Connect) -> Admitted | None:
        pump = self._pump
        if pump.closed:  # while CONNECT waited
            return None
        if self._services.opening.is_closed:
            raise _RefusedError(*shutdown_disconnect(self._services.config, ReasonCode.SERVER_UNAVAILABLE))
        method = event.properties.authentication_method if event.properties is not None else None
        if method is not None:
            assert event.properties is not None
            exchange = pump.entrance.exchange(method, peer=pump.peer)
            if exchange is None:  # [MQTT-4.12.0-1]
                raise _RefusedError(ReasonCode.BAD_AUTHENTICATION_METHOD, "authentication method not supported")
            self._enhanced = EnhancedAuthentication(
                pump.entrance,
                self._connection,
                exchange,
                method=method,
                peer=pump.peer,
                disconnect=self._client.disconnect,
                wall_clock=self._services.wall_clock,
            )
            return await self._authenticated(event, await self._enhanced.step(event.properties.authentication_data))
        try:
            identity = await identify(pump.entrance, event, peer=pump.peer, certificate=pump.peercert)
        except Unavailable as away:
            raise _RefusedError(ReasonCode.SERVER_UNAVAILABLE, str(away)) from None
        except Busy as busy:
            raise _RefusedError(ReasonCode.SERVER_BUSY, str(busy)) from None
        if identity is None:
            raise _RefusedError(*login_refusal(event))
        return await self._admit(event, identity, NONE)

    async def _authenticate(self, event: packets.Auth) -> Admitted | None:
        """Continue enhanced authentication, before CONNACK or for a re-authentication (section 4.12)."""
        assert self._enhanced is not None  # the connection refuses AUTH without a method
        step = await self._enhanced.receive(event)
        grant = self._client.grant
        if isinstance(step, Done) and grant is not None:
            self._renew(grant, step.identity)
        if self._connection.is_open or self._connection.connect is None:
            return None
        return await self._authenticated(self._connection.connect, step)

    def _renew(self, former: Grant, identity: Identity) -> None:
        """Give a re-authenticated client its new rights: its token may name other groups than the last one."""
        client = self._client
        try:
            grant = self._rights(identity, former.names.own_mqtt(client.client_id))
        except NoTenantError:
            grant = None
        if grant is None or grant.identity.tenant != former.identity.tenant:
            client.disconnect(ReasonCode.NOT_AUTHORIZED, "the identity belongs to another tenant")
        elif grant.identity != former.identity:
            client.grant, client.identity = grant, grant.identity
            client.rights_changed()

    def _rights(self, identity: Identity, own_id: str) -> Grant:
        """Return the rights of an authenticated client; raises NoTenantError and Unavailable."""
        services, pump = self._services, self._pump
        if services.access.by_certificate:
            identity = identity.with_certificate(pump.peercert)
        identity = pump.entrance.assign_tenant(identity, pump.peercert)
        return services.access.for_client(identity, own_id, peer=pump.peer)

    async def _authenticated(self, connect: Connect, step: Done | Failed | None) -> Admitted | None:
        """Act on the result of an authentication step, which has answered a failure itself."""
        if isinstance(step, Failed):
            self._report_refusal(step.reason, busy=step.busy)
        if not isinstance(step, Done):
            return None
        assert self._enhanced is not None
        return await self._admit(connect, step.identity, self._enhanced.properties(step.data))

    async def _admit(self, connect: Connect, identity: Identity, proof: Properties) -> Admitted | None:
        """Check what an authenticated client asks for, and open its session; `proof` ends enhanced authentication."""
        services, client = self._services, self._client
        if client.left:
            return None
        asked = connect.properties if connect.properties is not None else NONE
        own_id = connect.client_id or f"trivium-{secrets.token_hex(8)}"
        try:
            grant = client.grant = self._rights(identity, own_id)
        except NoTenantError as error:
            raise _RefusedError(ReasonCode.NOT_AUTHORIZED, str(error)) from None
        except Unavailable as away:
            raise _RefusedError(ReasonCode.SERVER_UNAVAILABLE, str(away)) from None
        identity = client.identity = grant.identity
        client_id = client.client_id = grant.names.mqtt(own_id)
        if not grant.names.has_mqtt(client_id):
            raise _RefusedError(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, "the client id is reserved for a tenant")
        if connect.will is not None and is_servers_own(connect.will.topic):
            raise _RefusedError(ReasonCode.TOPIC_NAME_INVALID, "the will's topic is reserved for the server")
        will = pending_will(connect, grant)
        if (refused := check_will(will, grant, services.config)) is not None:
            raise _RefusedError(*refused)
        former = services.sessions.live.get(client_id)
        try:
            replaced = None if former is None or former.client is None else former.client.limits
            client.enter_limits(services.limits, identity, replaced)
        except LimitExceeded as exceeded:
            raise _RefusedError(LIMITS[exceeded.kind], str(exceeded)) from None
        try:
            opened = services.opening.open(
                client_id,
                identity.name,
                clean_start=connect.clean_start,
                expiry=session_expiry(connect, asked, services.config),
                will=will,
            )
            session, present = await in_time(opened, ANSWER_S)
        except Refused as error:
            raise _RefusedError(_REFUSALS.get(error.outcome, ReasonCode.SERVER_UNAVAILABLE), error.reason) from None
        if client.left:
            services.sessions.leave(session, with_will=True)
            return None
        if (refused := check_will(will, grant, services.config)) is not None:  # the rights have changed meanwhile
            services.sessions.leave(session, with_will=False)
            raise _RefusedError(*refused)
        announced = announcement(connect, own_id, asked, proof, session.expiry, services.config)
        return Admitted(identity, grant, session, present, announced)

    def _report_refusal(self, reason: str, *, busy: bool, audited: bool = True) -> None:
        """Count and audit a refused login, or a CONNECT that was denied after the login.

        The log has it at level debug only: a flood of logins would fill it.
        """
        client, pump, connect = self._client, self._pump, self._connection.connect
        assert connect is not None
        client_id = client.client_id or connect.client_id
        self._services.counters.refused_connections += 1
        log.debug("connection refused", client=client_id, peer=pump.peer, reason=reason)
        if not audit.enabled or not audited:
            return
        where = where_of("mqtt", pump, client_id)
        if client.grant is None:
            audit.refused(where, reason, name=connect.username or "", busy=busy)
        else:
            audit.denied(where, client.grant.identity.name, "connect", client.client_id, reason)


_AUDITED: Final = frozenset(
    {
        ReasonCode.NOT_AUTHORIZED, ReasonCode.BAD_USER_NAME_OR_PASSWORD, ReasonCode.BAD_AUTHENTICATION_METHOD,
        ReasonCode.SERVER_BUSY, ReasonCode.CLIENT_IDENTIFIER_NOT_VALID,
    }
)  # fmt: skip
_REFUSALS: Final = {
    Outcome.DENIED: ReasonCode.NOT_AUTHORIZED,
    Outcome.TOO_LARGE: ReasonCode.QUOTA_EXCEEDED,
    Outcome.FULL: ReasonCode.QUOTA_EXCEEDED,
}
