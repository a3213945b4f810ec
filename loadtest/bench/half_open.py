"""Resident memory of the gateway after bursts of incomplete TLS handshakes, and after a quiet period.

    python -m loadtest.bench.half_open [--bootstrap HOST:PORT] [--crowds 4] [--sockets 1000] [--quiet 45]

Each socket sends half a ClientHello and is closed once all are open.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import trustme
import uvloop

from loadtest.gateway import GatewayProcess, loop_cpu, process_resident
from loadtest.report import Report

HALF_HELLO: Final = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"r" * 400
HELD_S: Final = 2.0  # how long the sockets stay open
MIB: Final = 1 << 20


async def crowd(address: tuple[str, int], sockets: int) -> None:
    """Open sockets, hold them for a while, and close them."""

    async def half_open() -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection(*address)
        writer.write(HALF_HELLO)
        return writer

    writers = await asyncio.gather(*(half_open() for _ in range(sockets)))
    await asyncio.sleep(HELD_S)
    for writer in writers:
        writer.transport.abort()


async def run(options: argparse.Namespace) -> None:
    """Start a gateway and measure its memory."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trustme.CA().issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(directory / "server.pem")
        pem = str(directory / "server.pem")
        gateway = GatewayProcess(
            directory,
            options.bootstrap,
            environment={"TRIVIUM_SECURITY__TLS_CERT": pem, "TRIVIUM_SECURITY__TLS_KEY": pem},
        )
        stack.push_async_callback(gateway.stop)
        await gateway.start()
        report = Report("Memory after bursts of half-open TLS handshakes")

        def weigh(what: str) -> None:
            report.add(after=what, **{"resident MiB": round(process_resident(gateway.pid) / MIB, 1)})

        weigh("start")
        for number in range(options.crowds):
            await crowd(gateway.address("mqtt"), options.sockets)
            weigh(f"burst {number + 1}")
        used = loop_cpu(gateway.pid)
        await asyncio.sleep(options.quiet)
        weigh(f"{options.quiet:g} s without traffic, {(loop_cpu(gateway.pid) - used) / options.quiet:.1%} CPU")
    report.print()


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", help="Kafka's address (default: start a broker)")
    parser.add_argument("--crowds", type=int, default=4, help="number of bursts")
    parser.add_argument("--sockets", type=int, default=1000, help="sockets per burst")
    parser.add_argument("--quiet", type=float, default=45.0, help="quiet seconds at the end")
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
