"""Serves the contract and a page that shows it: `/openapi` in JSON and YAML, `/docs`."""

from __future__ import annotations

import importlib.resources
from typing import Any, Final

import msgspec
import yaml
from aiohttp import web

from gateway.net.http.http_server import SERVER
from gateway.rest.server.answers import control_answer
from gateway.rest.server.call import Call
from gateway.rest.server.operation_set import OperationSet
from gateway.runtime.parts import PARTS, load
from gateway.runtime.version import version
from protocols.rest.contract import Contract, assemble
from protocols.rest.errors import not_found
from protocols.rest.forwarded import encoded
from protocols.rest.media import PLAIN_JSON_TYPE, preferred
from protocols.rest.responses import encode

YAML_TYPE: Final = "application/yaml"  # RFC 9512
PAGE_FILES: Final = {"": "index.html", "viewer.js": "viewer.js", "viewer.css": "viewer.css"}
_TYPES: Final = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
_POLICY: Final = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'"
_CACHE: Final = "no-cache"  # the version may change under the same address


def load_contract() -> Contract:
    """Read `protocols/rest/openapi.yaml`, and of `protocols/rest/openapi` the files of what is installed."""
    folder = importlib.resources.files("protocols.rest")
    more = folder / "openapi"  # git keeps no folder without files
    parts = sorted(more.iterdir(), key=lambda file: file.name) if more.is_dir() else []
    absent = {file for name, part in PARTS.items() if part.contract and load(name) is None for file in part.contract}
    files = [folder / "openapi.yaml", *(one for one in parts if one.name.endswith(".yaml") and one.name not in absent)]
    loaded = [yaml.load(file.read_text(), _Loader) for file in files]  # noqa: S506 - safe
    document = assemble(loaded)
    document["info"]["version"] = version()
    return Contract(document)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML loader that reads a date as text (OpenAPI 3.1 section 4.2 recommends YAML's JSON schema)."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


class Documents(OperationSet):
    """The operations that return the version, the contract and its page."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._json = msgspec.json.encode(contract.document)
        self._yaml: bytes | None = None
        folder = importlib.resources.files("gateway.rest.server") / "docs"
        self._pages = {name: (folder / file).read_bytes() for name, file in PAGE_FILES.items()}
        self.operations = {
            "info": self.info,
            "openapi": self.openapi,
            "openapiV3": self.openapi,
            "openapiYaml": self.openapi_yaml,
            "docs": self.docs,
            "docsFile": self.docs_file,
        }

    async def info(self, call: Call) -> web.StreamResponse:
        """`GET /`."""
        media = _preferred(call)
        answer = control_answer(encode({"bridge_version": version()}))
        answer.headers["Content-Type"] = media
        return answer

    async def openapi(self, call: Call) -> web.StreamResponse:
        """`GET /openapi`, `GET /openapi/v3`: JSON, or YAML where the client prefers it."""
        if _preferred(call) == YAML_TYPE:
            return await self.openapi_yaml(call)
        document = self._seen_by(call)
        body = self._json if document is self._contract.document else msgspec.json.encode(document)
        return _document(body, PLAIN_JSON_TYPE)

    async def openapi_yaml(self, call: Call) -> web.StreamResponse:
        """`GET /openapi.yaml`."""
        document = self._seen_by(call)
        if document is not self._contract.document:
            return _document(_as_yaml(document), YAML_TYPE)
        if self._yaml is None:
            self._yaml = _as_yaml(document)
        return _document(self._yaml, YAML_TYPE)

    async def docs(self, call: Call) -> web.StreamResponse:
        """`GET /docs`."""
        return self._page("")

    async def docs_file(self, call: Call, name: str) -> web.StreamResponse:
        """`GET /docs/{file}`."""
        return self._page(name)

    def _page(self, name: str) -> web.StreamResponse:
        body = self._pages.get(name)
        if body is None:
            raise not_found()
        media = _TYPES[PAGE_FILES[name].rpartition(".")[2]]
        return web.Response(
            body=body,
            headers={
                "Content-Type": f"{media}; charset=utf-8",
                "Content-Security-Policy": _POLICY,
                "X-Content-Type-Options": "nosniff",
                "Cache-Control": _CACHE,
                "Server": SERVER,
            },
        )

    def _seen_by(self, call: Call) -> dict[str, Any]:
        """Return the document; behind a proxy that adds a path prefix, with that prefix as the server's URL."""
        headers = call.request.headers
        path = headers.get("X-Forwarded-Path") or headers.get("X-Forwarded-Prefix")
        if not path:
            return self._contract.document
        server = {"url": "/" + encoded(path.strip("/"))}
        return {**self._contract.document, "servers": [server]}


def _preferred(call: Call) -> str:
    """Return the media type for the answer; JSON if the client accepts none of ours.

    RFC 9110 section 12.5.1 allows that, and Strimzi's bridge does the same: its clients send the media type of records
    in the Accept field of every request.
    """
    offered = call.operation.success_media()
    return preferred(call.request.headers.get("Accept"), offered) or offered[0]


def _as_yaml(document: dict[str, Any]) -> bytes:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120).encode()


class _Dumper(yaml.SafeDumper):
    """Writes repeated objects in full instead of with anchors, which are hard to read."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: write no anchors (see `yaml.SafeDumper`)."""
        return True


def _document(body: bytes, media: str) -> web.Response:
    return web.Response(body=body, headers={"Content-Type": media, "Cache-Control": _CACHE, "Server": SERVER})
