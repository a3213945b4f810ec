"""A real browser, driven by WebDriver (W3C Recommendation) over HTTP: Debian's Chromium and its driver."""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PROGRAMS = ("chromium", "chromedriver")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # section 12.1
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
)  # fmt: skip
STARTS = 5
START_S = 120.0


class Browser:
    """One session: one window."""

    def __init__(self, http: aiohttp.ClientSession, base: str) -> None:
        self._http = http
        self._base = base

    async def _do(self, method: str, path: str, document: Any = None) -> Any:
        async with self._http.request(method, f"{self._base}{path}", json=document) as answer:
            value = (await answer.json())["value"]
            assert answer.status == 200, value
            return value

    async def cdp(self, command: str, **parameters: Any) -> Any:
        """Run a command of Chrome's DevTools protocol."""
        return await self._do("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    async def resize(self, width: int, height: int = 900) -> None:
        """Set the page's size; it can be as narrow as a phone's, while a window has at least 500 pixels."""
        mobile = width < 500
        await self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    async def scheme(self, name: str) -> None:
        """Set the user's preferred color scheme, `light` or `dark`."""
        await self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def open(self, url: str) -> None:
        await self._do("POST", "/url", {"url": url})

    async def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a JavaScript function and return its result."""
        return await self._do("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    async def until(self, script: str, timeout: float = 60.0) -> Any:
        """Wait in the page until an expression is true, and return its value."""
        waits = (
            "const done = arguments[0]; const look = () => { const found = (" + script + ");"
            " if (found) done(found); else requestAnimationFrame(look); }; look();"
        )
        await self._do("POST", "/timeouts", {"script": int(timeout * 1000)})
        return await self._do("POST", "/execute/async", {"script": waits, "args": []})

    async def press(self, *keys: str) -> None:
        """Press keys one after the other, in the focused element."""
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        await self._do("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": steps}]})

    async def complaints(self) -> list[str]:
        """Return the warnings and errors in the browser's console since the last call."""
        said = await self._do("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in said if entry["level"] in ("SEVERE", "WARNING")]

    async def picture(self, path: Path) -> None:
        """Save a screenshot of the whole page."""
        found = await self.cdp("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(found["data"]))


async def _start_driver() -> tuple[asyncio.subprocess.Process, int]:
    """Start chromedriver; return it with its port.

    It takes a free port of IPv4, and ends at once when that port is not free in IPv6: then it is started again.
    """
    said = ""
    for _ in range(STARTS):
        driver = await asyncio.create_subprocess_exec(
            "chromedriver", "--port=0", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        assert driver.stdout is not None
        async with asyncio.timeout(START_S):
            while line := (await driver.stdout.readline()).decode():
                said += line
                if "started successfully on port" in line:
                    return driver, int(line.rsplit("port", 1)[1].strip(" .\n"))
        await driver.wait()
    raise AssertionError(f"chromedriver has ended {STARTS} times: {said}")


@asynccontextmanager
async def browser(directory: Path) -> AsyncIterator[Browser]:
    """Start a browser; the test is skipped where none is installed."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian: apt-get install chromium chromium-driver)")
    driver, port = await _start_driver()
    try:
        timeout = aiohttp.ClientTimeout(START_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            wanted = {
                "browserName": "chrome",
                "goog:loggingPrefs": {"browser": "ALL"},
                "goog:chromeOptions": {
                    "binary": shutil.which("chromium"),
                    "args": [*FLAGS, f"--user-data-dir={directory / 'profile'}"],
                },
            }
            base = f"http://127.0.0.1:{port}/session"
            async with http.post(base, json={"capabilities": {"alwaysMatch": wanted}}) as answer:
                made = (await answer.json())["value"]
                assert answer.status == 200, made
            session = f"{base}/{made['sessionId']}"
            try:
                yield Browser(http, session)
            finally:
                async with http.delete(session) as answer:
                    await answer.read()
    finally:
        driver.terminate()
        await driver.communicate()
