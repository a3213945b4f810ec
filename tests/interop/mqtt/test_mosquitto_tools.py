"""The command-line tools mosquitto_pub, mosquitto_sub and mosquitto_rr, in MQTT 5, 3.1.1 and 3.1."""

from __future__ import annotations

import asyncio
import json
import shutil
import uuid
from collections.abc import AsyncIterator

import pytest

from tests.interop.mqtt.clients import HIVEMQ
from tests.interop.mqtt.conftest import NewClient
from tests.support.gateway import GatewayProcess

pytestmark = pytest.mark.skipif(shutil.which("mosquitto_rr") is None, reason="mosquitto-clients is not installed")

VERSIONS = ["mqttv5", "mqttv311", "mqttv31"]
WAIT_S = 60


class Tools:
    """The three commands, with options for the gateway's address and the version."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self, command: str, version: str, *options: str) -> asyncio.subprocess.Process:
        host, port = self._address
        process = await asyncio.create_subprocess_exec(
            "stdbuf", "-oL", command, "-h", host, "-p", str(port), "-V", version, *options,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        self._processes.append(process)
        return process

    async def run(self, command: str, version: str, *options: str, lines: list[str] | None = None) -> list[str]:
        """Run a command to its end; return the lines that it printed."""
        process = await self.start(command, version, *options)
        fed = None if lines is None else "".join(f"{line}\n" for line in lines).encode()
        out, _ = await asyncio.wait_for(process.communicate(fed), WAIT_S)
        assert process.returncode == 0, out
        return out.decode().splitlines()

    async def kill(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
                await process.communicate()


@pytest.fixture
async def tools(gateway: GatewayProcess) -> AsyncIterator[Tools]:
    made = Tools(gateway.address("mqtt"))
    yield made
    await made.kill()


async def said(process: asyncio.subprocess.Process, word: str) -> None:
    """Wait until the process has printed a line with the word."""
    assert process.stdout is not None
    while word.encode() not in await asyncio.wait_for(process.stdout.readline(), WAIT_S):
        assert not process.stdout.at_eof()


def kept() -> list[str]:
    """Return the options of a persistent session."""
    return ["-c", "-i", f"m-{uuid.uuid4().hex[:10]}"]


@pytest.mark.parametrize("qos", ["1", "2"])
@pytest.mark.parametrize("version", VERSIONS)
async def test_a_persistent_session_collects_piped_messages(tools: Tools, branch: str, version: str, qos: str) -> None:
    subscriber = [*kept(), "-q", qos, "-t", f"{branch}/+"]
    assert await tools.run("mosquitto_sub", version, *subscriber, "-E") == []
    lines = [f"line {number}" for number in range(100)]
    await tools.run("mosquitto_pub", version, "-q", qos, "-t", f"{branch}/a", "-l", lines=lines)
    seen = await tools.run("mosquitto_sub", version, *subscriber, "-C", "100", "-F", "%q %t %p")
    assert seen == [f"{qos} {branch}/a {line}" for line in lines]


@pytest.mark.parametrize("version", VERSIONS)
async def test_retained_messages_are_set_seen_and_removed(tools: Tools, branch: str, version: str) -> None:
    for name in ("a", "b"):
        await tools.run("mosquitto_pub", version, "-q", "1", "-t", f"{branch}/{name}", "-m", f"kept {name}", "-r")
    seen = await tools.run("mosquitto_sub", version, "-t", f"{branch}/#", "-C", "2", "-F", "%r %t %p")
    assert sorted(seen) == [f"1 {branch}/a kept a", f"1 {branch}/b kept b"]
    await tools.run("mosquitto_pub", version, "-q", "2", "-t", f"{branch}/a", "-n", "-r")
    assert await tools.run("mosquitto_sub", version, "-t", f"{branch}/#", "-C", "1", "-F", "%p") == ["kept b"]
    # It clears each retained message that it receives with an empty one at QoS 1, and keeps running.
    clearing = await tools.start("mosquitto_sub", version, "-d", "-t", f"{branch}/#", "--remove-retained")
    await said(clearing, "received PUBACK")
    await tools.run("mosquitto_pub", version, "-q", "1", "-t", f"{branch}/c", "-m", "kept c", "-r")
    assert await tools.run("mosquitto_sub", version, "-t", f"{branch}/#", "-C", "1", "-F", "%p") == ["kept c"]
    await tools.run("mosquitto_pub", version, "-q", "1", "-t", f"{branch}/c", "-n", "-r")


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_killed_command_publishes_its_will(tools: Tools, branch: str, version: str) -> None:
    watcher = [*kept(), "-q", "1", "-t", f"{branch}/wills"]
    await tools.run("mosquitto_sub", version, *watcher, "-E")
    will = ["--will-topic", f"{branch}/wills", "--will-payload", "killed", "--will-qos", "1"]
    killed = await tools.start("mosquitto_sub", version, "-d", "-t", f"{branch}/other", *will)
    await said(killed, "Subscribed")
    killed.kill()
    assert await tools.run("mosquitto_sub", version, *watcher, "-C", "1") == ["killed"]


async def test_properties_as_json(tools: Tools, branch: str) -> None:
    subscriber = [*kept(), "-q", "1", "-t", f"{branch}/a", "-D", "subscribe", "subscription-identifier", "42"]
    await tools.run("mosquitto_sub", "mqttv5", *subscriber, "-E")
    given = ["content-type text/plain", "response-topic r/t", "correlation-data c-1", "payload-format-indicator 1"]
    options = [word for one in given for word in ("-D", "publish", *one.split())]
    for name, value in (("b", "1"), ("a", "2"), ("b", "3")):
        options += ["-D", "publish", "user-property", name, value]
    await tools.run("mosquitto_pub", "mqttv5", "-q", "1", "-t", f"{branch}/a", "-m", "text", *options)
    [line] = await tools.run("mosquitto_sub", "mqttv5", *subscriber, "-C", "1", "-F", "%j")
    # Parsed as pairs, because its JSON has user properties as an object, even with repeated names.
    seen = dict(json.loads(line, object_pairs_hook=list))
    properties = dict(seen["properties"])
    assert properties.pop("user-properties") == [("b", "1"), ("a", "2"), ("b", "3")]
    assert properties == {
        "content-type": "text/plain",
        "response-topic": "r/t",
        "correlation-data": "c-1",
        "payload-format-indicator": 1,
        "subscription-identifier": 42,
    }


async def test_mosquitto_rr_asks_and_hivemqs_client_answers(tools: Tools, new_client: NewClient, branch: str) -> None:
    server = await new_client(HIVEMQ)
    await server.subscribe(f"{branch}/requests", qos=1)
    asking = asyncio.get_running_loop().create_task(
        tools.run(
            "mosquitto_rr",
            "mqttv5",
            "-q",
            "1",
            "-t",
            f"{branch}/requests",
            "-e",
            f"{branch}/answers",
            "-m",
            "6 x 7",
            "-D",
            "publish",
            "correlation-data",
            "abc",
        )
    )
    [request] = await server.received(1)
    assert (request.payload, request.properties["correlation_data"]) == (b"6 x 7", b"abc")
    assert await server.publish(request.properties["response_topic"], b"42", correlation_data=b"abc") == 0
    assert await asking == ["42"]
