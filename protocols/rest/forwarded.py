"""URLs as clients behind proxies see them: scheme, host and path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from protocols.rest.errors import RestError, is_text

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def base_uri(headers: Mapping[str, str], path: str, *, secure: bool, bound: str) -> str:
    """Return the absolute URL of `path` (encoded) for this client.

    `Forwarded` (RFC 7239) takes precedence over `X-Forwarded-Host` with `X-Forwarded-Proto`, and both over `Host`. If
    the forwarded host has no port, the scheme's default port is added. `bound` is our own address, for requests without
    any host (HTTP/1.0).

    Raises:
        RestError: 400 for a forwarded scheme that is neither http nor https, or a forwarded host that is not UTF-8.
    """
    forwarded = headers.get("Forwarded")
    pairs = _first_element(forwarded) if forwarded else {}
    host, scheme = pairs.get("host"), pairs.get("proto")
    if host is None or scheme is None:
        host, scheme = headers.get("X-Forwarded-Host"), headers.get("X-Forwarded-Proto")
    if host is None or scheme is None:
        return f"{'https' if secure else 'http'}://{headers.get('Host') or bound}{path}"
    host, scheme = _first(host), _first(scheme).lower()
    if scheme not in _DEFAULT_PORTS:
        raise RestError(400, f"{scheme[:32]} is not a valid schema/proto.")
    if not is_text(host):
        raise RestError(400, f"{host[:255]} is not a valid host.")
    if ":" not in host.rpartition("]")[2]:
        host = f"{host}:{_DEFAULT_PORTS[scheme]}"
    return f"{scheme}://{host}{path}"


def client_path(headers: Mapping[str, str], path: str) -> str:
    """Return the path of this request as the client sees it, encoded: `X-Forwarded-Path`, or else `path`."""
    forwarded = headers.get("X-Forwarded-Path")
    return path if forwarded is None else encoded(forwarded.rstrip("/"))


def encoded(path: str) -> str:
    """Percent-encode what a path in a header field may have that a URL may not."""
    return quote(path, safe="/%:@!$&'()*+,;=~-._", errors="surrogateescape")


def group_path(group: str) -> str:
    """Return the path of a group's consumers, encoded."""
    return f"/consumers/{quote(group, safe='')}"


def instance_path(consumers: str, name: str) -> str:
    """Return the path of a consumer instance, encoded; `consumers` is the path of its group's consumers."""
    return f"{consumers}/instances/{quote(name, safe='')}"


def _first(field: str) -> str:
    """Return the first element of a list, which the proxy nearest to the client has added."""
    return field.partition(",")[0].strip()


def _first_element(field: str) -> dict[str, str]:
    pairs = {}
    for pair in _first(field).split(";"):
        name, equals, value = pair.partition("=")
        if equals:
            pairs[name.strip().lower()] = value.strip().strip('"')
    return pairs
