"""Secrets of the configuration: types that never show their value, and a filter for everything that is written.

`SecretStr` (pydantic's) holds a password, `SecretUrl` a URL that may contain one, `SecretValue` any value, such as a
plugin's option: only the plugin knows which options are secret, so all are treated as secrets. `get_secret_value()`
returns the value. `Redactor` removes secrets from what libraries write into logs and errors.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from pydantic import BaseModel, Secret, SecretStr

BLANK: Final = "***"
SECRET_WORDS: Final = (
    "password", "passwd", "passphrase", "secret", "authorization", "credential", "cookie", "api_key", "apikey",
    "private_key", "access_token", "token", "pwd", "jwt", "bearer", "signature", "connection_string",
    "connectionstring", "x_auth",
)  # fmt: skip
_WORD: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
FOREIGN_WORDS: Final = frozenset({"pass", "pin", "otp", "sas", "session", "sig", "auth"})
"""Whole words, since `shipping` is no pin."""
LEAST_LENGTH: Final = 4
"""Shorter secrets are not searched for, because they would match parts of ordinary words."""

SecretValue = Secret[Any]
"""A value of any type that is never shown."""


@functools.lru_cache(maxsize=1024)  # called for each key of each log line
def is_secret_name(name: Hashable) -> bool:
    """Return whether a value with this name is a secret."""
    plain = str(name).lower().replace("-", "_")
    return any(word in plain for word in SECRET_WORDS)


@functools.lru_cache(maxsize=1024)
def is_foreign_secret_name(name: str) -> bool:
    """Return whether a name that others have chosen, such as a header's, means a secret: also by a short word in it."""
    return is_secret_name(name) or not FOREIGN_WORDS.isdisjoint(word.lower() for word in _WORD.findall(name))


class SecretUrl(Secret[str]):
    """A URL that is shown without user, password and query values."""

    def _display(self) -> str:
        url = self.get_secret_value()
        try:
            parts = urlsplit(url)
        except ValueError:
            return BLANK
        _, at, host = parts.netloc.rpartition("@")
        query = "&".join(f"{name}={BLANK}" for name, _ in parse_qsl(parts.query, keep_blank_values=True))
        shown = f"{BLANK}@{host}" if at else host
        return urlunsplit((parts.scheme, shown, parts.path, query or (BLANK if parts.query else ""), ""))


def secrets_in(config: Any) -> Iterator[str]:
    """Yield every secret text in a configuration; passwords within URLs also separately."""
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
    """Yield the secrets in a plugin's option: by the option's name, or as part of a URL."""
    if isinstance(value, Mapping):
        for inner, deeper in value.items():
            yield from _option(inner, deeper)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _option(name, item)
    elif isinstance(value, str):
        if is_secret_name(name) or "://" in value:
            yield value
        yield from _passwords(value)


def _passwords(text: str) -> Iterator[str]:
    """Yield the secrets in a URL, in encoded and decoded form."""
    if "://" not in text:
        return
    try:
        parts = urlsplit(text)
        passwords = [parts.password or "", *(value for _, value in parse_qsl(parts.query))]
    except ValueError:
        return
    for item in passwords:
        yield item
        yield unquote(item)


class Redactor:
    """Blanks known secrets in any text."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        """Secrets shorter than `LEAST_LENGTH` are ignored."""
        known = sorted({secret for secret in secrets if len(secret) >= LEAST_LENGTH}, key=len, reverse=True)
        forms = {form for secret in known for form in (secret, repr(secret)[1:-1])}
        self._pattern = re.compile("|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True)))
        self._any = bool(forms)

    def clean(self, text: str) -> str:
        """Return `text` with the secrets blanked."""
        return self._pattern.sub(BLANK, text) if self._any else text
