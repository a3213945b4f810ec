"""Fixtures that every test shares: one broker for the whole run, topics of each test's own, uvloop as in production.

With CI set in the environment a skipped test is a failed one: there everything must have run, but for what needs data
that is not part of the repository.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from gateway.embedded.broker import EmbeddedBroker
from gateway.embedded.class_archive import archive_options, archive_path
from gateway.embedded.jars import cache_directory, ensure_jars
from gateway.embedded.java import find_java
from gateway.embedded.probe import broker_answers
from tests.support import hung, leftovers
from tests.support.by_file import ByFile, longest_first
from tests.support.gateway import GatewayProcess
from tests.support.outside import NOT_HERE
from tests.support.topics import create_topic

NewTopicFactory = Callable[..., Awaitable[str]]
NewBroker = Callable[..., EmbeddedBroker]

BOOTSTRAP = "TRIVIUM_TEST_BOOTSTRAP"
# An example may take its time, as where CI is set: the first one pays for what it imports, and the machine is busy.
SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("unhurried", hypothesis.settings(), deadline=None, suppress_health_check=SLOW)
hypothesis.settings.load_profile("unhurried")
# Every Java machine of the tests lives for seconds, in which a second compiler costs more than it gains.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")
# A run starts more than a hundred Python processes. Each would compile every module anew, for about two seconds, in an
# environment that forbids to keep what was compiled, as images of containers do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_configure(config: pytest.Config) -> None:
    """Jobs that tests start are not listed among the user's; workers inherit the variable."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        state = tempfile.TemporaryDirectory()
        config.add_cleanup(state.cleanup)
        os.environ["XDG_STATE_HOME"] = state.name


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is collected is kept until the end: looking through it again and again is an eighth of the time it takes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": hung.Loop}


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    return hung.set_timer(item, settings)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = fail_if_skipped((yield))
    if call.excinfo is not None and report.failed and not item.config.option.usepdb:
        hung.Loop.failed = True
        leftovers.forget(call.excinfo.value)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    return fail_if_skipped((yield))


def fail_if_skipped(report: Any) -> Any:
    if os.environ.get("CI") == "true" and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if NOT_HERE not in reason:
            report.outcome = "failed"
            report.longrepr = f"skipped although CI=true: {reason}"
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """With `-n`: one broker for all workers, who find its address in the environment that they inherit."""
    if BOOTSTRAP in os.environ:
        return
    directory = tempfile.TemporaryDirectory()
    config.add_cleanup(directory.cleanup)
    runner = asyncio.Runner(loop_factory=hung.Loop)
    config.add_cleanup(runner.close)
    broker = make_broker(Path(directory.name))
    runner.run(broker.start())
    config.add_cleanup(lambda: runner.run(broker.stop()))
    os.environ[BOOTSTRAP] = broker.bootstrap_servers


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        longest_first(items)


def make_broker(directory: Path, **options: Any) -> EmbeddedBroker:
    """A broker that keeps what a test stores with a time long ago; Kafka looks for such records every five minutes."""
    settings = {"log.retention.ms": "-1", **options.pop("settings", {})}
    java, jars = find_java(), ensure_jars("kafka")
    archive = archive_options(archive_path("kafka", java, jars, cache_directory()))
    options = {"heap": "512m", "java_options": archive, **options}
    return EmbeddedBroker(directory, java=java.path, jars=jars, settings=settings, **options)


@pytest.fixture(scope="session")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The broker's address: TRIVIUM_TEST_BOOTSTRAP, or an embedded broker for the run."""
    given = os.environ.get(BOOTSTRAP)
    if given:
        yield given
        return
    broker = make_broker(tmp_path_factory.mktemp("broker"))
    # A loop of its own: the fixture serves tests with and without a loop.
    with asyncio.Runner(loop_factory=hung.Loop) as runner:
        runner.run(broker.start())
        yield broker.bootstrap_servers
        runner.run(broker.stop())


@pytest.fixture(scope="session")
async def admin(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await client.start()
    yield client
    await client.close()


@pytest.fixture
def new_topic(admin: AIOKafkaAdminClient) -> NewTopicFactory:
    return partial(create_topic, admin)


@pytest.fixture(scope="session")
async def _stoppable(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedBroker]:
    broker = make_broker(tmp_path_factory.mktemp("stoppable"))
    yield broker
    await broker.kill()


async def _serves(bootstrap: str) -> bool:
    """Whether a broker leads what is made now; one that was frozen for long is fenced for a moment."""
    host, _, port = bootstrap.rpartition(":")
    if not await broker_answers(host, int(port)):
        return False
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        await admin.start()
        await create_topic(admin)
    except (KafkaError, AttributeError):  # aiokafka finds no controller
        return False
    finally:
        await admin.close()
    return True


@pytest.fixture
async def stoppable(_stoppable: EmbeddedBroker) -> EmbeddedBroker:
    """A broker that the test may stop, kill or freeze; it serves when a test begins, however the one before has ended.

    It is shared by the tests that do so, one after the other: topics and groups need names of the test's own.
    """
    if _stoppable.is_running:
        os.kill(_stoppable.pid, signal.SIGCONT)
    else:
        await _stoppable.start()
    async with asyncio.timeout(90):
        while not await _serves(_stoppable.bootstrap_servers):
            pass
    return _stoppable


@pytest.fixture
async def new_broker(tmp_path: Path) -> AsyncIterator[NewBroker]:
    """Make brokers of the test's own, on free ports, where `stoppable` does not do; not started yet.

    `new_broker(name="a", **options of EmbeddedBroker)`: the same name is the same data. All are killed at the end.
    """
    made: list[EmbeddedBroker] = []

    def make(name: str = "broker", **options: Any) -> EmbeddedBroker:
        made.append(make_broker(tmp_path / name, **options))
        return made[-1]

    yield make
    for broker in made:
        await broker.kill()


EVERY_TEST = "[kafka]\ncreate_topics = true\nmax_topics = 20000\nmax_topics_per_principal = 20000\n"
"""Topics of the whole run are made by one anonymous client."""


@pytest.fixture(scope="session")
async def gateway(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    """One gateway for all tests that only talk to it; it creates unknown topics, as with the embedded broker."""
    directory = tmp_path_factory.mktemp("gateway")
    options = ("--mqtt-websocket", "127.0.0.1:0", "--amqp-websocket", "127.0.0.1:0")
    process = GatewayProcess(directory, bootstrap, *options, config=EVERY_TEST)
    await process.start()
    yield process
    assert await process.stop() == 0


@pytest.fixture
async def new_gateway(tmp_path: Path) -> AsyncIterator[Callable[..., GatewayProcess]]:
    """Make gateways of the test's own (`new_gateway(bootstrap, *options, config=TOML)`); not started yet."""
    made: list[GatewayProcess] = []

    def make(bootstrap: str | None, *options: str, config: str = "", name: str = "gateway") -> GatewayProcess:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        made.append(GatewayProcess(directory, bootstrap, *options, config=config))
        return made[-1]

    yield make
    for process in made:
        await process.kill()
