"""The adapter to amqtt's authentication plugins: its password file, SQL, LDAP, HTTP, JWT, and third-party plugins.

Plugins are `async` but hash, bind or query without yielding, and some are tied to the event loop that created them.
Each worker thread therefore has its own event loop and plugin instances, so that the gateway's loop never blocks.

As in amqtt: every plugin that answers must agree, and at least one must answer.
"""

from __future__ import annotations

import asyncio
import enum
import importlib
import logging
import os
import re
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import dacite
import msgspec
import structlog
from amqtt.contexts import BaseContext
from amqtt.plugins.authentication import AnonymousAuthPlugin, DeprecatedSHA512CryptHasher, FileAuthPlugin
from amqtt.plugins.base import BaseAuthPlugin
from amqtt.session import Session
from pwdlib import PasswordHash
from pwdlib.hashers.argon2 import Argon2Hasher

from gateway.security.login.credentials import WORKERS, Credentials
from gateway.security.login.user_files import PasswordFile, read_password_file
from gateway.settings.config import ConfigError, SecurityConfig

log = structlog.get_logger(__name__)

T = TypeVar("T")

NICENESS: Final = 10  # of the threads that hash: a login that waits is better than messages that wait
CHECK_TIMEOUT_S: Final = 10.0  # clients rarely have a longer connect time-out
START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 2.0
CERTIFICATE_PLUGIN: Final = "UserAuthCertPlugin"
LDAP_MODULE: Final = "amqtt.contrib.ldap"
_LDAP_SPECIAL = re.compile(r"[\\*()\x00]")


class PluginSpec(msgspec.Struct, frozen=True):
    """A plugin ready to be instantiated: its class is imported and its configuration validated."""

    key: str
    plugin: type[Any]
    config: Any
    users: Mapping[str, str] | None = None  # of the password file


class PasswordFileUsers(BaseAuthPlugin):  # type: ignore[misc]  # amqtt has no types
    """The users of `security.password_file`, which has been read, checked as amqtt's `FileAuthPlugin` does."""

    @dataclass
    class Config:
        """The hashes of their passwords, by name."""

        hashes: Mapping[str, str]

    def __init__(self, context: BaseContext) -> None:
        super().__init__(context)
        self.pwd_hasher = PasswordHash((Argon2Hasher(), DeprecatedSHA512CryptHasher()))

    async def authenticate(self, *, session: Session) -> bool:
        """Return whether the session's password is that of its user."""
        hashed = self.config.hashes.get(session.username)
        return hashed is not None and self.pwd_hasher.verify(session.password or "", hashed)


def plugin_specs(security: SecurityConfig, users: PasswordFile | None) -> list[PluginSpec]:
    """Import the configured plugins and check their configuration. `users` is the content of `security.password_file`.

    A file of nothing but devices needs no plugin.

    Raises ConfigError, which names the setting but never a configured value, if a plugin cannot be used.
    """
    specs: list[PluginSpec] = []
    if users is not None and (users.hashes or not users.devices):
        config = PasswordFileUsers.Config(users.hashes)
        specs.append(PluginSpec("security.password_file", PasswordFileUsers, config, users.hashes))
    for path, options in security.plugins.items():
        specs.append(_plugin_spec(path, {name: value.get_secret_value() for name, value in options.items()}))
    return specs


