"""aiokafka's connection to a broker, for which a socket that uvloop has closed is a broken connection.

A connection that is made while its client closes is closed with it, and so is a client's first one when whoever starts
the client is cancelled; aiokafka forgets them, open.

For some turns of the loop after a socket was lost, until whoever reads it has learned of that, uvloop raises
RuntimeError for what is written; asyncio's own transports say nothing. aiokafka foresees OSError. The task that keeps a
client's metadata would end by the other, in silence, and whoever waits for metadata would wait for ever.

A connection on which nothing is answered for seconds is doubted: when its broker answers on a new one, it is half-open
(the broker's machine, or something on the way, has forgotten it), and is closed. aiokafka would find out when its
request times out, after 30 s. What was unanswered is asked again; a batch under the same sequence number, so that it is
stored once. A broker that answers nowhere may only be slow, and is left alone: one new connection waits for it, whoever
else doubts. More would fill its backlog, and who connects when it goes on would wait for the kernel's next try. Where
the new one is answered late, the old ones are about to be.

What a connection shows of us it takes from the `Login` that its client carries, when it connects. Brokers end a login,
with its token at the latest, and close the connection at the request after; so a connection is replaced before that, in
a moment in which nothing is unanswered on it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from typing import Any, Final
from weakref import ref

import aiokafka.conn
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaConnectionError,
    KafkaError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.protocol.admin import SaslAuthenticateRequest

from gateway.kafka.driver.login import Login
from gateway.kafka.driver.tokens import LoginError
from gateway.settings.values import ConfigError
from gateway.spawn import aside

log = logging.getLogger(__name__)

LOOK_S: Final = 2.5
"""Between two looks at what is unanswered; what was so at three of them in a row, for 5 s at least, is doubted."""
DOUBTS: Final = 2
PROBE_S: Final = 2.0
"""A broker that answers sooner on a new connection has had the time to answer on the old ones."""
SILENT_S: Final = 60.0
"""How long a new connection waits for a broker that answers nowhere."""
TRUST_S: Final = 60.0
"""So long a connection is not doubted that takes the place of a half-open one: a request may be slow by its size."""
PATIENT: Final = frozenset({11, 14, 19, 20, 21, 37, 42})
"""Requests (by their keys) that a broker answers when others have done their part: JoinGroup and SyncGroup; topics
made, deleted, given more partitions; records and groups deleted."""

RENEW: Final = 0.8
"""A connection is replaced when so much of its login's life has passed. One that fails to be, since something is
unanswered on it all the time, is closed by the broker; what was unanswered is asked again."""
TLS_CLOSE_S: Final = 0.1
"""So long the end of TLS may take; a broker that does not say that it closes, too, would be waited for 30 s."""
LEAST_LIFE_S: Final = 1.0
"""A login that lasts less is not worth a connection of its own."""

_found: Final[dict[tuple[str, int], float]] = {}
"""When a broker's connection was found to be half-open last, by its address."""
_probes: Final[dict[tuple[str, int], asyncio.Task[None]]] = {}
"""Who asked a broker last on a new connection, by its address."""


