"""The gateway as a process: how it starts, what it reports, how it stops, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import signal
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import aiohttp
import aiokafka
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from gateway.embedded.broker import EmbeddedBroker
from gateway.process.app import App
from gateway.process.cli import app
from gateway.settings.config import Config
from loadtest.ports import free_port
from tests.support.amqp import ThreadedSender
from tests.support.frozen import freeze
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import PahoClient
from tests.support.waiting import wait_until

STOP_LIMIT_S = 25.0  # ten by `drain_timeout_s`, plus a slow machine; a request to Kafka waits 30
FORCED = "amqp:connection:forced"
LISTENERS = ("mqtt", "amqp", "http", "management", "kafka")
CREATE = "[kafka]\ncreate_topics = true\n"


@pytest.fixture(autouse=True)
def as_a_user_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the gateways of this file from the command line."""
    monkeypatch.setattr(GatewayProcess, "is_forked", False)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def new_name() -> str:
    return f"p-{uuid.uuid4().hex[:10]}"


async def get(gateway: GatewayProcess, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{gateway.addresses['management']}{path}") as response,
    ):
        return response.status, await response.text()


async def metrics(gateway: GatewayProcess) -> dict[str, float]:
    """Return every metric by name, summed over its labels."""
    status, text = await get(gateway, "/metrics")
    assert status == 200
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


async def post(gateway: GatewayProcess, topic: str, body: bytes = b'{"records":[{"value":1}]}') -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{gateway.addresses['http']}/topics/{topic}",
            data=body,
            headers={"Content-Type": "application/vnd.kafka.json.v2+json"},
        ) as response,
    ):
        answer = await response.json(content_type=None)
        return response.status if response.status != 200 else answer["offsets"][0].get("error_code", 200)


async def accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except ConnectionRefusedError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


async def values(bootstrap: str, topic: str, count: int) -> list[bytes]:
    consumer = aiokafka.AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        return sorted([(await asyncio.wait_for(consumer.getone(), 60)).value for _ in range(count)])
    finally:
        await consumer.stop()


