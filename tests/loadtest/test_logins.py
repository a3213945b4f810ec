"""A short `python -m loadtest logins` and `siege`: every kind of login is let in and measured, also amid wrong ones."""

from __future__ import annotations

from pathlib import Path

from loadtest.engine.stand import Stand
from loadtest.scenarios.logins import Plan, Siege, logins, siege


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


async def test_a_right_login_succeeds_amid_wrong_ones(bootstrap: str, tmp_path: Path) -> None:
    async with Stand(tmp_path, bootstrap) as stand:
        await siege(stand, Siege(attempts=20, sockets=5, fields=2, settle=0.1, patience=100))
    assert stand.problems == []
    assert [row[""].split(",")[0] for row in stand.rows] == [
        "a right login beside 20 wrong ones",
        "endless request heads",
        "half a TLS handshake",
        "half a TLS handshake",
    ]