def _plugin_spec(path: str, options: Mapping[str, Any]) -> PluginSpec:
    key = f'security.plugins."{path}"'
    plugin = _import_class(path, key)
    if not issubclass(plugin, BaseAuthPlugin):
        raise ConfigError(f"{key}: not an authentication plugin (a subclass of amqtt's BaseAuthPlugin)")
    if issubclass(plugin, AnonymousAuthPlugin):
        raise ConfigError(f"{key}: it accepts every password; use security.allow_anonymous")
    if plugin.__name__ == CERTIFICATE_PLUGIN:
        raise ConfigError(f"{key}: it checks no password; use security.tls_client_ca")
    if not asyncio.iscoroutinefunction(plugin.authenticate):
        raise ConfigError(f"{key}: its authenticate is not async")
    try:
        # TOML has enumerations as text, which amqtt's own loader would refuse.
        config = dacite.from_dict(plugin.Config, dict(options), dacite.Config(strict=True, cast=[enum.Enum]))
    except dacite.UnexpectedDataError as error:
        raise ConfigError(f"{key}: unknown key {', '.join(sorted(error.keys))}") from None
    except dacite.DaciteFieldError as error:
        what = "is missing" if isinstance(error, dacite.MissingValueError) else "has the wrong type"
        raise ConfigError(f"{key}.{error.field_path} {what}") from None
    except (dacite.DaciteError, TypeError, ValueError) as error:
        raise ConfigError(f"{key}: its configuration is not valid ({type(error).__name__})") from None
    users = None
    if issubclass(plugin, FileAuthPlugin) and config.password_file is not None:
        file = read_password_file(Path(config.password_file), f"{key}.password_file")
        if file.devices:
            raise ConfigError(f"{key}.password_file: the lines of devices belong into security.password_file")
        users = file.hashes
    return PluginSpec(key, plugin, config, users)


