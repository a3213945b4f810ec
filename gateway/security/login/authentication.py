"""Authentication: anonymous clients, passwords through amqtt's plugins, SCRAM users, tokens, certificates.

A success is answered immediately, from a cache if the same name and password were right recently, or if a device has
presented its secret. A failure is answered after a delay, which counts from the *start* of the attempt and grows with
the failures of that address, so that neither guessing nor measuring the response time helps an attacker.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Final

import msgspec
import structlog

from gateway.runtime.recent import Recent
from gateway.security.fair_queue import Busy, FairQueue, Unavailable
from gateway.security.identity import ANONYMOUS, Identity, is_principal
from gateway.security.login.bearer import MECHANISMS as BEARER_MECHANISMS
from gateway.security.login.bearer import BearerServer
from gateway.security.login.credentials import CHECKS_AT_ONCE, WORKERS, Credentials, Passwords
from gateway.security.login.device_secrets import DeviceSecrets
from gateway.security.login.exchange import Continue, Done, Failed, Step
from gateway.security.login.kafka_passwords import KafkaPasswords
from gateway.security.login.scram import ScramServer
from gateway.security.login.tokens import TokenError, TokenVerifier, VerifiedToken
from gateway.security.login.user_files import ScramUsers, read_password_file, read_scram_file
from gateway.security.throttle import Throttle, address_of
from gateway.security.variables import claims_in
from gateway.settings.config import ConfigError, KafkaConfig, SecurityConfig
from telemetry.statistics import counter, gauge

log = structlog.get_logger(__name__)

CACHE_S: Final = 60.0  # how long a plugin's answer is cached: a removed user can log in no longer than this
CHECKS_OF_ADDRESS: Final = 4  # concurrent checks per address, so that other addresses get their turn
WAITING_OF_ADDRESS: Final = 256  # enough for a fleet behind one address, for some seconds
KNOWN_ADDRESSES: Final = 10_000  # addresses with a recent login; they take precedence over others
WAITING_LIMIT: Final = 4096  # waiting attempts in total; each holds a name and a password
CREDENTIAL_LIMIT: Final = 65_535  # bytes; MQTT's own limit for both
DRAIN_S: Final = 15.0  # how long a reload waits for the checks of the old plugins: longer than a check may take
NONCE_BYTES: Final = 18  # random, in a SCRAM nonce: 24 characters
NO_DEVICES: Final = DeviceSecrets({})


class AuthenticationStatistics(msgspec.Struct):
    """Results of login attempts since the start."""

    accepted_total: Annotated[int, counter("logins accepted")] = 0
    remembered_total: Annotated[int, counter("logins accepted from the cache")] = 0
    refused_total: Annotated[int, counter("logins refused")] = 0
    throttled_total: Annotated[int, counter("logins answered as busy, without a check")] = 0
    waiting: Annotated[int, gauge("logins waiting for a check")] = 0
    checking: Annotated[int, gauge("checks in progress")] = 0
    errors_total: Annotated[int, counter("checks that a plugin could not answer")] = 0
    addresses_slowed: Annotated[int, gauge("addresses whose refusals are delayed")] = 0
    key_fetches_total: Annotated[int, counter("fetches of token keys")] = 0
    key_fetches_failed_total: Annotated[int, counter("failed fetches of token keys")] = 0


class Authenticator:
    """Authenticates the clients of the three protocols."""

    def __init__(
        self,
        config: SecurityConfig,
        kafka: KafkaConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Read the configured files; raises ConfigError if one or a plugin cannot be used. `start` creates the plugins.

        `kafka` is used if Kafka checks passwords. `clock` returns monotonic seconds, `wall_clock` epoch milliseconds.
        """
        self._config = config
        self._kafka = kafka if kafka is not None else KafkaConfig()
        self._devices, self._backend = self._passwords()
        self._scram = _scram_users(config)
        self._clock = clock
        self._wall_clock = wall_clock
        self._tokens = self._verifier()
        self._throttle = Throttle(config.failed_attempt_delay_s, clock=clock, sleep=sleep)
        self._secret = secrets.token_bytes(32)
        self._remembered: Recent[bytes, float] = Recent(config.password_cache_entries)  # until when
        self._reloading = asyncio.Lock()
        self._checking: dict[bytes, asyncio.Future[bool | None]] = {}
        self._remembered_s = _cache_s(config)
        self._known: Recent[str, None] = Recent(KNOWN_ADDRESSES)
        self._turns = FairQueue(
            at_once=WORKERS * CHECKS_AT_ONCE,
            of_address=CHECKS_OF_ADDRESS,
            waiting_of_address=WAITING_OF_ADDRESS,
            waiting=WAITING_LIMIT,
        )
        self._counts = AuthenticationStatistics()

    async def start(self) -> None:
        """Create and start the plugins; raises ConfigError, which names the plugin's key."""
        if self._backend is not None:
            await self._backend.start()

    async def run(self) -> None:
        """Keep the token keys up to date until cancelled. Returns immediately if no URL is configured."""
        if self._tokens is not None and self._tokens.fetched is not None:
            await self._tokens.fetched.run()

    async def stop(self) -> None:
        """Close the plugins."""
        if self._backend is not None:
            await self._backend.stop()
        self._remembered.clear()

    async def reload(self) -> bool:
        """Reload the files and re-create the plugins; return whether they are in use. If not, all the old ones stay."""
        async with self._reloading:  # one that started earlier must not end later: it has read older files
            tokens = self._tokens
            fetched = None if tokens is None else tokens.fetched
            try:
                # In a thread: a hundred thousand users take half a second.
                users = await asyncio.to_thread(_scram_users, self._config)
                if fetched is None:
                    tokens = await asyncio.to_thread(self._verifier)
                devices, fresh = await asyncio.to_thread(self._passwords)
                if fresh is not None:
                    await fresh.start()
            except ConfigError as error:
                log.error("authentication not reloaded, the old one stays in use", error=str(error))
                return False
            self._scram = users
            self._devices = devices
            self._tokens = tokens
            if fetched is not None:
                fetched.refresh()
            if tokens is not None:
                tokens.forget()
            old, self._backend = self._backend, fresh
            self._remembered.clear()
            if old is not None and fresh is not None:
                fresh.errors = old.errors
                if self._checking:  # a plugin that is closed meanwhile would refuse them
                    await asyncio.wait(tuple(self._checking.values()), timeout=DRAIN_S)
                await old.stop()
            return True

    @property
    def scram_mechanisms(self) -> tuple[str, ...]:
        """The SCRAM mechanisms for which there are users, best first."""
        return () if self._scram is None else self._scram.mechanisms

    # logins

    async def authenticate_password(
        self, user: str, password: bytes | str, *, peer: str, client_id: str = ""
    ) -> Identity | None:
        """Check a name and a password. A refusal is delayed on purpose.

        Without a plugin or password file no password can be checked. The client is then anonymous if that is allowed
        (as with other brokers) and never gets the claimed name. `user` is SASL PLAIN's authentication identity, `peer`
        the client's `host:port`; failures are counted per host. Returns None if the login is refused.

        Raises:
            Busy: not checked: too many attempts wait, from this address or in total.
            Unavailable: not checked: the service that checks passwords is not reachable.
        """
        known = self.cached_password(user, password)
        backend = self._backend
        if known is not None or backend is None:
            return known
        began = self._clock()
        digest = self._digest(user, password)
        address = address_of(peer)
        if digest not in self._remembered:  # what was right before is no guess: others at its address may fail
            self.check_busy(address)
        text = _text(password)
        # An empty password is an anonymous bind to LDAP, which succeeds (RFC 4513 part 5.1.2).
        right = False
        if text and is_principal(user) and len(user) <= CREDENTIAL_LIMIT and user not in self._devices:
            right = await self._check(backend, digest, address, Credentials(user, text, client_id, peer))
        if right:
            self._counts.accepted_total += 1
            self._known[address] = None
            return Identity(user, "password")
        self._remembered.pop(digest, None)
        self._counts.refused_total += 1
        await self._throttle.wait_refused(address, began)
        return None

    def cached_password(self, user: str, password: bytes | str) -> Identity | None:
        """Like `authenticate_password`, but only from memory. Returns None if a lookup is needed or the login fails.

        A device's secret is always accepted from memory, whatever fails at its address: it cannot be guessed.
        """
        if self._backend is None:
            return ANONYMOUS if self._config.allow_anonymous else None
        if self._devices.matches(user, password):
            self._counts.accepted_total += 1
            return Identity(user, "password")
        digest = self._digest(user, password)
        expires = self._remembered.get(digest)
        if expires is None or self._clock() >= expires:
            return None
        self._counts.accepted_total += 1
        self._counts.remembered_total += 1
        return Identity(user, "password")

    def cached_token(self, token: str) -> VerifiedToken | None:
        """Like `authenticate_token`, but only from memory. Returns None if a lookup is needed or the login fails."""
        shown = None if self._tokens is None else self._tokens.cached(token)
        if shown is not None:
            self._counts.accepted_total += 1
        return shown

    async def authenticate_token(self, token: str, *, peer: str) -> VerifiedToken | None:
        """Check a bearer token (a JSON Web Token). Returns None if it is refused, delayed on purpose.

        Raises Busy if it is not checked, because too many failures of this address are waiting.
        """
        address = address_of(peer)
        if self._tokens is None:
            return None
        try:
            shown = await self._verify_token(address, token)
        except TokenError as fault:
            log.debug("token refused", reason=str(fault), peer=peer)
            await self.wait_refused(address)
            return None
        self._counts.accepted_total += 1
        return shown

    def exchange(self, mechanism: str, *, peer: str, user: str | None = None) -> Exchange | None:
        """Start a SASL exchange, which must prove that the client is `user`, or any user if that is None.

        Returns None if the mechanism is not offered.
        """
        address = address_of(peer)
        users = self._scram
        if self._tokens is not None and mechanism in BEARER_MECHANISMS:
            verify = functools.partial(self._verify_token, address)
            return Exchange(self, address, BearerServer(mechanism, verify, user).step)
        if users is None or mechanism not in users.mechanisms:
            return None
        look_up = functools.partial(users.credential, mechanism)
        server = ScramServer(mechanism, look_up, secrets.token_urlsafe(NONCE_BYTES), user)

        async def step(message: bytes) -> Step:
            self.check_busy(address)
            return server.step(message)

        return Exchange(self, address, step)

    async def _verify_token(self, address: str, token: str) -> VerifiedToken:
        """Verify a token with the keys in use now: an exchange may have begun before a reload.

        A token that was valid before is no guess, so those who fail at its address do not lock it out.

        Raises:
            TokenError: It is not valid.
            Busy: It is not checked; see `check_busy`.
        """
        if self._tokens is None:
            raise TokenError("tokens are not accepted")
        if not self._tokens.knows(token):
            self.check_busy(address)
        return await self._tokens.verify(token)

    def check_busy(self, address: str) -> None:
        """Raise Busy if logins from this address are not checked now."""
        if self._throttle.is_full(address):
            self._count_busy()
            raise Busy("too many failed logins of this address are waiting")

    def _count_busy(self) -> None:
        self._counts.refused_total += 1
        self._counts.throttled_total += 1

    async def wait_refused(self, address: str) -> None:
        """Count a failed exchange and wait until it may be answered.

        The delay counts from now. If it counted from the start of the exchange, a client could start many exchanges,
        wait, and then guess in all of them at the same time.
        """
        self._counts.refused_total += 1
        await self._throttle.wait_refused(address, self._clock())

    async def _check(self, backend: Passwords, digest: bytes, address: str, credentials: Credentials) -> bool:
        """Ask the plugins, once for all concurrent logins with the same credentials."""
        while (running := self._checking.get(digest)) is not None:
            known = await asyncio.shield(running)
            if known is not None:
                return known
        answer: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
        self._checking[digest] = answer
        right: bool | None = None  # stays None if this client disconnects: the next one asks again
        try:
            async with self._turns.turn(address, known=address in self._known):
                backend = self._backend or backend  # a reload may have replaced it
                right = await backend.check(credentials)
        except Unavailable:
            raise
        except Busy:
            self._count_busy()
            raise
        finally:
            del self._checking[digest]
            answer.set_result(right)
        if right and backend is self._backend:
            self._remembered[digest] = self._clock() + self._remembered_s
        return right

    def _passwords(self) -> tuple[DeviceSecrets, Passwords | None]:
        """Read the devices of the password file, and create the configured check of passwords, if any."""
        config = self._config
        if config.asks_kafka_for_passwords:
            return NO_DEVICES, KafkaPasswords(config, self._kafka)
        if not config.takes_passwords:
            return NO_DEVICES, None
        from gateway.security.login.amqtt_plugins import PluginBackend, plugin_specs  # noqa: PLC0415 - amqtt loads slowly

        file = config.password_file
        users = None if file is None else read_password_file(file, "security.password_file")
        devices = NO_DEVICES if users is None else DeviceSecrets(users.devices)
        return devices, PluginBackend(plugin_specs(config, users))

    def _verifier(self) -> TokenVerifier | None:
        """Create the verifier of tokens, if they are configured; reads the key file."""
        config = self._config
        if not config.oauth.enabled:
            return None
        claims = tuple(sorted({*claims_in(config), *config.tenants.claims}))
        return TokenVerifier(config.oauth, claims=claims, clock=self._clock, wall_clock=self._wall_clock)

    def _digest(self, user: str, password: bytes | str) -> bytes:
        """Return a keyed hash of both. The key exists only in this process, so the cache reveals no password."""
        name = user.encode("utf-8", "surrogatepass")
        secret = password.encode("utf-8", "surrogatepass") if isinstance(password, str) else password
        return hmac.digest(self._secret, len(name).to_bytes(8, "big") + name + secret, hashlib.sha256)

    def statistics(self) -> AuthenticationStatistics:
        """Return the current counts."""
        keys = None if self._tokens is None else self._tokens.fetched
        return msgspec.structs.replace(
            self._counts,
            waiting=self._turns.waiting,
            checking=self._turns.running,
            errors_total=self._backend.errors if self._backend is not None else 0,
            addresses_slowed=len(self._throttle),
            key_fetches_total=keys.fetches if keys is not None else 0,
            key_fetches_failed_total=keys.failures if keys is not None else 0,
        )