class Trio:
    """A client of each protocol, all on one topic."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self.gateway = gateway
        self.topic = new_name()
        self.mqtt = PahoClient(gateway.address("mqtt"))
        self.amqp = ThreadedSender(gateway.addresses["amqp"], self.topic)
        self.sent: list[tuple[int, asyncio.Task[str], asyncio.Task[int]]] = []

    async def connect(self) -> Trio:
        await self.mqtt.connect()
        await self.amqp.connect()
        return self

    def send(self) -> None:
        """Send one message by each protocol."""
        loop = asyncio.get_running_loop()
        self.sent.append(
            (
                self.mqtt.send(f"{self.topic}/k", b"mqtt"),
                loop.create_task(self.amqp.send(b"amqp")),
                loop.create_task(post(self.gateway, self.topic)),
            )
        )

    async def answers(self) -> tuple[int | None, str, int]:
        """Return the answers to the last send."""
        mid, amqp, http = self.sent[-1]
        await asyncio.wait([amqp, http], timeout=60)
        await wait_until(lambda: mid in self.mqtt.pubacks or self.mqtt.disconnected is not None)
        puback = self.mqtt.pubacks.get(mid)
        return (None if puback is None else puback.value), amqp.result(), http.result()

    def unanswered(self) -> bool:
        mid, amqp, http = self.sent[-1]
        return mid not in self.mqtt.pubacks and not amqp.done() and not http.done()

    async def close(self) -> None:
        await self.mqtt.close()
        await self.amqp.close()


STORED = (0, "ACCEPTED", 200)


def test_the_command_says_its_version() -> None:
    said = CliRunner().invoke(app, ["--version"])
    assert (said.exit_code, said.output) == (0, f"trivium {importlib.metadata.version('trivium')}\n")


# with the embedded broker


@pytest.mark.timeout(400)
async def test_the_embedded_broker_from_start_to_crash(
    new_gateway: Callable[..., GatewayProcess], tmp_path: Path
) -> None:
    options = ("--data-dir", str(tmp_path / "data"), "--kafka-port", "0")
    gateway = await new_gateway(None, *options).start()
    ready = gateway.addresses
    assert set(ready) == {*LISTENERS, "pid", "kafka_pid"}
    assert [await accepts(ready[name]) for name in LISTENERS] == [True] * len(LISTENERS)
    assert ready["pid"] == gateway.pid
    assert running_in(tmp_path) == [ready["kafka_pid"]]

    version = importlib.metadata.version("trivium")
    assert await get(gateway, "/healthy") == (200, f'{{"healthy":true,"version":"{version}"}}')
    assert json.loads((await get(gateway, "/ready"))[1])["version"] == version
    assert (
        f'trivium_build_info{{python="{platform.python_version()}",version="{version}"}} 1.0'
        in (await get(gateway, "/metrics"))[1]
    )
    told = [line for line in map(json.loads, gateway.log.read_text().splitlines()) if line["event"] == "ready"]
    assert [line["console"] for line in told] == [f"http://{ready['management']}/console"]
    first = json.loads(gateway.log.read_text().splitlines()[0])
    assert (first["event"], first["version"]) == ("starting", version)
    status, text = await get(gateway, "/ready")
    assert (status, json.loads(text)["ready"]) == (200, True)

    trio = await Trio(gateway).connect()
    before = await metrics(gateway)
    trio.send()
    assert await trio.answers() == STORED
    after = await metrics(gateway)
    for name, by in {
        "trivium_mqtt_messages_published_total": 1,
        "trivium_mqtt_messages_acknowledged_total": 1,
        "trivium_amqp_incoming_total": 1,
        "trivium_publisher_records_total": 3,
        "trivium_http_requests_total": 1,
    }.items():
        assert after[name] - before.get(name, 0) == by, name
    text = (await get(gateway, "/metrics"))[1]
    for protocol in ("mqtt", "amqp", "http"):
        assert f'trivium_publisher_acknowledged_seconds_count{{protocol="{protocol}"}} 1.0' in text
    assert after["trivium_publisher_state_records_total"] > 0  # the heartbeat, which is no client's message
    for prefix in ("trivium_live_reader_", "trivium_authentication_", "trivium_event_loop_", "process_"):
        assert any(name.startswith(prefix) for name in after), prefix

    # A broker that dies is restarted; clients wait meanwhile.
    os.kill(ready["kafka_pid"], signal.SIGKILL)
    await wait_until(lambda: json.loads(gateway.ready_file.read_text())["kafka_pid"] != ready["kafka_pid"])
    again = json.loads(gateway.ready_file.read_text())
    assert is_alive(again["kafka_pid"])
    assert again["kafka"] == ready["kafka"]
    trio.send()
    assert await trio.answers() == STORED
    assert trio.mqtt.disconnected is None
    await trio.close()

    # A clean stop leaves no process behind; after a restart all data is there.
    assert await gateway.stop(STOP_LIMIT_S) == 0
    assert not is_alive(again["kafka_pid"])
    assert not gateway.ready_file.exists()
    await gateway.start()
    assert await values(gateway.addresses["kafka"], trio.topic, 6) == [b"1", b"1", b"amqp", b"amqp", b"mqtt", b"mqtt"]

    # A killed gateway cannot stop its broker, but the broker ends anyway.
    orphan = gateway.addresses["kafka_pid"]
    assert is_alive(orphan)
    await gateway.kill()
    await wait_until(lambda: not is_alive(orphan))


async def test_a_signal_during_the_start_ends_it(new_gateway: Callable[..., GatewayProcess], tmp_path: Path) -> None:
    gateway = new_gateway(None, "--data-dir", str(tmp_path / "data"), "--kafka-port", "0")
    starting = asyncio.create_task(gateway.start())
    settings = tmp_path / "data" / "kafka" / "server.properties"  # written just before Java starts
    await wait_until(settings.exists)
    assert gateway.process is not None
    assert await gateway.stop(STOP_LIMIT_S) == 0
    with pytest.raises(RuntimeError):
        await starting
    assert running_in(tmp_path) == []
    assert "Traceback" not in gateway.log.read_text()


async def test_the_ready_file_of_a_killed_gateway_does_not_outlive_the_next_start(tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    file.write_text("{}")
    seen = []

    class Starting(App):
        async def _start(self, stack: contextlib.AsyncExitStack) -> None:
            seen.append(file.exists())
            asyncio.get_running_loop().call_soon(self._on_stop)
            await self._stop.wait()

    await Starting(Config(), file).run()
    assert seen == [False]


def running_in(directory: Path) -> list[int]:
    """Return the processes whose working directory is below `directory`; the broker runs in its data directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            inside = (entry / "cwd").readlink().is_relative_to(directory)
        except OSError:  # ended meanwhile
            continue
        if inside and is_alive(int(entry.name)):
            found.append(int(entry.name))
    return found


