"""While Kafka is frozen, `/flow`, `trivium flow` and the console show which clients wait and why; later, they list it.

The console is checked in a real browser, at the widths of a phone and of a desktop.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.embedded.broker import EmbeddedBroker
from gateway.runtime.version import version
from protocols.mqtt import packets
from tests.support.browser import Browser, browser
from tests.support.frozen import freeze
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient
from tests.support.waiting import wait_until

CONFIG = """
drain_timeout_s = 2
[kafka]
create_topics = true
delivery_timeout_s = 600  # no record expires while a slow machine renders the page
[budget]
connection_bytes = 65536
"""
HOSTILE = "<img src=x onerror=\"document.title='owned'\">\u202e"
WIDTHS = (360, 1440)
BACKSPACE, TAB, ENTER, SPACE = "\ue003", "\ue004", "\ue007", " "  # WebDriver, section 17.4.2
LOOK = """
return [document.documentElement.scrollWidth <= document.documentElement.clientWidth, document.title,
        document.images.length, document.querySelectorAll('#clients-table tbody th button').length]
"""
CONTRAST = """
// WCAG 2.2, 1.4.3: the lowest contrast of a text with its background.
const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
const light = (color) => {
  const [r, g, b] = numbers(color);
  return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
};
const ground = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const color = getComputedStyle(at).backgroundColor;
    if ((numbers(color)[3] ?? 1) === 1) return color;
  }
  return 'rgb(255, 255, 255)';
};
const texts = [...document.querySelectorAll('a:not(.skip), button, p, dt, dd, th, td, h1, h2, label')];
return Math.min(...texts.filter((element) => element.textContent.trim()).map((element) => {
  const [one, other] = [light(getComputedStyle(element).color), light(ground(element))];
  return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
}));
"""


class Stall:
    """A gateway whose Kafka is frozen, with a client above its budget."""

    def __init__(self, broker: EmbeddedBroker, gateway: GatewayProcess, client: RawClient, topic: str) -> None:
        self.topic = topic
        self.broker = broker
        self.gateway = gateway
        self.client = client
        host, port = gateway.address("management")
        self.base = f"http://{host}:{port}"

    def thaw(self) -> None:
        os.kill(self.broker.pid, signal.SIGCONT)

    async def flow(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as http, http.get(f"{self.base}/flow") as answer:
            assert answer.status == 200
            return dict(await answer.json())

    async def post(self) -> int:
        """Send a produce request; return the status of the answer."""
        host, port = self.gateway.address("http")
        body, media = b'{"records":[{"value":1},{"value":2}]}', "application/vnd.kafka.json.v2+json"
        url = f"http://{host}:{port}/topics/{self.topic}"
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, data=body, headers={"Content-Type": media}) as answer,
        ):
            return answer.status

    async def command(self, *options: str) -> str:
        """Return the output of `trivium flow`."""
        argv = (sys.executable, "-m", "gateway", "flow", "--url", self.base, *options)
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        assert process.returncode == 0
        return output.decode()


@pytest.fixture
async def stall(stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess]) -> AsyncIterator[Stall]:
    gateway = await new_gateway(stoppable.bootstrap_servers, config=CONFIG).start()
    client = await RawClient.connect(gateway.address("mqtt"), HOSTILE)
    name = f"stall-{uuid.uuid4().hex[:6]}"
    found = Stall(stoppable, gateway, client, name)
    try:
        topic = f"{name}/x"
        await client.publish(topic, b"before")
        freeze(stoppable.pid)
        for number in range(10):
            client.send(packets.Publish(topic, b"z" * 10_000, 1, packet_id=100 + number))
        yield found
    finally:
        found.thaw()
        client.drop()


async def test_a_stall_is_shown_and_kept_in_the_history(stall: Stall, tmp_path: Path) -> None:
    def reasons(flow: dict[str, Any]) -> set[tuple[str, str]]:
        return {(pause["subject"].partition(" ")[0], pause["reason"]) for pause in flow["paused"]}

    wanted = {("mqtt", "connection budget"), ("Kafka", "Kafka silent")}
    flow: dict[str, Any] = {}

    async def is_shown() -> bool:
        flow.update(await stall.flow())
        return wanted <= reasons(flow)

    await wait_until(is_shown)
    (found,) = flow["connections"]
    assert (found["client"], found["bytes"] >= found["bytes_limit"]) == (HOSTILE, True)
    assert [pause["reason"] for pause in found["paused"]] == ["connection budget"]
    assert flow["at"] - 120 < found["paused"][0]["since"] <= flow["at"]

    shown = await stall.command("--once")
    assert "connection budget" in shown
    assert "<img src=x" in shown
    assert "\u202e" not in shown
    printed = await stall.command("--json", "--client", "img")
    assert printed.isascii()
    assert json.loads(printed)["connections"][0]["client"] == HOSTILE

    async with browser(tmp_path) as window:
        await check_console(window, stall)
        stall.thaw()
        await window.until("document.getElementById('state').textContent === 'nothing paused'")
        await window.until("document.querySelectorAll('#episodes-table tbody th').length >= 2")
        assert await window.complaints() == []
    wanted = {("mqtt", "connection budget"), ("Kafka", "Kafka silent")}
    flow = await stall.flow()
    assert {(each["subject"].partition(" ")[0], each["reason"]) for each in flow["episodes"]} >= wanted
    assert all(each["ended"] > each["began"] and each["paused_s"] > 0 for each in flow["episodes"])


async def check_console(window: Browser, stall: Stall) -> None:
    """Check the console while Kafka is frozen: narrow and wide, light and dark, with the keyboard only."""
    for width in WIDTHS:
        await window.resize(width)
        for scheme in ("light", "dark"):
            await window.scheme(scheme)
            await window.open(f"{stall.base}/console")
            await window.until("document.querySelectorAll('#paused-table tr.braked').length >= 2")
            assert await window.until("document.body.innerText.includes('Kafka silent')")
            fits, title, images, clients = await window.run(LOOK)
            assert (width, fits, title, images, clients) == (width, True, "Trivium", 0, 1)
            assert await window.run("return document.getElementById('version').textContent") == version()
            name = "return document.querySelector('#clients-table tbody th button').textContent"
            assert await window.run(name) == HOSTILE
            assert await window.run(CONTRAST) >= 4.5
            assert await window.complaints() == []
    focused = "return document.activeElement.matches(arguments[0])"
    await window.press(TAB)
    assert await window.run(focused, ".skip")
    await window.press(ENTER)
    assert await window.run(focused, "#main")
    for selector in ("#filter", "#clients-table tbody th button"):
        await window.press(TAB)
        assert await window.run(focused, selector)
    assert await window.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    await window.press(ENTER)
    await window.until("document.querySelectorAll('#clients-table .windows li').length === 2")
    seen = await window.run("return document.querySelector('#glance > div:last-child dd').textContent")
    await window.until(f"document.querySelector('#glance > div:last-child dd').textContent !== '{seen}'")
    assert await window.run(focused, "#clients-table tbody th button")  # the focus survives a refresh
    await window.run("document.getElementById('hold').focus()")
    await window.press(SPACE)
    assert await window.run("return document.getElementById('hold').getAttribute('aria-pressed')") == "true"
    await window.press(SPACE)
    await window.run("document.getElementById('filter').focus()")
    await window.press(*"nobody")
    await window.until("document.querySelector('#clients-table .empty') !== null")
    await window.press(*[BACKSPACE] * len("nobody"))
    await window.until("document.querySelector('#clients-table .empty') === null")
    assert await window.complaints() == []


async def test_a_produce_request_that_waits_for_kafka_is_shown(stall: Stall) -> None:
    posting = asyncio.create_task(stall.post())
    async with asyncio.timeout(60):
        while not (found := [each for each in (await stall.flow())["connections"] if each["protocol"] == "http"]):
            assert not posting.done()
        while not (found and found[0]["records"]):
            found = [each for each in (await stall.flow())["connections"] if each["protocol"] == "http"]
    (request,) = found
    (window,) = request["windows"]
    assert (request["principal"], request["records"], request["bytes"] > 0) == ("anonymous", 2, True)
    assert (window["name"], window["topic"], window["unsettled"]) == ("produce", stall.topic, 2)
    stall.thaw()
    assert await posting == 200
    assert not [each for each in (await stall.flow())["connections"] if each["protocol"] == "http"]
