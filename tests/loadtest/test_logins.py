"""A short `python -m loadtest.scenarios.logins`: every kind of login is let in and measured."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


async def test_every_kind_of_login_is_let_in_and_measured(bootstrap: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest.scenarios.logins", "--logins", "20", "--slow", "2", "--bootstrap", bootstrap,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, out.decode()
    rows = [line.rsplit(maxsplit=5) for line in out.decode().splitlines()[1:]]
    assert [(name, int(number)) for name, number, *_ in rows] == [
        ("anonymous", 20),
        ("Argon2id, 64 MiB", 2),
        ("device secret", 20),
        ("SCRAM-SHA-256", 20),
        ("token, ES256", 20),
        ("device secret, TLS", 20),
        ("certificate, TLS", 20),
    ]
    assert all(float(seconds) >= 0 for _, _, seconds, *_ in rows)
