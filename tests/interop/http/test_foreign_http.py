"""curl, Node's fetch, EventSource and WebSocket, and kcat for Kafka, each as its users run it."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import NewTopicFactory
from tests.interop.toolchains import ToolchainError, node_packages
from tests.support.gateway import GatewayProcess
from tests.support.topics import read_all

NODE = Path(__file__).with_name("node")
RUN_S = 60.0
JSON_TYPE = "Content-Type: application/vnd.kafka.json.v2+json"
needs_kcat = pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


async def run(*argv: str, given: bytes | None = None) -> str:
    """Run a command and return its output."""
    # A command that reads nothing gets no pipe: it may end before the pipe is used, which is an error in uvloop.
    stdin = asyncio.subprocess.PIPE if given else asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=stdin, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(RUN_S):
            printed, complained = await process.communicate(given or None)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (argv, printed, complained)
    return printed.decode()


@pytest.fixture
def url(gateway: GatewayProcess) -> str:
    """Return the base URL of the gateway's HTTP listener."""
    host, port = gateway.address("http")
    return f"http://{host}:{port}"


async def test_node_publishes_polls_and_uses_streams_and_websockets(url: str, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=1)
    try:
        node = await asyncio.to_thread(node_packages, NODE)
    except ToolchainError as error:
        pytest.skip(str(error))
    told = json.loads(await run(node, str(NODE / "client.mjs"), url, topic))
    assert told == {
        "produce": {
            "single": {"status": 200, "body": {"offsets": [{"partition": 0, "offset": 0}]}},
            "reports": [{"partition": 0, "offset": offset} for offset in (1, 2, 3)],
        },
        "consume": {"created": 200, "values": [0, 1, 2, 3], "committed": 204, "deleted": 204},
        "listen": {"opened": 2, "values": [0, 1, 2, 3]},  # the second stream continues where the first ended
        "live": {
            "protocol": "trivium.v1",
            "stored": [{"partition": 0, "offset": 4}],
            "values": [0, 1, 2, 3, 4],
            "code": 1005,  # closed without a status code
        },
    }


def posted(number: int) -> bytes:
    return json.dumps({"records": [{"value": number}]}).encode()


@needs_curl
async def test_curl_can_send_a_body_in_every_way(
    url: str, bootstrap: str, new_topic: NewTopicFactory, tmp_path: Path
) -> None:
    topic = await new_topic(partitions=1)
    large = json.dumps({"records": [{"value": "x" * 700}] * 1000}).encode()  # large enough for Expect: 100-continue
    (tmp_path / "large.json").write_bytes(large)
    (tmp_path / "packed.json.gz").write_bytes(gzip.compress(posted(4)))
    ways: dict[str, tuple[list[str], bytes]] = {
        "plain": ([], posted(1)),
        "old": (["--http1.0"], posted(2)),
        "chunked": (["-H", "Transfer-Encoding: chunked"], posted(3)),
        "gzip": (["-H", "Content-Encoding: gzip", "--data-binary", f"@{tmp_path}/packed.json.gz"], b""),
        "asking": (["-H", "Expect: 100-continue", "--expect100-timeout", "30"], posted(5)),
        "upgrading": (["--http2"], posted(6)),  # offers an upgrade to HTTP/2, which the gateway ignores
        "packed answer": (["--compressed"], posted(7)),
    }
    for name, (options, body) in ways.items():
        source = [] if "--data-binary" in options else ["--data-binary", "@-"]
        printed = await run(
            "curl",
            "-sS",
            "-w",
            "\n%{http_code}",
            "-H",
            JSON_TYPE,
            *options,
            *source,
            f"{url}/topics/{topic}",
            given=body,
        )
        answer, _, status = printed.rpartition("\n")
        assert status == "200", (name, answer)
        assert [entry["partition"] for entry in json.loads(answer)["offsets"]] == [0], name
    printed = await run(
        "curl", "-sS", "-H", JSON_TYPE, "--data-binary", f"@{tmp_path}/large.json", f"{url}/topics/{topic}"
    )
    assert len(json.loads(printed)["offsets"]) == 1000
    stored = await read_all(bootstrap, topic)
    assert [record.value for record in stored] == [b"%d" % number for number in range(1, 8)] + [
        b'"%b"' % (b"x" * 700)
    ] * 1000


@needs_curl
async def test_curl_gets_an_error_and_reuses_the_connection(url: str, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=1)
    path = f"{url}/topics/{topic}"
    once = ["-sS", "-w", "%{http_code} %{num_connects}\n", "-o", "/dev/null", "-H", JSON_TYPE, "-d"]
    printed = await run("curl", *once, '{"records":[{"value":1}]}', path, "--next", *once, '{"records":[{}]}', path)
    assert printed.splitlines() == ["200 1", "400 0"]


@needs_kcat
async def test_kcat_reads_what_http_wrote(url: str, bootstrap: str, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=2)
    records = [
        {"key": "kitchen/temp", "value": {"t": 21.50}, "partition": 1, "timestamp": 1_700_000_000_000,
         "headers": [{"key": "unit", "value": "wrBD"}, {"key": "unit", "value": ""}]},
        {"key": None, "value": None, "partition": 1},
    ]  # fmt: skip
    body = json.dumps({"records": records}).encode()
    await run("curl", "-sSf", "-H", JSON_TYPE, "--data-binary", "@-", f"{url}/topics/{topic}", given=body)
    printed = await run("kcat", "-b", bootstrap, "-C", "-t", topic, "-p", "1", "-o", "beginning", "-c", "2", "-e", "-J")
    first, second = (json.loads(line) for line in printed.splitlines())
    headers = list(zip(first["headers"][::2], first["headers"][1::2], strict=True))
    assert (first["key"], first["payload"], first["ts"]) == ("kitchen/temp", '{"t":21.5}', 1_700_000_000_000)
    assert headers[:2] == [("unit", "°C"), ("unit", "")]
    assert {("content-type", "application/json"), ("gw.protocol", "http")} <= set(headers)
    assert (second["key"], second["payload"]) == (None, None)


@needs_kcat
async def test_http_reads_what_kcat_wrote(url: str, bootstrap: str, new_topic: NewTopicFactory) -> None:
    topic = await new_topic(partitions=1)
    await run(
        "kcat", "-b", bootstrap, "-P", "-t", topic, "-K", "|", "-H", "unit=C", "-H", "room=bath",
        given=b'a/b|{"n":1}\n"q"|[2]\n',
    )  # fmt: skip
    await run("kcat", "-b", bootstrap, "-P", "-t", topic, "-Z", "-K", "|", given=b"gone|\n")
    printed = await run("curl", "-sSf", f"{url}/topics/{topic}/records?offset=0&partition=0&limit=3")
    headers = [{"key": "unit", "value": "Qw=="}, {"key": "room", "value": "YmF0aA=="}]
    assert [(record["key"], record["value"], record.get("headers")) for record in json.loads(printed)] == [
        ("a/b", {"n": 1}, headers), ("q", [2], headers), ("gone", None, None),
    ]  # fmt: skip
