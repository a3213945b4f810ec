"""What clients may leave behind in sessions: new ones are refused at the limits, stored ones are always served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocols.mqtt import packets
from protocols.mqtt.packets import Will
from protocols.mqtt.properties import Properties
from protocols.mqtt.reasons import ReasonCode
from tests.support.gateway import GatewayProcess
from tests.support.mqtt import RawClient

NewGateway = Callable[..., GatewayProcess]
KEPT = {"session_expiry_interval": 3600, "clean_start": False}
QUOTA = ReasonCode.QUOTA_EXCEEDED
UNAVAILABLE = 3  # of 3.1.1
FEW = "[embedded]\nport = 0\n[mqtt]\nmax_sessions = {}\nmax_session_bytes = 1_048_576\nmax_connect_bytes = 300_000\n"


async def connect(gateway: GatewayProcess, client_id: str, **options: Any) -> int:
    """Connect and drop the connection; return CONNACK's code."""
    client = await RawClient.connect(gateway.address("mqtt"), client_id, **options)
    code = client.connack.reason_code
    if not code:
        await client.ping()
    client.drop()
    return int(code)


def delayed(size: int, more: int = 0) -> Will:
    """A will that stays with the session, with `more` bytes in its properties."""
    return Will("t", b"w" * size, 0, False, Properties(will_delay_interval=3600, correlation_data=b"c" * more))


async def test_new_sessions_are_refused_and_stored_ones_served(tmp_path: Path, new_gateway: NewGateway) -> None:
    gateway = await new_gateway(None, "--data-dir", str(tmp_path), config=FEW.format(3)).start()
    assert [await connect(gateway, f"c{number}", **KEPT) for number in range(4)] == [0, 0, 0, QUOTA]
    assert await connect(gateway, "old", version=4, clean_start=False) == UNAVAILABLE
    assert await connect(gateway, "passing") == 0  # nothing is left behind
    assert await connect(gateway, "will", will=Will("t", b"x", 0, False)) == QUOTA
    assert await connect(gateway, "c1", **KEPT) == 0
    ending = await RawClient.connect(gateway.address("mqtt"), "c1", **KEPT)
    await ending.disconnect(session_expiry_interval=0)
    assert await connect(gateway, "c3", **KEPT) == 0
    assert await gateway.stop() == 0

    gateway = await new_gateway(None, "--data-dir", str(tmp_path), config=FEW.format(1)).start()  # fewer than there are
    for name in ("c0", "c2", "c3"):
        client = await RawClient.connect(gateway.address("mqtt"), name, **KEPT)
        assert client.connack.session_present
        client.drop()
    assert await connect(gateway, "new", **KEPT) == QUOTA
    assert await gateway.stop() == 0


async def test_bytes_of_sessions_are_bounded(tmp_path: Path, new_gateway: NewGateway) -> None:
    gateway = await new_gateway(None, "--data-dir", str(tmp_path), config=FEW.format(1000)).start()
    large = {**KEPT, "will": delayed(60_000)}
    codes = [await connect(gateway, f"w{number}", **large) for number in range(20)]
    assert QUOTA in codes, codes
    taken = codes.index(QUOTA)
    assert 5 < taken < 18
    assert codes == [0] * taken + [QUOTA] * (20 - taken)
    assert await connect(gateway, "w0", **large) == 0  # it is no larger than before
    assert await connect(gateway, "w0", **{**large, "will": delayed(60_000, 60_000)}) == QUOTA
    assert await connect(gateway, "w0", **large) == 0

    client = await RawClient.connect(gateway.address("mqtt"), "small", **KEPT)
    assert not client.connack.reason_code
    filters = tuple(packets.Subscription(f"{number}/{'x' * 60_000}", 0) for number in range(3))
    client.send(packets.Subscribe(client.new_id(), filters))
    said = await client.expect_end()
    assert [one.reason_code for one in said if isinstance(one, packets.Disconnect)] == [QUOTA]
    client.drop()
    assert await connect(gateway, "small", **KEPT) == 0  # without what was too much
    assert await gateway.stop() == 0
