"""Kafka clients of jobs that run without Spark: their settings by the Java names, and their life."""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, Protocol, TypeVar

_PLAIN: Final = re.compile(r"""(?:Plain|Scram)LoginModule\b""")
_LOGIN: Final = re.compile(r"""\b(username|password)\s*=\s*"((?:[^"\\]|\\.)*)\"""")
_TRUSTED: Final = ("ssl.truststore.location", "ssl.truststore.certificates")
_KNOWN: Final = frozenset(
    {
        "bootstrap.servers", "client.id", "request.timeout.ms", "metadata.max.age.ms", "isolation.level",
        "security.protocol", "sasl.mechanism", "sasl.jaas.config",
        *_TRUSTED, "ssl.truststore.type", "ssl.keystore.location", "ssl.keystore.type", "ssl.key.password",
        "ssl.endpoint.identification.algorithm",
    }
)  # fmt: skip


class _StartedAndStopped(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None: ...


_Client = TypeVar("_Client", bound=_StartedAndStopped)


def check(settings: Mapping[str, str]) -> None:
    """Raise ValueError, with one sentence, if a setting is not supported. Reads no file."""
    for name in settings:
        if name not in _KNOWN:
            raise ValueError(f"{name} is not supported for this job; supported are {', '.join(sorted(_KNOWN))}")
    for store in ("ssl.truststore", "ssl.keystore"):
        if f"{store}.location" in settings and settings.get(f"{store}.type") != "PEM":
            raise ValueError(f'{store}.type: this job supports PEM only: set "PEM", and use a PEM file')
    if "SASL" in settings.get("security.protocol", ""):
        _login(settings)


def arguments(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the common arguments of aiokafka's clients. Raises as `check`, and OSError for an unreadable file."""
    check(settings)
    protocol = settings.get("security.protocol", "PLAINTEXT")
    arguments: dict[str, Any] = {
        "bootstrap_servers": [server.strip() for server in settings["bootstrap.servers"].split(",")],
        "client_id": settings.get("client.id", "trivium-replay"),
        "request_timeout_ms": int(settings.get("request.timeout.ms", "40000")),
        "security_protocol": protocol,
    }
    if protocol.startswith("SASL"):
        arguments["sasl_mechanism"] = settings.get("sasl.mechanism", "PLAIN")
        arguments["sasl_plain_username"], arguments["sasl_plain_password"] = _login(settings)
    if protocol.endswith("SSL"):
        context = ssl.create_default_context(
            cafile=settings.get("ssl.truststore.location"), cadata=settings.get("ssl.truststore.certificates")
        )
        context.check_hostname = settings.get("ssl.endpoint.identification.algorithm", "https") != ""
        if (own := settings.get("ssl.keystore.location")) is not None:
            context.load_cert_chain(own, password=settings.get("ssl.key.password"))
        arguments["ssl_context"] = context
    return arguments


def _login(settings: Mapping[str, str]) -> tuple[str, str]:
    mechanism = settings.get("sasl.mechanism", "PLAIN")
    if mechanism not in {"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"}:
        raise ValueError(f"sasl.mechanism: this job supports PLAIN and SCRAM, not {mechanism}")
    text = settings.get("sasl.jaas.config", "")
    login = {name: re.sub(r"\\(.)", r"\1", value) for name, value in _LOGIN.findall(text)}
    if _PLAIN.search(text) is None or login.keys() != {"username", "password"}:
        raise ValueError('sasl.jaas.config: expected ...LoginModule required username="..." password="...";')
    return login["username"], login["password"]


@contextlib.asynccontextmanager
async def started(client: _Client) -> AsyncIterator[_Client]:
    """Start a client and stop it, also one whose start fails or is cancelled."""
    try:
        await client.start()
        yield client
    finally:
        await client.stop()
