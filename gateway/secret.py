"""Secrets of the configuration: types that never show what they hold, and a list of what must not be written anywhere.

`SecretStr` (pydantic's) holds a password, `SecretUrl` an address that may have one in it, `SecretValue` anything, such
as a plugin's option: which of those are secret only the plugin knows, so all of them are. Whoever needs the value says
`get_secret_value()`. What libraries write into logs and errors is cleaned by `Redactor`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from pydantic import BaseModel, GetCoreSchemaHandler, Secret, SecretStr
from pydantic_core import CoreSchema, core_schema

BLANK: Final = "***"
SECRET_WORDS: Final = (
    "password", "passwd", "passphrase", "secret", "authorization", "credential", "cookie", "api_key", "apikey",
    "private_key", "access_token", "token",
)  # fmt: skip
LEAST_LENGTH: Final = 4
"""Shorter ones are not looked for: they would be found in every other word."""

SecretValue = Secret[Any]
"""Any value, never shown."""


@functools.lru_cache(maxsize=1024)  # each line of the log asks for each of its keys
def is_secret_name(name: Hashable) -> bool:
    """Whether what stands under this name is a secret."""
    plain = str(name).lower().replace("-", "_")
    return any(word in plain for word in SECRET_WORDS)


class SecretUrl:
    """An address: shown without its user, its password and the values of its query."""

    __slots__ = ("_url",)

    def __init__(self, url: str) -> None:
        self._url = url

    def get_secret_value(self) -> str:
        """The whole address."""
        return self._url

    def __str__(self) -> str:
        try:
            parts = urlsplit(self._url)
        except ValueError:
            return BLANK
        _, at, place = parts.netloc.rpartition("@")
        query = "&".join(f"{name}={BLANK}" for name, _ in parse_qsl(parts.query, keep_blank_values=True))
        shown = f"{BLANK}@{place}" if at else place
        return urlunsplit((parts.scheme, shown, parts.path, query or (BLANK if parts.query else ""), ""))

    def __repr__(self) -> str:
        return f"SecretUrl({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretUrl) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        made = core_schema.no_info_after_validator_function(cls, core_schema.str_schema())
        return core_schema.json_or_python_schema(
            json_schema=made,
            python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), made]),
            serialization=core_schema.plain_serializer_function_ser_schema(str, when_used="json"),
        )


def secrets_in(config: Any) -> Iterator[str]:
    """Every text in a configuration that must not be shown; passwords in addresses also by themselves."""
    if isinstance(config, BaseModel):
        for name in type(config).model_fields:
            yield from secrets_in(getattr(config, name))
    elif isinstance(config, SecretStr | SecretUrl):
        yield config.get_secret_value()
        yield from _passwords(config.get_secret_value())
    elif isinstance(config, Mapping):
        for name, value in config.items():
            if isinstance(value, Secret):
                yield from _option(name, value.get_secret_value())
            else:
                yield from secrets_in(value)
    elif isinstance(config, list | tuple):
        for value in config:
            yield from secrets_in(value)


def _option(name: object, value: Any) -> Iterator[str]:
    """A plugin's option: by its name, or because an address in it has a password."""
    if isinstance(value, Mapping):
        for inner, deeper in value.items():
            yield from _option(inner, deeper)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _option(name, one)
    elif isinstance(value, str):
        if is_secret_name(name) or "://" in value:
            yield value
        yield from _passwords(value)


def _passwords(text: str) -> Iterator[str]:
    """What is secret in an address, as it is written and as it is meant."""
    if "://" not in text:
        return
    try:
        parts = urlsplit(text)
        found = [parts.password or "", *(value for _, value in parse_qsl(parts.query))]
    except ValueError:
        return
    for one in found:
        yield one
        yield unquote(one)


class Redactor:
    """Blanks known secrets in any text."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """`secrets`: those shorter than `LEAST_LENGTH` are not looked for."""
        known = sorted({secret for secret in secrets if len(secret) >= LEAST_LENGTH}, key=len, reverse=True)
        forms = {form for secret in known for form in (secret, repr(secret)[1:-1])}
        self._pattern = re.compile("|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True)))
        self._any = bool(forms)

    def clean(self, text: str) -> str:
        """`text` without them."""
        return self._pattern.sub(BLANK, text) if self._any else text