# with a broker that freezes


async def in_flight(gateway: GatewayProcess, count: int) -> None:
    async def reached() -> bool:
        return (await metrics(gateway))["trivium_publisher_records_in_flight"] == count

    await wait_until(reached)


async def is_ready(gateway: GatewayProcess) -> bool:
    return (await get(gateway, "/ready"))[0] == 200


async def is_not_ready(gateway: GatewayProcess) -> bool:
    return not await is_ready(gateway)


async def refuses(address: str) -> bool:
    return not await accepts(address)


async def test_sigterm_settles_records_in_flight_before_each_protocols_close(
    stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess]
) -> None:
    # Half of the time is for Kafka's answers; the maximum allowed, for a slow machine.
    gateway = await new_gateway(stoppable.bootstrap_servers, config=f"drain_timeout_s = 10\n{CREATE}").start()
    trio = await Trio(gateway).connect()
    trio.send()
    assert await trio.answers() == STORED
    async with aiohttp.ClientSession() as idle:
        async with idle.get(f"http://{gateway.addresses['http']}/topics") as response:
            await response.read()
        order: list[str] = []
        trio.mqtt.paho.on_publish = lambda _c, _d, mid, reason, _p: (
            order.append("puback"), trio.mqtt.pubacks.update({mid: reason}),
        )  # fmt: skip
        trio.mqtt.paho.on_disconnect = lambda _c, _d, _f, reason, _p: (
            order.append("disconnect"), setattr(trio.mqtt, "disconnected", reason),
        )  # fmt: skip
        freeze(stoppable.pid)
        try:
            trio.send()
            await in_flight(gateway, 3)
            loop = asyncio.get_running_loop()
            began = loop.time()
            stopping = loop.create_task(gateway.stop())
            await wait_until(lambda: refuses(gateway.addresses["mqtt"]))
            assert trio.unanswered()
            refused = await idle_answer(idle, gateway)
        finally:
            os.kill(stoppable.pid, signal.SIGCONT)
        assert await trio.answers() == STORED
        assert await trio.amqp.end() == FORCED
        await wait_until(lambda: trio.mqtt.disconnected is not None)
        assert trio.mqtt.disconnected.value == 0x8B
        assert order == ["puback", "disconnect"]
        assert refused in (503, None)
        assert await stopping == 0
        assert loop.time() - began < STOP_LIMIT_S, "nobody waits any more when Kafka has answered"
    assert not gateway.ready_file.exists()
    assert "Traceback" not in gateway.log.read_text()
    await trio.mqtt.close()


async def idle_answer(session: aiohttp.ClientSession, gateway: GatewayProcess) -> int | None:
    """Return the status of a request on an idle connection. None means that it was closed."""
    try:
        async with session.get(f"http://{gateway.addresses['http']}/topics") as response:
            return response.status
    except aiohttp.ClientConnectionError:
        return None


