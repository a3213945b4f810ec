"""Value types of the configuration, and the base class of its sections."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from gateway.runtime.secret import SecretUrl

MEBIBYTE = 1024 * 1024
LARGEST_PORT = 65535


LoginMethod = Literal["anonymous", "password", "scram", "token", "certificate"]
"""How a client authenticates; `anonymous` means not at all."""


class ConfigError(Exception):
    """The configuration cannot be used; the text names each bad key and the error."""


class Address(str):
    """`HOST:PORT` (`[::1]:1883` for IPv6). Port 0 means any free port."""

    __slots__ = ()

    @property
    def host(self) -> str:
        """The host, without brackets."""
        return self.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port."""
        return int(self.rpartition(":")[2])

    @property
    def is_loopback(self) -> bool:
        """Whether the address is reachable only from this machine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `text`; raises ValueError if it is not `HOST:PORT`."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > LARGEST_PORT:
            raise ValueError("expected HOST:PORT")
        if set(host) & set(":[]") and not _is_bracketed(host):
            raise ValueError("expected HOST:PORT, with an IPv6 host in brackets: [::1]:1883")
        return cls(text)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(
            cls.parse, core_schema.str_schema(), serialization=core_schema.to_string_ser_schema()
        )


def _is_bracketed(host: str) -> bool:
    """Return whether the host is an IPv6 address in brackets."""
    try:
        return host[0] + host[-1] == "[]" and ipaddress.ip_address(host[1:-1]).version == 6
    except ValueError:
        return False


def check_url(url: SecretUrl, key: str) -> None:
    """Raise ValueError, which names `key`, unless the URL is https://, or http:// on this machine."""
    parts = urlsplit(url.get_secret_value())
    near = parts.scheme == "http" and Address(f"{parts.hostname}:0").is_loopback
    if not parts.hostname or not (parts.scheme == "https" or near):
        raise ValueError(f"{key}: expected https://..., or http:// on this machine")


def _origin(text: str) -> str:
    scheme, mark, authority = text.partition("://")
    if text != "*" and (not scheme or not mark or not authority or "/" in authority):
        raise ValueError('expected SCHEME://HOST[:PORT] or "*"')
    return text


Origin = Annotated[str, AfterValidator(_origin)]
"""The origin of a web page, as browsers send it."""


def _host_name(text: str) -> str:
    if text != "*" and (not text or set(text) & set("/:@[]* ")):
        raise ValueError('expected a name without a port, such as gateway.example, or "*"')
    return text


HostName = Annotated[str, AfterValidator(_host_name)]
"""A host name of the gateway."""


def _bootstrap_servers(text: str) -> str:
    for server in text.split(","):
        try:
            good = Address.parse(server.strip()).port > 0
        except ValueError:
            good = False
        if not good:
            raise ValueError("expected HOST:PORT, or several with commas between, such as kafka-1:9092,kafka-2:9092")
    return text


BootstrapServers = Annotated[str, AfterValidator(_bootstrap_servers)]
"""`HOST:PORT,HOST:PORT`."""


class Section(BaseModel):
    """A section of the configuration: frozen; unknown keys are errors. The text below a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid")
