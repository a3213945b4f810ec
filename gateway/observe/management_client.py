"""Client of a gateway's management port, for the commands."""

from __future__ import annotations

import base64
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

ANSWER_S: Final = 10.0
POLL_S: Final = 0.2
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NoAnswer(Exception):  # noqa: N818 - an answer, not an error of ours
    """The gateway gives no usable answer; the text says why."""


class ManagementClient:
    """A gateway's management port."""

    def __init__(self, base: str, login: tuple[str, str] | None) -> None:
        """`base` is the management address as `http://HOST:PORT`, `login` is user and password."""
        self._base = base.rstrip("/")
        self._headers = {}
        if login is not None:
            self._headers["Authorization"] = f"Basic {base64.b64encode(':'.join(login).encode()).decode()}"

    def ask(self, path: str, method: str = "GET") -> bytes:
        """Return the body of the response; raises NoAnswer."""
        with self._opened(path, method, ANSWER_S) as answer:
            return bytes(answer.read())

    def stream(self, path: str, document: Mapping[str, object], limit_s: float) -> Iterator[bytes]:
        """Yield the lines of a response that lasts up to `limit_s` seconds; raises NoAnswer, also between lines."""
        with self._opened(path, "POST", limit_s + ANSWER_S, json.dumps(document).encode()) as answer:
            yield from answer

    @contextmanager
    def _opened(
        self, path: str, method: str, limit_s: float, body: bytes | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request, with a body of JSON if there is one, and yield the response; raises NoAnswer."""
        url = self._base + path
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(url, body, headers, method=method)  # noqa: S310 - checked by the command
        try:
            with _DIRECT.open(request, timeout=limit_s) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            with error:  # with the gateway's text
                raise NoAnswer(error.read(500).decode(errors="replace").strip() or str(error)) from error
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"{url.partition('?')[0]}: {getattr(error, 'reason', error)}") from error

    def wait_gone(self, limit_s: float) -> bool:
        """Wait until the gateway no longer answers; returns False if it still does after `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            try:
                self.ask("/healthy")
            except NoAnswer:
                return True
            time.sleep(POLL_S)
        return False
