"""Fixtures for all tests: one broker for the whole run, new topics for each test, uvloop as in production.

With CI set in the environment a skipped test counts as failed, except a test whose data is not part of the repository.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import structlog
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError
from structlog.dev import ConsoleRenderer, plain_traceback
from structlog.testing import capture_logs

from gateway.embedded.broker import EmbeddedBroker
from gateway.embedded.class_archive import archive_options, archive_path
from gateway.embedded.jars import cache_directory, ensure_jars
from gateway.embedded.java import find_java
from gateway.kafka.driver.probe import broker_answers
from tests.support import contained, hung, leftovers, one_loop
from tests.support.by_file import ByFile, longest_first
from tests.support.forks import forks
from tests.support.gateway import GatewayProcess
from tests.support.outside import NOT_HERE
from tests.support.topics import create_topic

NewTopicFactory = Callable[..., Awaitable[str]]
NewBroker = Callable[..., EmbeddedBroker]

BOOTSTRAP = "TRIVIUM_TEST_BOOTSTRAP"
# No deadline for an example, as with CI set: the first one pays for its imports, and the machine is busy.
SLOW = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("unhurried", hypothesis.settings(), deadline=None, suppress_health_check=SLOW)
hypothesis.settings.register_profile(
    "fuzz", hypothesis.settings.get_profile("unhurried"), max_examples=3_000, derandomize=False
)  # make fuzz
hypothesis.settings.load_profile("unhurried")
# Each JVM of the tests lives only for seconds. In that time the C2 compiler costs more than it gains.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")
# A run starts more than a hundred Python processes. Where bytecode is not written, as in container images, each would
# compile all modules again, for about two seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# By default structlog shows the local variables of every frame of an exception, which took a test half a minute.
RENDERER = ConsoleRenderer(exception_formatter=plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], contained.note, RENDERER])


def pytest_configure(config: pytest.Config) -> None:
    """Keep the jobs that tests start out of the user's list of jobs; workers inherit the variable."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        state = tempfile.TemporaryDirectory()
        config.add_cleanup(state.cleanup)
        os.environ["XDG_STATE_HOME"] = state.name


def pytest_sessionfinish() -> None:
    forks.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Turn garbage collection off, which would take an eighth of the time; the items live until the end anyway."""
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
    """With `-n`, start one broker for all workers; they inherit its address in the environment."""
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
    one_loop.check(items)
    if "PYTEST_XDIST_WORKER" in os.environ:
        longest_first(items)


def make_broker(directory: Path, **options: Any) -> EmbeddedBroker:
    """Make a broker that keeps records with old timestamps; Kafka deletes expired records every five minutes."""
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
    # Runs in a separate loop, because tests with and without a loop use this fixture.
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
    """Return whether the broker leads new topics; a broker that was frozen for long is fenced for a moment."""
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
    """A broker that the test may stop, kill or freeze; it serves again when the next test starts.

    The tests that use it share it, one after the other, so each test needs unique names of topics and groups.
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
    """Make brokers for one test, on free ports and not started yet; for tests for which `stoppable` is not enough.

    `new_broker(name="a", **options of EmbeddedBroker)`: brokers with the same name share their data. All are killed at
    the end.
    """
    made: list[EmbeddedBroker] = []

    def make(name: str = "broker", **options: Any) -> EmbeddedBroker:
        made.append(make_broker(tmp_path / name, **options))
        return made[-1]

    yield make
    for broker in made:
        await broker.kill()


EVERY_TEST = "[kafka]\ncreate_topics = true\nmax_topics = 20000\nmax_topics_per_principal = 20000\n"
"""One anonymous client creates all topics of the whole run."""


@pytest.fixture(scope="session")
async def gateway(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayProcess]:
    """One gateway for all tests that neither stop nor configure it; it creates unknown topics, as `trivium up` does."""
    directory = tmp_path_factory.mktemp("gateway")
    options = ("--mqtt-websocket", "127.0.0.1:0", "--amqp-websocket", "127.0.0.1:0")
    process = GatewayProcess(directory, bootstrap, *options, config=EVERY_TEST)
    await process.start()
    yield process
    assert await process.stop() == 0


@pytest.fixture
async def new_gateway(tmp_path: Path) -> AsyncIterator[Callable[..., GatewayProcess]]:
    """Make gateways for one test (`new_gateway(bootstrap, *options, config=TOML)`); not started yet."""
    made: list[GatewayProcess] = []

    def make(bootstrap: str | None, *options: str, config: str = "", name: str = "gateway") -> GatewayProcess:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        made.append(GatewayProcess(directory, bootstrap, *options, config=config))
        return made[-1]

    yield make
    for process in made:
        await process.kill()


@pytest.fixture
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """The lines that the product's code in this process logs: `event`, `log_level`, and the facts by name."""
    with capture_logs() as lines:
        yield lines


@pytest.fixture(autouse=True)
def _no_assertion_is_contained() -> Iterator[None]:
    yield
    if error := contained.take():
        raise error
