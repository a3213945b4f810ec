"""Checks the contract with schemathesis against a running gateway.

As a script, for longer runs: `python -m tests.interop.http.contract_fuzzing URL TOPIC --max-examples 500`, where TOPIC
has three partitions. It passes further options to schemathesis.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).parent / "contract" / "schemathesis.toml"
HOOKS = CONFIG.with_name("hooks.py")


async def check_contract(url: str, topic: str, *options: str, directory: Path) -> tuple[int, str]:
    """Run schemathesis; return its exit status (0 if nothing failed) and its output."""
    command = [
        str(Path(sys.executable).parent / "schemathesis"), "--config-file", str(CONFIG), "--no-color",
        "run", f"{url}/openapi", *options,
    ]  # fmt: skip
    environment = {**os.environ, "TRIVIUM_TEST_TOPIC": topic, "SCHEMATHESIS_HOOKS": str(HOOKS)}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace")


if __name__ == "__main__":
    status, printed = asyncio.run(check_contract(*sys.argv[1:3], *sys.argv[3:], directory=Path.cwd()))
    print(printed)
    sys.exit(status)
