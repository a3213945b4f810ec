"""Optional parts: a gateway without them serves the three protocols, and refuses their settings by name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from proton import Message

from gateway.runtime.parts import PARTS
from tests.support.amqp import as_client_of
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient
from tests.support.waiting import wait_until
from tests.support.without_parts import environment

VALUES = {
    "audit": '[audit]\nfile = "audit.jsonl"',
    "http.dialect": '[http]\ndialect = "confluent"',
    "http.reply_topic": '[http]\nreply_topic = "answers"',
    "http.max_requests": "[http]\nmax_requests = 5",
    "http.max_requests_per_client": "[http]\nmax_requests_per_client = 5",
    "http.max_request_wait_s": "[http]\nmax_request_wait_s = 5",
    "embedded": "[embedded]\nport = 19092",
    "presence": '[presence]\ntopic = "presence"',
    "security.tenants": '[security.tenants]\nsources = ["listener"]',
}
"""A setting for each key of a part."""
GIVEN = {
    "audit": "audit.file",
    "embedded": "embedded.port",
    "presence": "presence.topic",
    "security.tenants": "security.tenants.sources",
}
"""The key in it, where the part's key is a section."""
KEYS = [(name, key) for name, part in PARTS.items() for key in part.keys]


def run(directory: Path, *arguments: str, stay: Collection[str] = (), **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        env={**os.environ, **environment(stay=set(stay)), **more},
        cwd=directory, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("part", "key"), KEYS)
def test_a_setting_of_an_absent_part_stops_the_start_by_name(tmp_path: Path, part: str, key: str) -> None:
    (tmp_path / "trivium.toml").write_text(f'{VALUES[key]}\n[kafka]\nbootstrap_servers = "127.0.0.1:1"\n')
    refused = run(tmp_path, "config", "check")
    assert refused.returncode == 2
    assert f"{GIVEN.get(key, key)}: the part `{part}` is not installed" in refused.stderr


def test_all_of_these_settings_are_good_where_the_parts_are(tmp_path: Path) -> None:
    sections: dict[str, list[str]] = {"[kafka]": ['bootstrap_servers = "127.0.0.1:1"']}
    for text in VALUES.values():
        section, value = text.split("\n")
        sections.setdefault(section, []).append(value)
    (tmp_path / "trivium.toml").write_text("\n".join("\n".join((name, *lines)) for name, lines in sections.items()))
    assert run(tmp_path, "config", "check", stay=PARTS).returncode == 0


def test_settings_that_turn_a_part_off_are_good_without_it(tmp_path: Path) -> None:
    (tmp_path / "trivium.toml").write_text(
        '[presence]\ntopic = ""\n[security.tenants]\nsources = []\n[kafka]\nbootstrap_servers = "127.0.0.1:1"\n'
    )
    assert run(tmp_path, "config", "check").returncode == 0


@pytest.mark.parametrize("command", [("up",), ("config", "check")])
def test_without_a_kafka_of_its_own_it_needs_another(tmp_path: Path, command: tuple[str, ...]) -> None:
    refused = run(tmp_path, *command)
    assert refused.returncode == 2
    assert "kafka.bootstrap_servers is not set: the part `embedded kafka` is not installed" in refused.stderr


def test_the_commands_of_absent_parts_are_absent(tmp_path: Path) -> None:
    def commands(text: str) -> set[str]:
        return set(re.findall(r"^│ (\w+) ", text, re.MULTILINE))

    offered, left = (commands(run(tmp_path, "--help", stay=stay).stdout) for stay in (PARTS, ()))
    assert offered - left == {"doctor", "spark", "trace"}
    hidden = {"TESTS_HIDDEN": "gateway.trace gateway.embedded gateway.kafka.cluster.doctor"}  # but not the commands
    assert commands(run(tmp_path, "--help", stay=PARTS, **hidden).stdout) == left
    assert left >= {"up", "config", "clients", "drain"}


async def test_the_core_alone_carries_messages_between_the_protocols(
    new_gateway: Callable[..., GatewayProcess], bootstrap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(stay=set()).items():
        monkeypatch.setenv(name, value)
    gateway = new_gateway(bootstrap, config="[kafka]\ncreate_topics = true")
    gateway.is_forked = False
    await gateway.start()
    topic = f"core-{uuid.uuid4().hex[:8]}"
    device = await PahoClient(gateway.address("mqtt")).connect()
    await device.subscribe(f"{topic}/#")
    assert await device.publish(f"{topic}/a", b"mqtt") == 0

    def send(connection: Any) -> None:
        connection.create_sender(topic).send(Message(body=b"amqp", subject="b"))

    await as_client_of(gateway.addresses["amqp"], send)
    async with aiohttp.ClientSession(f"http://{gateway.addresses['http']}") as http:
        headers = {"Content-Type": "application/vnd.kafka.json.v2+json"}
        async with http.post(f"/topics/{topic}", data=b'{"records": [{"value": "http"}]}', headers=headers) as answer:
            assert answer.status == 200
        await wait_until(lambda: len(device.messages) >= 3)
        for path in ("/v2/topics", "/v3/clusters", "/stream"):
            async with http.get(path) as answer:
                assert answer.status == 404, path
        async with http.get("/openapi") as answer:
            paths = (await answer.json())["paths"]
        assert "/topics/{topicname}" in paths
        assert not [path for path in paths if path.startswith(("/v2", "/v3", "/requests", "/stream"))]
    async with aiohttp.ClientSession(f"http://{gateway.addresses['management']}") as http:
        async with http.post("/trace", json={"address": "127.0.0.1"}) as answer:
            assert answer.status == 404
        async with http.get("/clients") as answer:
            assert "mqtt" in await answer.text()
    await device.close()
    assert await gateway.stop() == 0
