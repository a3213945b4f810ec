"""The embedded Kafka of a gateway that is configured without `kafka.bootstrap_servers`; an optional part."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import structlog

from gateway.embedded.broker import STOP_LIMIT_S, EmbeddedBroker, embedded_broker
from gateway.embedded.jars import console_report
from gateway.embedded.java import SetupError
from gateway.embedded.open_files import BrokerCapacity
from gateway.embedded.storage import BrokerError
from gateway.runtime.parts import PartError
from gateway.settings.config import Config

log = structlog.get_logger(__name__)

LEAST_STOP_S: Final = 1.0
RESTART_S: Final = 1.0  # before a broker that has ended is started again


class EmbeddedKafka:
    """The broker's life within the gateway's; a `gateway.process.own_kafka.OwnKafka`."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self._broker = broker
        self.capacity = BrokerCapacity(lambda: broker.pid if broker.is_running else None)

    @property
    def address(self) -> str:
        """The address for Kafka clients."""
        return self._broker.bootstrap_servers

    @property
    def pid(self) -> int:
        """The broker's process id."""
        return self._broker.pid

    async def start(self) -> None:
        """Start the broker; raises PartError."""
        with _part_errors():
            await self._broker.start()
        log.info("embedded broker ready", address=self.address, pid=self.pid, log=str(self._broker.log_file))

    async def keep(self, restarted: Callable[[], None]) -> None:
        """Restart the broker whenever it exits; clients wait meanwhile, as for any broker.

        Raises:
            PartError: the broker cannot be restarted.
        """
        while True:
            try:
                await self._broker.watch()
                return
            except BrokerError as error:
                log.error("restarting the embedded broker", reason=str(error))
            await asyncio.sleep(RESTART_S)
            with _part_errors():
                await self._broker.start()
            restarted()

    async def stop(self, left_s: float) -> None:
        """Stop the broker in the remaining time; one that does not react (it is frozen) is killed.

        No acknowledged record is lost by that.
        """
        await self._broker.stop(min(STOP_LIMIT_S, max(LEAST_STOP_S, left_s)))


@contextlib.contextmanager
def _part_errors() -> Iterator[None]:
    """Raise SetupError, of which BrokerError is one, as PartError."""
    try:
        yield
    except SetupError as error:
        raise PartError(str(error)) from error


def prepare(config: Config) -> EmbeddedKafka:
    """Find Java, fetch the jars and describe the broker; it may take long, so call it before the event loop runs.

    Raises:
        PartError: this machine lacks something.
    """
    with _part_errors(), console_report() as report:
        return EmbeddedKafka(embedded_broker(config.embedded, config.data_dir, report))
