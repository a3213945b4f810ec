"""aiokafka's connection to a broker, made robust against lost sockets, leaks, half-open connections and expired logins.

Leaks: aiokafka forgets, and leaves open, a connection that is made while its client closes, and a client's first
connection when the start is cancelled. Both are closed here.

Lost sockets: for some turns of the event loop after a socket was lost, until its reader notices, uvloop raises
RuntimeError on writes, where asyncio's own transports stay silent. aiokafka expects OSError; a RuntimeError would
silently end a client's metadata task, and everything that waits for metadata would wait for ever. So it becomes a
KafkaConnectionError here.

Half-open connections: a connection on which a request stays unanswered for seconds is probed. If its broker answers on
a new connection, the old one is half-open (the broker's machine, or a middlebox, has forgotten it) and is closed;
aiokafka would notice at the request's timeout, after 30 s. The unanswered requests are sent again, a batch under the
same sequence number, so that it is stored once. A broker that does not answer on the new connection either may only be
slow and is left alone: at most one probe per broker waits for it. More would fill its accept backlog, and clients that
connect when it continues would wait for the kernel's next SYN. If the probe is answered late, the old connections will
soon be answered too.

Logins: a connection reads its credentials from its client's `Login` when it connects. Brokers expire a login, with its
token at the latest, and close the connection at the next request. So a connection is replaced before that, at a moment
when no request is unanswered.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Collection
from struct import Struct as Layout
from typing import Any, Final
from weakref import ref

import aiokafka.conn
import structlog
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import (
    IllegalSaslStateError,
    KafkaConnectionError,
    KafkaError,
    RequestTimedOutError,
    SaslAuthenticationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.protocol.admin import SaslAuthenticateRequest

from gateway.kafka.driver.login import Login
from gateway.kafka.driver.tokens import LoginError
from gateway.kafka.driver.wire import FixedRequest
from gateway.runtime.spawn import start_contained
from gateway.settings.values import ConfigError

log = structlog.get_logger(__name__)

CHECK_S: Final = 2.5
"""Interval between checks for an unanswered request. One that is the oldest at three checks in a row, so for at least
5 s, triggers a probe."""
UNCHANGED_CHECKS: Final = 2
PROBE_S: Final = 2.0
"""A broker that answers the probe within this time has had time to answer on the old connection."""
SILENT_S: Final = 60.0
"""How long a probe waits for a broker."""
GRACE_S: Final = 60.0
"""How long a connection that replaces a half-open one is not probed: a large request may be slow."""
PATIENT: Final = frozenset({11, 14, 19, 20, 21, 37, 42})
"""API keys of requests that a broker answers only after others have acted: JoinGroup, SyncGroup, CreateTopics,
DeleteTopics, DeleteRecords, CreatePartitions, DeleteGroups."""

RENEW: Final = 0.8
"""Share of a login's lifetime after which its connection is replaced. If requests are unanswered all the time, the
broker closes the connection instead, and they are sent again."""
TLS_CLOSE_S: Final = 0.1
"""How long the TLS shutdown may take; without this, a broker that sends no close_notify would be waited for 30 s."""
LEAST_LIFE_S: Final = 1.0
"""A connection whose login expires sooner than this is not replaced ahead of time."""

_INT32: Final = Layout(">i")
_HEADER: Final = Layout(">ihhih")  # length, API key and version, correlation id, length of the client id

_half_open_found: Final[dict[tuple[str, int], float]] = {}
"""By a broker's address, when a half-open connection to it was last found."""
_probes: Final[dict[tuple[str, int], asyncio.Task[None]]] = {}
"""By a broker's address, its last probe."""


class BrokerCall:
    """A request whose answer is passed to a callback.

    It stands in `_requests` where aiokafka has a Future, and aiokafka calls `done`, `set_result` and `set_exception`.
    """

    __slots__ = ("_callback", "_connection", "_timer")

    def __init__(self, connection: BrokerConnection, callback: Callable[[Any], None]) -> None:
        self._connection = connection
        self._callback: Callable[[Any], None] | None = callback
        self._timer = connection._loop.call_later(connection._request_timeout, self._time_out)

    def done(self) -> bool:
        """Whether the callback was called."""
        return self._callback is None

    def set_result(self, answer: Any) -> None:
        """Call the callback, with the answer or a KafkaError."""
        self._timer.cancel()
        callback, self._callback = self._callback, None
        if callback is not None:
            callback(answer)

    set_exception = set_result

    def _time_out(self) -> None:
        self.set_result(RequestTimedOutError())
        self._connection.close(reason=CloseReason.CONNECTION_TIMEOUT)


