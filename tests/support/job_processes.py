"""Jobs of `spark_sinks` in a process of their own."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]


async def start_job(file: Path, *options: str) -> asyncio.subprocess.Process:
    """Start the job of a file, with pipes for what it says."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "spark_sinks", str(file), *options, cwd=ROOT, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