def _import_class(path: str, key: str) -> type[Any]:
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        raise ConfigError(f"{key}: expected a dotted class name")
    try:
        plugin = getattr(importlib.import_module(module_name), class_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise ConfigError(f"{key}: no module named {missing}") from None
        raise ConfigError(f"{key}: it needs the Python package {missing!r}, which is not installed") from None
    except ImportError as error:
        raise ConfigError(f"{key}: cannot be imported: {error.msg}") from None
    except AttributeError:
        raise ConfigError(f"{key}: module {module_name} has no {class_name}") from None
    if not isinstance(plugin, type):
        raise ConfigError(f"{key}: not a class")
    return plugin


class _Plugin:
    """One plugin instance in one worker, with the extra steps that some plugins need."""

    def __init__(self, spec: PluginSpec, loop: asyncio.AbstractEventLoop) -> None:
        context = BaseContext()
        context.config = spec.config
        context.loop = loop
        context.logger = logging.getLogger(f"amqtt.{spec.plugin.__name__}")
        self.key = spec.key
        self._plugin = spec.plugin(context)
        self._users = spec.users
        self._escape = spec.plugin.__module__ == LDAP_MODULE

    async def start(self) -> None:
        started = getattr(self._plugin, "on_broker_pre_start", None)
        if started is not None:
            await started()

    async def check(self, credentials: Credentials) -> bool | None:
        session = Session()
        session.username = credentials.user
        if self._escape:  # the plugin does not escape the name in its search filter: RFC 4515 part 3
            session.username = _LDAP_SPECIAL.sub(lambda found: f"\\{ord(found[0]):02x}", credentials.user)
        session.password = credentials.password
        session.client_id = credentials.client_id
        session.remote_address = credentials.peer
        answer = await self._plugin.authenticate(session=session)
        if self._users and credentials.user not in self._users:
            # Hash for an unknown name too, or the response time would reveal which names exist.
            self._plugin.pwd_hasher.verify(credentials.password, next(iter(self._users.values())))
        return None if answer is None else bool(answer)

    async def stop(self) -> None:
        stopping = getattr(self._plugin, "on_broker_pre_shutdown", None)
        if stopping is not None:
            await stopping()
        await self._plugin.close()


class _Worker:
    """A thread with an event loop and an instance of every plugin."""

    def __init__(self, number: int, specs: Sequence[PluginSpec]) -> None:
        self.pending = 0
        self._specs = specs
        self._plugins: list[_Plugin] = []
        self._loop = asyncio.new_event_loop()
        # A daemon thread: a plugin that blocks forever must not keep the process alive.
        self._thread = threading.Thread(target=self._serve, name=f"authentication-{number}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """Run the loop below the priority of the event loop, which has the same processors; so do Argon2's threads."""
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._loop.run_forever()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def start(self) -> None:
        for spec in self._specs:
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    plugin = _Plugin(spec, self._loop)
                    self._plugins.append(plugin)
                    await plugin.start()
            except ModuleNotFoundError as error:
                text = f"it needs the Python package {error.name!r}, which is not installed"
                raise ConfigError(f"{spec.key}: {text}") from None
            except Exception as error:
                # The text of a plugin's error may hold the data base's password.
                raise ConfigError(f"{spec.key}: it did not start ({_kind(error)})") from None

    async def check(self, credentials: Credentials) -> list[tuple[str, bool | str | None]]:
        """Ask every plugin; an error is given by its kind, never by its text."""
        answers: list[tuple[str, bool | str | None]] = []
        for plugin in self._plugins:
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    answers.append((plugin.key, await plugin.check(credentials)))
            except Exception as error:  # noqa: BLE001, RUF100 - a plugin's fault is a refusal, whatever it is
                answers.append((plugin.key, _kind(error)))
        return answers

    async def stop_plugins(self) -> None:
        for plugin in self._plugins:
            try:
                await plugin.stop()
            except Exception as error:  # noqa: BLE001, RUF100
                log.warning("authentication plugin did not stop", key=plugin.key, error=_kind(error))

    def end(self) -> None:
        """Stop the loop and wait up to `STOP_TIMEOUT_S` for the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


def _kind(error: BaseException) -> str:
    cause = error.__cause__
    return type(error).__name__ if cause is None else f"{type(error).__name__} from {type(cause).__name__}"


class PluginBackend:
    """A `credentials.Passwords` that asks all configured plugins; all that answer must agree, and one must answer."""

    def __init__(self, specs: Sequence[PluginSpec]) -> None:
        self.errors = 0  # checks without an answer from a plugin
        self._specs = specs
        self._workers: list[_Worker] = []
        self._failing: dict[str, str] = {}  # key -> the kind of error logged last

    async def start(self) -> None:
        """Instantiate and start the plugins; raises ConfigError, which names the plugin's key."""
        try:
            for number in range(WORKERS):
                worker = _Worker(number, self._specs)
                self._workers.append(worker)
                await worker.run(worker.start())
        except BaseException:
            await self.stop()
            raise

    async def check(self, credentials: Credentials) -> bool:
        """Ask the plugins. Returns False on a refusal, an error, a time-out, or if no plugin answers."""
        if not self._workers:
            return False  # not started, or stopped in the meantime
        return self._decide(await self._ask(credentials))

    async def _ask(self, credentials: Credentials) -> Sequence[tuple[str, bool | str | None]]:
        worker = min(self._workers, key=lambda one: one.pending)
        worker.pending += 1
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S * max(1, len(self._specs)) + 1.0):
                return await worker.run(worker.check(credentials))
        except TimeoutError:
            return [(spec.key, "no answer in time") for spec in self._specs]
        finally:
            worker.pending -= 1

    def _decide(self, answers: Sequence[tuple[str, bool | str | None]]) -> bool:
        verdicts = []
        for key, answer in answers:
            if isinstance(answer, str):
                self.errors += 1
                if self._failing.get(key) != answer:
                    self._failing[key] = answer
                    log.error("authentication plugin failed, logins are refused", key=key, error=answer)
            elif self._failing.pop(key, None) is not None:
                log.info("authentication plugin answers again", key=key)
            if answer is not None:
                verdicts.append(answer is True)
        return bool(verdicts) and all(verdicts)

    async def stop(self) -> None:
        """Close the plugins and end their threads."""
        workers, self._workers = self._workers, []
        for worker in workers:
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await worker.run(worker.stop_plugins())
            except TimeoutError:
                log.warning("authentication plugins did not stop in time")
            await asyncio.to_thread(worker.end)
