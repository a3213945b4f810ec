"""What a refusal above a rate leaves behind; the answers are tested in `tests/gateway/limits`."""

from __future__ import annotations

import asyncio
import types
import uuid
from typing import Any, cast

import pytest

from flowcontrol.bucket import RateLimit
from gateway.limits.brakes import Brake, Pace
from gateway.limits.limits import Limits
from gateway.net.http.http_server import HttpConnection
from gateway.rest.server.client_limits import PAUSE_S, RequestLimits
from gateway.views.pauses import RATES, pauses
from protocols.rest.errors import RestError

DEBT_S = 10_000


def test_refusals_are_one_pause_however_often_a_client_tries() -> None:
    """With one timer, which does not wait for the end of a long debt: its client may be gone by then."""
    label = f"http {uuid.uuid4().hex}"

    async def refuse() -> list[float]:
        loop: Any = asyncio.get_running_loop()
        brake = Brake(RateLimit(1, 0, 1.0, loop.time()), RATES[1], 0.05, loop.time)
        brake.limit.spend(DEBT_S, 0, loop.time())
        connection = cast("HttpConnection", types.SimpleNamespace())
        connection.limits = cast("Any", types.SimpleNamespace(incoming=Pace((brake,), loop.time)))
        limits = cast("Limits", types.SimpleNamespace(refused=0))
        for _ in range(10):
            with pytest.raises(RestError) as refused:
                RequestLimits(limits).check_publishing(connection, label)
            assert dict(refused.value.headers)["Retry-After"] == str(DEBT_S - 1)
        assert limits.refused == 10
        return [one.when() - loop.time() for one in loop._scheduled if label in (one._args or ())]

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        (wait_s,) = runner.run(refuse())
    assert wait_s <= PAUSE_S
    assert label in pauses.open()
    pauses.end(RATES[1], label)