async def test_with_kafka_frozen_it_stops_in_time_and_is_not_ready(
    stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess]
) -> None:
    stopped = await new_gateway(stoppable.bootstrap_servers, config=CREATE, name="stopped").start()
    waiting = await new_gateway(stoppable.bootstrap_servers, config=CREATE, name="waiting").start()
    one, other = await Trio(stopped).connect(), await Trio(waiting).connect()
    for trio in (one, other):
        await trio.mqtt.subscribe(f"{trio.topic}/#")
        trio.send()
        assert await trio.answers() == STORED
    freeze(stoppable.pid)
    try:
        for trio in (one, other):
            trio.send()
            await in_flight(trio.gateway, 3)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await stopped.stop() == 0
        assert loop.time() - began < STOP_LIMIT_S
        mqtt, amqp, http = await one.answers()
        assert (mqtt, http) == (0x97, 503)
        assert amqp in ("MODIFIED", "RELEASED")
        assert await one.amqp.end() == FORCED
        assert one.mqtt.disconnected.value == 0x8B

        await wait_until(lambda: is_not_ready(waiting))
        status, text = await get(waiting, "/ready")
        assert (status, json.loads(text)["kafka"]) == (503, False)
        assert (await get(waiting, "/healthy"))[0] == 200
        assert other.unanswered()
    finally:
        os.kill(stoppable.pid, signal.SIGCONT)
    assert await other.answers() == STORED
    await wait_until(lambda: is_ready(waiting))
    await other.close()
    await one.mqtt.close()
    assert await waiting.stop() == 0
    assert not re.search(r'Traceback|"exception"', stopped.log.read_text() + waiting.log.read_text())


async def test_without_kafka_it_listens_and_is_not_ready_until_kafka_answers(
    stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess], free_address: str
) -> None:
    gateway = new_gateway(stoppable.bootstrap_servers, "--management", free_address)
    gateway.addresses["management"] = free_address
    freeze(stoppable.pid)
    try:
        starting = asyncio.create_task(gateway.start())
        await wait_until(lambda: accepts(free_address))
        assert await is_not_ready(gateway)
        assert not gateway.ready_file.exists()
        assert [f'"protocol": "{name}", "address"' in gateway.log.read_text() for name in LISTENERS[:3]] == [True] * 3
    finally:
        os.kill(stoppable.pid, signal.SIGCONT)
    await asyncio.wait_for(starting, 60)
    assert await is_ready(gateway)
    assert await gateway.stop() == 0


async def test_a_stop_during_the_start_is_no_readiness(
    stoppable: EmbeddedBroker, new_gateway: Callable[..., GatewayProcess], free_address: str
) -> None:
    gateway = new_gateway(stoppable.bootstrap_servers, "--management", free_address)
    freeze(stoppable.pid)
    try:
        starting = asyncio.create_task(gateway.start())
        await wait_until(lambda: '"event": "starting"' in gateway.log.read_text() if gateway.log.exists() else False)
        assert await gateway.stop() == 0
        with pytest.raises(RuntimeError, match="did not start"):
            await starting
    finally:
        os.kill(stoppable.pid, signal.SIGCONT)
    assert '"event": "ready"' not in gateway.log.read_text()
    assert not gateway.ready_file.exists()


@pytest.fixture
def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


# what it refuses, and the commands that only read


async def trivium(*arguments: str, **environment: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment},
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


def complaint(said: str) -> str:
    """Return the one line for the user; the rest of standard error is the log."""
    (line,) = [line for line in said.splitlines() if not line.startswith("{")]
    return line


