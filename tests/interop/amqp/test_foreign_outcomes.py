"""Credit and outcomes as every foreign client uses them."""

from __future__ import annotations

import pytest

from tests.interop.amqp.clients import EVERY, GO, Kind, each
from tests.interop.amqp.conftest import NewClient
from tests.interop.amqp.drivers import ACCEPTED, bodies, body, text


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_deliveries_follow_credit_and_a_drain_ends_it(new_client: NewClient, own: str, kind: Kind) -> None:
    client = await new_client(kind)
    sender = await client.sender(own)
    messages = [text(str(number), group_id="one") for number in range(10)]
    assert await sender.send(*messages) == [ACCEPTED] * 10
    receiver = await client.receiver(own, capabilities=["queue"], credit=0)
    await receiver.credit(3)
    seen = await receiver.receive(3)
    assert bodies(seen) == ["0", "1", "2"]
    await receiver.credit(20)
    seen += await receiver.receive(7)
    if kind != GO:  # it takes back all credit and waits for a flow, which the gateway's proton does not send
        await receiver.drain()  # 13 of the 20 credits are returned
    assert await sender.send(text("10", group_id="one")) == [ACCEPTED]
    await receiver.credit(1)
    seen += await receiver.receive(1)
    assert bodies(seen) == [str(number) for number in range(11)]
    await receiver.settle(seen)
    await receiver.close()


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_outcomes_of_a_receiver_in_a_group(new_client: NewClient, own: str, kind: Kind) -> None:
    client = await new_client(kind)
    group = f"{own}/group.id/g-{own}"
    sender = await client.sender(own)
    names = ["accepted", "released", "failed", "elsewhere", "rejected"]
    assert await sender.send(*(text(name) for name in names)) == [ACCEPTED] * 5
    receiver = await client.receiver(group)
    seen = {body(message): message for message in await receiver.receive(5)}
    assert set(seen) == set(names)
    await receiver.settle([seen["accepted"]])
    await receiver.settle([seen["released"]], "released")
    await receiver.settle([seen["failed"]], "modified", failed=True)
    await receiver.settle([seen["elsewhere"]], "modified", undeliverable=True)
    await receiver.settle([seen["rejected"]], "rejected", condition="own:no-good")

    again = {body(message): message for message in await receiver.receive(2)}
    assert {name: one["delivery_count"] for name, one in again.items()} == {"released": 0, "failed": 1}
    await receiver.settle([again["released"]])
    # The third failed attempt is the last one.
    await receiver.settle([again["failed"]], "modified", failed=True)
    [last] = await receiver.receive(1)
    assert (body(last), last["delivery_count"]) == ("failed", 2)
    await receiver.settle([last], "modified", failed=True)

    dead = await client.receiver(f"{own}-dlq", capabilities=["queue"])
    letters = {body(message): message["annotations"] for message in await dead.receive(3)}
    reasons = {name: one["x-opt-dead-letter-condition"] for name, one in letters.items()}
    assert reasons == {"rejected": "own:no-good", "elsewhere": "undeliverable-here", "failed": "too-many-attempts"}
    assert {one["x-opt-dead-letter-topic"] for one in letters.values()} == {own}

    # All five are settled, so the next receiver gets only new messages.
    await client.close()
    await client.connect()
    sender, receiver = await client.sender(own), await client.receiver(group)
    assert await sender.send(text("new")) == [ACCEPTED]
    assert bodies(await receiver.receive(1)) == ["new"]


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_unsettled_messages_go_to_the_next_receiver(new_client: NewClient, own: str, kind: Kind) -> None:
    first, second = await new_client(kind), await new_client(kind)
    sender = await second.sender(own)
    assert await sender.send(*(text(str(number), group_id="one") for number in range(4))) == [ACCEPTED] * 4
    receiver = await first.receiver(own, capabilities=["queue"])
    seen = await receiver.receive(4)
    heir = await second.receiver(own, capabilities=["queue"])
    await receiver.settle(seen[:2])
    await first.close()
    seen = await heir.receive(2)
    assert [(body(one), one["delivery_count"]) for one in seen] == [("2", 1), ("3", 1)]
    await heir.settle(seen)
