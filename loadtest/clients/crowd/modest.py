"""A modest MQTT client in its own process: one QoS 1 message after the other, with the latency of each PUBACK.

`python -m loadtest.clients.crowd.modest HOST PORT TOPIC PAUSE` writes two doubles per message: when it was sent
(`time.monotonic`) and its latency in seconds. It ends when its standard input closes.
"""

from __future__ import annotations

import array
import asyncio
import secrets
import select
import socket
import sys
import time
from typing import Final

from loadtest.clients.mqtt_wire import Splitter, connect_packet, publish_packet
from loadtest.report import Latencies
from loadtest.start import start_process

PAUSE_S: Final = 0.005
_PAIR: Final = 16  # bytes
_UNREAD_BYTES: Final = 1 << 26  # its output is buffered until `answered` reads it


class Modest:
    """The process of a modest client, and its measurements."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._latencies: array.array[float] = array.array("d")

    @classmethod
    async def start(cls, host: str, port: int, topic: str, pause_s: float = PAUSE_S) -> Modest:
        """Start the process, and wait for its first PUBACK."""
        process = await start_process(
            sys.executable, "-m", "loadtest.clients.crowd.modest", host, str(port), topic, str(pause_s),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_UNREAD_BYTES,
        )  # fmt: skip
        modest = cls(process)
        await modest.answered(0.0)
        return modest

    async def answered(self, since: float) -> None:
        """Wait for the PUBACK of a message sent after `since`, so that no slow one is missed."""
        assert self._process.stdout is not None
        while not self._latencies or self._latencies[-2] < since:
            try:
                self._latencies.frombytes(await self._process.stdout.readexactly(_PAIR))
            except asyncio.IncompleteReadError:
                raise ConnectionResetError("the modest client has lost its connection") from None

    def between(self, begin: float, end: float) -> Latencies:
        """Return the latencies of messages sent in a period (`time.monotonic`), as far as `answered` has read them."""
        found = Latencies()
        for sent, took in zip(self._latencies[0::2], self._latencies[1::2], strict=True):
            if begin <= sent < end:
                found.record(took)
        return found

    async def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


def main() -> None:
    """Run the process."""
    host, port, topic, pause_s = sys.argv[1:]
    packets = Splitter()
    with socket.create_connection((host, int(port))) as peer:
        peer.sendall(connect_packet(f"modest-{secrets.token_hex(4)}"))

        def received() -> bool:
            while True:
                data = peer.recv(4096)
                if not data:
                    return False
                if packets.feed(data):
                    return True

        alive = received()
        while alive:
            sent = time.monotonic()
            peer.sendall(publish_packet(f"{topic}/modest", b"x", 1, 1))
            alive = received()
            if alive:
                sys.stdout.buffer.write(array.array("d", (sent, time.monotonic() - sent)).tobytes())
                sys.stdout.buffer.flush()
            alive = alive and not select.select([sys.stdin], [], [], float(pause_s))[0]


if __name__ == "__main__":
    main()