@pytest.mark.parametrize("listener", ["mqtt", "amqp", "http", "management"])
async def test_a_port_in_use_is_told_before_kafka_is_asked(tmp_path: Path, listener: str) -> None:
    server = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
    taken = "{}:{}".format(*server.sockets[0].getsockname())
    addresses = dict.fromkeys(("mqtt", "amqp", "http", "management"), "127.0.0.1:0") | {listener: taken}
    options = [word for name, address in addresses.items() for word in (f"--{name}", address)]
    ready = tmp_path / "ready.json"
    code, _, said = await trivium("up", "--bootstrap-servers", "127.0.0.1:1", "--ready-file", str(ready), *options)
    server.close()
    await server.wait_closed()
    assert code == 2
    assert complaint(said) == f"trivium: {listener}.address: {taken} is in use by another program"
    assert not ready.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[mqtt]\naddress = "nowhere"', ("mqtt.address", "HOST:PORT")),
        ("[mqtt]\nreceive_maximum = 0", ("mqtt.receive_maximum", "greater than or equal to 1", "got 0")),
        ("[mqtt]\nadress = 1", ("mqtt.adress", "not permitted")),
        ("[nonsense]\na = 1", ("nonsense", "not permitted")),
        ("[security]\nallow_anonymous = false", ("security.allow_anonymous", "no client could log in")),
        ('[security]\npassword_file = "/missing"', ("security.password_file", "/missing")),
        ('[[mapping.rules]]\nmqtt = "a/#/b"\ntopic = "t"', ("mapping.rules", "a/#/b")),
        ("[mqtt", ("not valid TOML",)),
        ('[kafka]\nsasl_password = 5', ("kafka.sasl_password",)),
    ],
)  # fmt: skip
def test_a_bad_configuration_is_refused_with_the_keys_name(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "trivium.toml"
    file.write_text(text)
    result = CliRunner().invoke(app, ["config", "check", "--config", str(file)])
    assert (result.exit_code, result.stdout) == (2, "")
    for word in words:
        assert word in complaint(result.stderr)
    result = CliRunner().invoke(app, ["config", "check", "--config", str(file), "--json"])
    found = json.loads(result.stdout)
    assert (result.exit_code, result.stderr, found["valid"]) == (2, "", False)
    assert all(word in found["errors"][0] for word in words)


async def test_a_configuration_that_check_refuses_does_not_start(tmp_path: Path) -> None:
    file = tmp_path / "trivium.toml"
    for text, key in (
        ("[mqtt]\nadress = 1", "mqtt.adress"),
        ("[security]\nallow_anonymous = false", "allow_anonymous"),
    ):
        file.write_text(text)
        code, _, said = await trivium("up", "--config", str(file))
        assert code == 2
        assert key in complaint(said)


async def test_flags_override_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "trivium.toml"
    file.write_text('[mqtt]\nreceive_maximum = 7\nmax_subscriptions = 8\n[kafka]\nsasl_password = "hush-hush"\n')
    code, out, _ = await trivium(
        "config", "show", "--config", str(file),
        TRIVIUM_MQTT__RECEIVE_MAXIMUM="9", TRIVIUM_TEST_BOOTSTRAP="127.0.0.1:1", TRIVIUM_CACHE=str(tmp_path),
    )  # fmt: skip
    assert code == 0
    shown = json.loads(out)
    assert (shown["mqtt"]["receive_maximum"], shown["mqtt"]["max_subscriptions"]) == (9, 8)
    assert "hush-hush" not in out
    code, _, said = await trivium("config", "check", TRIVIUM_MQTT__RECEIVE_MAXIMUM="none")
    assert code == 2
    assert "mqtt.receive_maximum" in complaint(said)


async def test_check_accepts_a_valid_configuration(tmp_path: Path) -> None:
    file = tmp_path / "trivium.toml"
    file.write_text('[mqtt]\naddress = "127.0.0.1:0"\n[[mapping.rules]]\nmqtt = "a/+/b"\ntopic = "t"\n')
    code, out, _ = await trivium("config", "check", "--config", str(file))
    assert (code, out) == (0, "The configuration is valid.\n")
    code, out, _ = await trivium("config", "check", "--config", str(file), "--json")
    assert (code, json.loads(out)) == (0, {"valid": True, "errors": []})


async def test_help_needs_no_heavy_imports() -> None:
    code, out, _ = await trivium("--help")
    assert code == 0
    assert "up" in out
    heavy = ["aiokafka", "aiohttp", "uvloop", "proton", "pyspark", "structlog"]
    script = f"import sys; import gateway.process.cli; print([name for name in {heavy} if name in sys.modules])"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    assert printed == b"[]\n"