class BrokerConnection(AIOKafkaConnection):  # type: ignore[misc]  # aiokafka carries no types
    """aiokafka's connection with the changes that this module's docstring lists."""

    check_timer: asyncio.TimerHandle | None = None
    probe_task: asyncio.Task[None] | None = None
    connected_at = 0.0  # loop time
    renewal_timer: asyncio.TimerHandle | None = None
    expiring = False  # to be closed as soon as no request is unanswered

    async def connect(self) -> Any:
        """Connect and log in.

        Raises:
            KafkaError: the broker cannot be reached or rejects the login, there are no usable credentials, or the
                client was closed meanwhile.
        """
        login = self._sasl_oauth_token_provider
        streams = await (self._log_in(login) if isinstance(login, Login) else super().connect())
        client = getattr(self._on_close_cb, "__self__", None)  # None for a client's first connection
        if client is not None and client._sync_task is None:
            self.close(reason=CloseReason.SHUTDOWN)
            raise KafkaConnectionError(f"the client of {self.host}:{self.port} is closed")
        self.connected_at = self._loop.time()
        _check_unanswered(ref(self), None, 0)
        return streams

    async def _log_in(self, login: Login) -> Any:
        """Connect with the login's current credentials, and report the result to the login."""
        try:
            self._ssl_context = login.context
            self._sasl_plain_password = login.password
            streams = await super().connect()
        except ConfigError as error:
            login.login_failed(str(error))
            raise LoginError(str(error)) from None
        except (KafkaError, OSError) as error:
            why = self._login_problem(error)
            if why is not None:
                login.login_failed(f"{self._host}:{self._port}: {why}")
            raise
        login.login_succeeded()
        return streams

    def _login_problem(self, error: BaseException) -> str | None:
        """Return the reason as text if the login or TLS has failed. None for other errors, which `outage` logs."""
        mechanism = self._sasl_mechanism
        if isinstance(error, LoginError):
            return str(error.args[0])
        if isinstance(error, UnsupportedSaslMechanismError):
            return f"this listener of Kafka does not support {mechanism} (kafka.sasl_mechanism)"
        if isinstance(error, SaslAuthenticationFailed):
            said = error.args[0] if error.args and isinstance(error.args[0], str) else "without a reason"
            return f"Kafka rejects the login with {mechanism}: {said}"
        if isinstance(error, IllegalSaslStateError):
            return "this listener of Kafka does not use SASL (kafka.security_protocol)"
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ssl.SSLCertVerificationError):
                return f"Kafka's certificate is not trusted: {cause.verify_message} (kafka.ssl_cafile)"
            if isinstance(cause, ssl.SSLError):
                return f"TLS handshake failed: {cause.reason or cause} (kafka.ssl_certfile, kafka.security_protocol)"
            cause = cause.__cause__
        return None

    async def _check_sasl_answer(self, answer: Any) -> Any:
        """Check the broker's answer to a SASL step and schedule the renewal. Raises LoginError for a refused token."""
        response = await answer
        if not response.error_code and self._sasl_mechanism == "OAUTHBEARER" and response.sasl_auth_bytes:
            # RFC 7628 part 3.2.3: a refusal is a regular answer, which aiokafka takes for success.
            raise LoginError(f"Kafka rejects the token: {_status(response.sasl_auth_bytes)}")
        lasts_s = getattr(response, "session_lifetime_ms", 0) / 1000
        if lasts_s >= LEAST_LIFE_S:
            self.renewal_timer = self._loop.call_later(RENEW * lasts_s, _renew, ref(self))
        return response

    def _handle_frame(self, resp: bytes) -> None:
        number, request, call = self._requests[0]
        if type(call) is BrokerCall and number == _INT32.unpack_from(resp)[0]:
            answer = request.RESPONSE_TYPE.read(resp[_INT32.size :])
            self._requests.popleft()
            self._last_action = time.monotonic()
            call.set_result(answer)
        else:
            super()._handle_frame(resp)
        if self.expiring:
            self.renew()

    def renew(self) -> None:
        """Close as soon as no request is unanswered; the client connects again for its next request."""
        self.expiring = True
        if not self._requests and self._writer is not None:
            self._sasl_oauth_token_provider.counts.renewed += 1
            self.close(reason=CloseReason.IDLE_DROP)

    def close(self, reason: Any = None, exc: BaseException | None = None) -> Any:
        """Close immediately and return an awaitable of the end, or None.

        Unwritten data are dropped: no caller waits for their answers any more, and a frozen broker would delay the end
        for as long as it is frozen.

        Several callers may await the same end, such as one that stops a client that is already closing. It is shielded:
        otherwise one caller's cancellation would cancel the others too.
        """
        if self.check_timer is not None:
            self.check_timer.cancel()
            self.check_timer = None
        if self.renewal_timer is not None:
            self.renewal_timer.cancel()
            self.renewal_timer = None
        if self.probe_task is not None and self.probe_task is not asyncio.current_task():
            self.probe_task.cancel()
        if self._writer is not None:
            transport = self._writer.transport
            if transport.get_write_buffer_size():
                transport.abort()
            elif self._security_protocol.endswith("SSL"):
                self._loop.call_later(TLS_CLOSE_S, transport.abort)
        closed = super().close(reason=reason, exc=exc)
        return None if closed is None else asyncio.shield(closed)

    def oldest_request(self) -> int | None:
        """Return the correlation id of the oldest unanswered request; None if there is none or it is `PATIENT`."""
        if not self._requests:
            return None
        number, request, _ = self._requests[0]
        return None if number is None or request.API_KEY in PATIENT else int(number)

    async def probe(self, number: int) -> None:
        """Close this connection if the broker answers on a new one while request `number` stays unanswered here."""
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
        if self.oldest_request() == number and self._loop.time() - began <= PROBE_S:
            log.warning("a connection is half-open: the broker answers on a new one", broker=f"{self.host}:{self.port}")
            _half_open_found[self._host, self._port] = self._loop.time()
            self.close(reason=CloseReason.CONNECTION_BROKEN)

    def has_replaced_half_open(self, now: float) -> bool:
        """Whether this connection has recently replaced a half-open one."""
        found_at = _half_open_found.get((self._host, self._port))
        return found_at is not None and found_at <= self.connected_at and now - found_at < GRACE_S

    def send(self, request: Any, expect_response: bool = True) -> Any:
        """Send a request and return an awaitable of its answer. Raises KafkaConnectionError on a broken connection."""
        try:
            answer = super().send(request, expect_response)
        except KafkaError:  # not written
            raise
        except RuntimeError as error:
            raise self._broken(error) from error
        if self._on_close_cb is None and expect_response:  # a client's first connection: the client does not track it
            self._requests[-1][2].add_done_callback(self._close_if_cancelled)
        return self._check_sasl_answer(answer) if isinstance(request, SaslAuthenticateRequest) else answer

    def call(
        self,
        request: FixedRequest,
        body: Collection[bytes | bytearray],
        callback: Callable[[Any], None],
        check: Callable[[], None],
    ) -> None:
        """Send a request; later call `callback` once, with its answer or the KafkaError that it ended with.

        `body` is in parts. `check` is called when the request is encoded, and raises KafkaError if it must not leave.

        Raises:
            KafkaError: the request was not sent, and the callback will not be called.
        """
        if self._writer is None:
            raise KafkaConnectionError(f"No connection to broker at {self.host}:{self.port}")
        request.prepare(self._versions)
        number, client = self._next_correlation_id(), self._client_id.encode()
        size = _HEADER.size - _INT32.size + len(client) + sum(map(len, body))
        header = _HEADER.pack(size, request.API_KEY, request.API_VERSION, number, len(client))
        message = b"".join((header, client, *body))
        check()
        try:
            self._writer.write(message)
        except (OSError, RuntimeError) as error:
            raise self._broken(error) from error
        self._requests.append((number, request, BrokerCall(self, callback)))

    def _close_if_cancelled(self, answer: asyncio.Future[Any]) -> None:
        if answer.cancelled():
            self.close()

    def _send_sasl_token(self, payload: bytes, expect_response: bool = True) -> Any:
        try:
            return super()._send_sasl_token(payload, expect_response)
        except RuntimeError as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> KafkaConnectionError:
        self.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)
        return KafkaConnectionError(f"Connection at {self.host}:{self.port} broken: {error}")


