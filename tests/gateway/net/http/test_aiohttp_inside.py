"""The private parts of aiohttp that `gateway.net` calls, overrides or relies on have not changed.

When an upgrade of aiohttp changes one, this fails: read the change beside `gateway/net/http/http_requests.py` and
`http_server.py`, adapt these if necessary, and update the digest.
"""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.web_protocol import RequestHandler
from aiohttp.web_request import BaseRequest
from aiohttp.web_server import Server

KNOWN = {
    "BaseProtocol": "b8cbe831e85f",
    "RequestHandler": "3960a24b6f6b",
    "Server": "8c9d06ee1abd",
    "BaseRequest.__init__": "dae5bbed7d90",
    "_http_parser.pyx": "6e63b556cc67",
}


def digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:12]


@pytest.mark.parametrize("part", [BaseProtocol, RequestHandler, Server, BaseRequest.__init__])
def test_it_is_as_it_was(part: Any) -> None:
    assert digest(inspect.getsource(part)) == KNOWN[part.__qualname__]


def test_the_parser_is_as_it_was() -> None:
    source = Path(aiohttp.__file__).with_name("_http_parser.pyx")
    assert digest(source.read_text()) == KNOWN["_http_parser.pyx"]


def test_the_parser_is_the_compiled_one() -> None:
    assert aiohttp.http_parser.HttpRequestParser.__module__ == "aiohttp._http_parser"