class Exchange:
    """One SASL exchange on one connection."""

    __slots__ = ("_address", "_authenticator", "_began", "_refused", "_step")

    def __init__(self, authenticator: Authenticator, address: str, step: Callable[[bytes], Awaitable[Step]]) -> None:
        """`step` is the mechanism's answer to a message; failures are counted for `address`."""
        self._authenticator = authenticator
        self._address = address
        self._step = step
        self._began = False
        self._refused: Failed | None = None  # the refusal, of which the client knows already

    async def step(self, data: bytes | None) -> Step:
        """Process the client's next message; None if it sent no initial response. A failure is delayed on purpose."""
        if self._refused is not None:
            return self._refused
        began, self._began = self._began, True
        if data is None and not began:
            return Continue(b"")  # RFC 4422 part 3: an empty challenge asks for the initial response
        try:
            step = await self._step(data or b"")
        except Busy as busy:
            return Failed(str(busy), busy=True)
        if isinstance(step, Done):
            self._authenticator._counts.accepted_total += 1
        elif isinstance(step, Failed):
            await self._authenticator.wait_refused(self._address)
            if step.challenge:
                self._refused = step
                return Continue(step.challenge)
        return step


def _scram_users(config: SecurityConfig) -> ScramUsers | None:
    return None if config.scram_file is None else read_scram_file(config.scram_file, "security.scram_file")


def _cache_s(config: SecurityConfig) -> float:
    """Return how long a password that was right is cached. A file changes only on a reload, which clears the cache."""
    if config.password_cache_s is not None:
        return config.password_cache_s
    return CACHE_S if config.plugins or config.asks_kafka_for_passwords else float("inf")


def _text(password: bytes | str) -> str | None:
    if isinstance(password, str):
        return password if len(password) <= CREDENTIAL_LIMIT else None
    try:
        return bytes(password).decode("utf-8") if len(password) <= CREDENTIAL_LIMIT else None
    except UnicodeDecodeError:
        return None
