"""A short `python -m loadtest logins`: every kind of login is let in and measured."""

from __future__ import annotations

from pathlib import Path

from loadtest.engine.stand import Stand
from loadtest.scenarios.logins import Plan, logins


async def test_every_kind_of_login_is_let_in_and_measured(bootstrap: str, tmp_path: Path) -> None:
    async with Stand(tmp_path, bootstrap) as stand:
        await logins(stand, Plan(20, 2))
    assert stand.problems == []
    assert {row[""]: row["number"] for row in stand.rows} == {
        "anonymous": 20,
        "Argon2id, 64 MiB": 2,
        "device secret": 20,
        "SCRAM-SHA-256": 20,
        "token, ES256": 20,
        "device secret, TLS": 20,
        "certificate, TLS": 20,
    }
    assert all(row["CPU s"] >= 0 for row in stand.rows)