def _check_unanswered(weak: ref[BrokerConnection], before: int | None, unchanged: int) -> None:
    """Check whether the same request is unanswered as at the last check. Holds no strong reference to a connection."""
    connection = weak()
    if connection is None or not connection.connected():
        return
    oldest = connection.oldest_request()
    loop = asyncio.get_running_loop()
    is_stuck = oldest is not None and oldest == before and not connection.has_replaced_half_open(loop.time())
    unchanged = unchanged + 1 if is_stuck else 0
    if unchanged >= UNCHANGED_CHECKS and oldest is not None:
        address = connection.host, connection.port
        probe = _probes.get(address)
        if probe is None or probe.done():
            _probes[address] = connection.probe_task = start_contained(connection.probe(oldest), "connection to Kafka")
    connection.check_timer = loop.call_later(CHECK_S, _check_unanswered, weak, oldest, unchanged)


def _renew(weak: ref[BrokerConnection]) -> None:
    connection = weak()
    if connection is not None:
        connection.renew()


def _status(refusal: bytes) -> str:
    """Return the status in a broker's refusal of a token, cut to 100 characters."""
    try:
        return str(json.loads(refusal)["status"])[:100]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "without a reason"


def use_broker_connections() -> None:
    """Make all aiokafka clients of this process use `BrokerConnection`; aiokafka has no parameter for it."""
    aiokafka.conn.AIOKafkaConnection = BrokerConnection
