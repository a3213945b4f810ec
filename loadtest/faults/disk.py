"""A broker whose disk is soon full: on a small file system or, without rights to mount, with limited file sizes."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

from loadtest.faults.kafka import KafkaProcess
from loadtest.ports import free_port
from loadtest.start import start_process

SIZE_MIB: Final = 400
"""Size of the file system; a broker needs 64 to start, plus the index files of its internal topics."""
FILE_BYTES: Final = 4096
"""The file size limit of a full disk without a mount."""


class TinyKafka(KafkaProcess):
    """A broker in a directory that can be filled."""

    mounted = True

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Fill the disk during the block."""
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
    """Run such a broker."""
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    mounted = await _call("mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "trivium-faults", str(directory))
    kafka = TinyKafka(directory, free_port())
    kafka.mounted = mounted
    say(f"  using {f'a file system of {SIZE_MIB} MiB' if mounted else f'RLIMIT_FSIZE of {FILE_BYTES} bytes'}")
    try:
        await kafka.prepare(free_port())  # nobody listens there
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
