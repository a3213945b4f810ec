"""A broker whose disk is soon full: a file system of its own, or, where nobody may mount one, files that end early."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

from loadtest.faults.kafka import KafkaProcess
from loadtest.faults.proxy import free_port
from loadtest.start import start_process

SIZE_MIB: Final = 400
"""Of the file system; a broker wants 64 to start, and its internal topics' index files take some."""
FILE_BYTES: Final = 4096
"""Without a mount: the most that a file may have when it is full."""


class TinyKafka(KafkaProcess):
    """A broker in a directory that can be filled."""

    mounted = True

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """While no byte is left; then there is room again."""
        ballast = self._directory / "ballast"
        if self.mounted:
            with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(1 << 20)):
                    pass
        else:
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
        try:
            yield
        finally:
            ballast.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def tiny_kafka(directory: Path, say: Callable[[str], None]) -> AsyncIterator[TinyKafka]:
    """Start one."""
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    mounted = await _call("mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "trivium-faults", str(directory))
    kafka = TinyKafka(directory, free_port())
    kafka.mounted = mounted
    say(f"  by {f'a file system of {SIZE_MIB} MiB' if mounted else f'RLIMIT_FSIZE of {FILE_BYTES} bytes'}")
    try:
        await kafka.prepare(free_port())  # nobody is there
        await kafka.start()
        yield kafka
    finally:
        await kafka.stop()
        if mounted:
            await _call("umount", str(directory))


async def _call(*command: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        process = await start_process(*command, stderr=asyncio.subprocess.DEVNULL)
        return await process.wait() == 0
    return False