class BrokerConnection(AIOKafkaConnection):  # type: ignore[misc]  # aiokafka carries no types
    """As aiokafka's, but for the errors, for a client that is closed while it connects, and for half-open ones."""

    looking: asyncio.TimerHandle | None = None
    probing: asyncio.Task[None] | None = None
    made = 0.0  # when, by the loop's clock
    renewing: asyncio.TimerHandle | None = None
    outlived = False  # it is closed as soon as nothing is unanswered

    async def connect(self) -> Any:
        """Connect, and log in. KafkaConnectionError when the client was closed meanwhile: nobody would close it.

        Raises:
            KafkaError: Kafka is away, or refuses us, or there is nothing to log in with.
        """
        login = self._sasl_oauth_token_provider
        streams = await (self._log_in(login) if isinstance(login, Login) else super().connect())
        client = getattr(self._on_close_cb, "__self__", None)  # none while a client makes its first connection
        if client is not None and client._sync_task is None:
            self.close(reason=CloseReason.SHUTDOWN)
            raise KafkaConnectionError(f"the client of {self.host}:{self.port} is closed")
        self.made = self._loop.time()
        _look(ref(self), None, 0)
        return streams

    async def _log_in(self, login: Login) -> Any:
        """Connect with what the login shows now, and tell it what came of that."""
        try:
            self._ssl_context = login.context
            self._sasl_plain_password = login.password
            streams = await super().connect()
        except ConfigError as error:
            login.refuse(str(error))
            raise LoginError(str(error)) from None
        except (KafkaError, OSError) as error:
            why = self._why_refused(error)
            if why is not None:
                login.refuse(f"{self._host}:{self._port}: {why}")
            raise
        login.accept()
        return streams

    def _why_refused(self, error: BaseException) -> str | None:
        """In words, if it is a matter of the login; of one that is no such matter `outage` tells."""
        mechanism = self._sasl_mechanism
        if isinstance(error, LoginError):
            return str(error.args[0])
        if isinstance(error, UnsupportedSaslMechanismError):
            return f"this Kafka takes no {mechanism} here (kafka.sasl_mechanism)"
        if isinstance(error, SaslAuthenticationFailed):
            said = error.args[0] if error.args and isinstance(error.args[0], str) else "without a reason"
            return f"Kafka refuses the login by {mechanism}: {said}"
        if isinstance(error, IllegalSaslStateError):
            return "Kafka wants no login here (kafka.security_protocol)"
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return f"Kafka's certificate is not believed: {cause.verify_message} (kafka.ssl_cafile)"
            if isinstance(cause, ssl.SSLError):
                return f"no TLS: {cause.reason or cause} (kafka.ssl_certfile, kafka.security_protocol)"
            cause = cause.__cause__
        return None

    async def _authenticated(self, answer: Any) -> Any:
        """The broker's word about a step of the login. Raises LoginError: it does not take the token."""
        response = await answer
        if not response.error_code and self._sasl_mechanism == "OAUTHBEARER" and response.sasl_auth_bytes:
            # RFC 7628 part 3.2.3: a refusal is an answer, which aiokafka takes for a good one.
            raise LoginError(f"Kafka refuses the token: {_status(response.sasl_auth_bytes)}")
        lasts_s = getattr(response, "session_lifetime_ms", 0) / 1000
        if lasts_s >= LEAST_LIFE_S:
            self.renewing = self._loop.call_later(RENEW * lasts_s, _outlive, ref(self))
        return response

    def _handle_frame(self, resp: bytes) -> None:
        super()._handle_frame(resp)
        if self.outlived:
            self.renew()

    def renew(self) -> None:
        """Close, if nothing is unanswered: the client makes another one with its next request."""
        self.outlived = True
        if not self._requests and self._writer is not None:
            self._sasl_oauth_token_provider.renewed += 1
            self.close(reason=CloseReason.IDLE_DROP)

    def close(self, reason: Any = None, exc: BaseException | None = None) -> Any:
        """Close at once; an awaitable of the end.

        What is not written yet is dropped: nobody waits for its answer any more, and a broker that is frozen would
        keep whoever closes waiting for as long as it is.

        Several may wait for the same end, such as who stops a client that is being closed; who gives up waiting ends
        nobody else's wait, which would be taken for the other's own cancellation.
        """
        if self.looking is not None:
            self.looking.cancel()
            self.looking = None
        if self.renewing is not None:
            self.renewing.cancel()
            self.renewing = None
        if self.probing is not None and self.probing is not asyncio.current_task():
            self.probing.cancel()
        if self._writer is not None:
            transport = self._writer.transport
            if transport.get_write_buffer_size():
                transport.abort()
            elif self._security_protocol.endswith("SSL"):
                self._loop.call_later(TLS_CLOSE_S, transport.abort)
        closed = super().close(reason=reason, exc=exc)
        return None if closed is None else asyncio.shield(closed)

    def oldest(self) -> int | None:
        """The number of the request that has waited longest, if it is one that a broker answers soon."""
        if not self._requests:
            return None
        number, request, _ = self._requests[0]
        return None if number is None or request.API_KEY in PATIENT else int(number)

    async def probe(self, number: int) -> None:
        """Close when the broker answers on a new connection, and not to this one's request of a number."""
        began = self._loop.time()
        other = BrokerConnection(
            self._host, self._port, client_id=self._client_id, request_timeout_ms=round(1000 * SILENT_S),
            ssl_context=self._ssl_context, security_protocol=self._security_protocol,
            sasl_mechanism=self._sasl_mechanism, sasl_plain_username=self._sasl_plain_username,
            sasl_plain_password=self._sasl_plain_password,
            sasl_oauth_token_provider=self._sasl_oauth_token_provider,
        )  # fmt: skip
        try:
            async with asyncio.timeout(SILENT_S):
                await other.connect()
        except (KafkaError, OSError, TimeoutError):
            return
        finally:
            other.close()
        if self.oldest() == number and self._loop.time() - began <= PROBE_S:
            log.warning("a connection to %s:%s is half-open: the broker answers on a new one", self.host, self.port)
            _found[self._host, self._port] = self._loop.time()
            self.close(reason=CloseReason.CONNECTION_BROKEN)

    def is_trusted(self, now: float) -> bool:
        """Whether it has just taken the place of a half-open one."""
        found = _found.get((self._host, self._port))
        return found is not None and found <= self.made and now - found < TRUST_S

    def send(self, request: Any, expect_response: bool = True) -> Any:
        """Send a request; an awaitable of its answer. KafkaConnectionError when the connection is broken."""
        try:
            answer = super().send(request, expect_response)
        except KafkaError:  # it was not written
            raise
        except RuntimeError as error:
            raise self._broken(error) from error
        if self._on_close_cb is None and expect_response:  # a client's first: nobody else knows of it
            self._requests[-1][2].add_done_callback(self._given_up)
        return self._authenticated(answer) if isinstance(request, SaslAuthenticateRequest) else answer

    def _given_up(self, answer: asyncio.Future[Any]) -> None:
        if answer.cancelled():
            self.close()

    def _send_sasl_token(self, payload: bytes, expect_response: bool = True) -> Any:
        try:
            return super()._send_sasl_token(payload, expect_response)
        except RuntimeError as error:
            raise self._broken(error) from error

    def _broken(self, error: RuntimeError) -> KafkaConnectionError:
        self.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)
        return KafkaConnectionError(f"Connection at {self.host}:{self.port} broken: {error}")


def _look(weak: ref[BrokerConnection], before: int | None, doubts: int) -> None:
    """Whether the same request is unanswered as the last time; nothing here keeps a connection alive."""
    connection = weak()
    if connection is None or not connection.connected():
        return
    oldest = connection.oldest()
    loop = asyncio.get_running_loop()
    doubts = doubts + 1 if oldest is not None and oldest == before and not connection.is_trusted(loop.time()) else 0
    if doubts >= DOUBTS and oldest is not None:
        address = connection.host, connection.port
        probe = _probes.get(address)
        if probe is None or probe.done():
            _probes[address] = connection.probing = aside(connection.probe(oldest), "connection to Kafka")
    connection.looking = loop.call_later(LOOK_S, _look, weak, oldest, doubts)


def _outlive(weak: ref[BrokerConnection]) -> None:
    connection = weak()
    if connection is not None:
        connection.renew()


def _status(refusal: bytes) -> str:
    """What a broker says of a token; it is its own text, and cut."""
    try:
        return str(json.loads(refusal)["status"])[:100]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "without a reason"


def use_broker_connections() -> None:
    """Have each client of aiokafka in this process connect so; it has no parameter for it."""
    aiokafka.conn.AIOKafkaConnection = BrokerConnection
