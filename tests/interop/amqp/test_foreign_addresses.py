"""Addresses, subscriptions and filters as every foreign client uses them."""

from __future__ import annotations

import re
import uuid
from typing import Any

import pytest

from tests.interop.amqp.clients import EVERY, FE2O3, GO, REACTIVE, RHEA, Kind, each
from tests.interop.amqp.conftest import NewClient
from tests.interop.amqp.drivers import ACCEPTED, bodies, body, text
from tests.interop.driver import RefusedError

SELECTOR = "apache.org:selector-filter:string"


async def refusal(attach: Any) -> str:
    with pytest.raises(RefusedError) as refused:
        await attach
    return str(refused.value)


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_a_refused_link_and_its_connection(new_client: NewClient, own: str, kind: Kind) -> None:
    client = await new_client(kind)
    wrong = f"{own}/partitions/99"
    reasons = {
        "amqp:not-found": [await refusal(client.sender(wrong)), await refusal(client.receiver(wrong))],
        "amqp:unauthorized-access": [await refusal(client.sender("__consumer_offsets"))],
        "amqp:invalid-field": [await refusal(client.receiver(own, filters={SELECTOR: "a = = 1"}))],
    }
    for condition, found in reasons.items():
        for reason in found:
            assert condition in reason, reason
    # The connection still works.
    receiver, sender = await client.receiver(own), await client.sender(own)
    assert await sender.send(text("as before")) == [ACCEPTED]
    assert bodies(await receiver.receive(1)) == ["as before"]


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_the_anonymous_relay(new_client: NewClient, own: str, kind: Kind) -> None:
    client = await new_client(kind)
    receiver = await client.receiver(own)
    relay = await client.sender(None)
    outcomes = await relay.send(
        text("one", to=own), text("two", to="__consumer_offsets"), text("three"), text("four", to=f"{own}/a/key")
    )
    assert [(one.name, one.condition) for one in outcomes] == [
        ("accepted", None),
        ("rejected", "amqp:unauthorized-access"),
        ("rejected", "amqp:precondition-failed"),
        ("accepted", None),
    ]
    seen = {body(one): one for one in await receiver.receive(2)}
    assert set(seen) == {"one", "four"}
    assert seen["four"]["annotations"]["x-opt-bridge.key"] == "a/key"


@pytest.mark.parametrize("node", ["temporary-queue", "temporary-topic"])
@pytest.mark.parametrize("kind", **each(EVERY))
async def test_request_and_reply(new_client: NewClient, own: str, kind: Kind, node: str) -> None:
    asking, answering = await new_client(kind), await new_client(kind)
    requests = await answering.receiver(own)
    answers = await asking.receiver(None, dynamic=True, capabilities=[node])
    assert answers.address is not None
    assert re.fullmatch(r"replies/[0-9a-f]{32}", answers.address)
    ask = await asking.sender(own)
    assert await ask.send(text("what?", reply_to=answers.address, correlation_id="c-1")) == [ACCEPTED]
    [request] = await requests.receive(1)
    relay = await answering.sender(None)
    to, number = request["reply_to"], request["correlation_id"]
    assert await relay.send(text("that!", to=to, correlation_id=number)) == [ACCEPTED]
    [answer] = await answers.receive(1)
    assert (body(answer), answer["correlation_id"]) == ("that!", "c-1")
    # Only its connection may use the node, and it is deleted with its link.
    assert "amqp:unauthorized-access" in await refusal(answering.receiver(answers.address))
    direct = await answering.sender(answers.address)
    assert await direct.send(text("and that")) == [ACCEPTED]
    assert bodies(await answers.receive(1)) == ["and that"]
    await answers.close()


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_a_durable_subscription(new_client: NewClient, own: str, kind: Kind) -> None:
    other = await new_client(kind)
    sender = await other.sender(own)
    client = await new_client(kind)
    assert await sender.send(text("before it")) == [ACCEPTED]
    subscription = {"name": "news", "durable": True, "capabilities": ["topic"]}
    receiver = await client.receiver(own, **subscription)
    assert await sender.send(text("0", group_id="one")) == [ACCEPTED]
    seen = await receiver.receive(1)
    await receiver.settle(seen)
    if kind != GO:  # go-amqp always closes a link
        await receiver.detach()
    await client.close()

    assert await sender.send(*(text(str(number), group_id="one") for number in range(1, 6))) == [ACCEPTED] * 5
    await client.connect()
    receiver = await client.receiver(own, **subscription)
    seen = await receiver.receive(5)
    assert bodies(seen) == ["1", "2", "3", "4", "5"]
    await receiver.settle(seen)
    await receiver.close()  # unsubscribes

    assert await sender.send(text("after it")) == [ACCEPTED]
    receiver = await client.receiver(own, **subscription)
    assert await sender.send(text("new")) == [ACCEPTED]
    assert bodies(await receiver.receive(1)) == ["new"]
    await receiver.close()


@pytest.mark.parametrize("durable", [True, False], ids=["durable", "volatile"])
@pytest.mark.parametrize("kind", **each(EVERY))
async def test_a_shared_subscription(new_client: NewClient, own: str, kind: Kind, durable: bool) -> None:
    """Two members of two containers: each message is delivered to one of them.

    Each grants limited credit: a library that keeps a window full could be quick enough to get all messages.
    """
    name = f"s-{uuid.uuid4().hex[:8]}"
    members = [await new_client(kind), await new_client(kind)]
    capabilities = ["topic", "shared", "global"]
    receivers = [
        await member.receiver(own, name=f"{name}|{at}", durable=durable, capabilities=capabilities, credit=0)
        for at, member in enumerate(members)
    ]
    sender = await members[0].sender(own)
    for turn in range(2):
        for receiver in receivers:
            await receiver.credit(5)
        assert await sender.send(*(text(f"{turn}-{number}") for number in range(10))) == [ACCEPTED] * 10
        seen: list[str] = []
        for receiver in receivers:
            messages = await receiver.receive(5)
            seen += bodies(messages)
            await receiver.settle(messages)
        assert sorted(seen) == [f"{turn}-{number}" for number in range(10)]


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_selectors(new_client: NewClient, own: str, kind: Kind) -> None:
    client = await new_client(kind)
    red = await client.receiver(own, filters={SELECTOR: "colour = 'red' AND weight BETWEEN 2 AND 4"})
    urgent = await client.receiver(own, filters={SELECTOR: "JMSPriority > 5 OR colour LIKE 'b%'"})
    assert len(red.filters) == len(urgent.filters) == 1  # the gateway's attach says that they are applied
    sender = await client.sender(own)
    messages = [
        text(f"{colour}{weight}", priority=9 if weight == 5 else 4, application={"colour": colour, "weight": weight})
        for colour in ("red", "green", "blue")
        for weight in (1, 3, 5)
    ]
    assert await sender.send(*messages) == [ACCEPTED] * 9
    assert bodies(await red.receive(1)) == ["red3"]
    assert sorted(bodies(await urgent.receive(5))) == ["blue1", "blue3", "blue5", "green5", "red5"]


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_start_positions(new_client: NewClient, own: str, kind: Kind) -> None:
    client = await new_client(kind)
    sender = await client.sender(f"{own}/partitions/0")
    assert await sender.send(*(text(str(number)) for number in range(6))) == [ACCEPTED] * 6
    everything = await client.receiver(own, filters={"rabbitmq:stream-offset-spec": "first"})
    assert len(everything.filters) == 1
    seen = await everything.receive(6)
    assert bodies(seen) == [str(number) for number in range(6)]
    at = seen[3]["annotations"]["x-opt-enqueued-time"]["@timestamp"]

    partition = f"{own}/partitions/0"
    starts: dict[str, tuple[str, Any]] = {
        "offset": ("rabbitmq:stream-offset-spec", {"@ulong": 4}),
        "Event Hubs' offset": (SELECTOR, "amqp.annotation.x-opt-offset > '3'"),
        "Event Hubs' time": (SELECTOR, f"amqp.annotation.x-opt-enqueued-time > '{at - 60_000}'"),
        "time": ("rabbitmq:stream-offset-spec", {"@timestamp": at - 60_000}),
        "last": ("rabbitmq:stream-offset-spec", "last"),
    }
    wanted = {"offset": 4, "Event Hubs' offset": 4, "Event Hubs' time": 0, "time": 0, "last": 5}
    for what, (name, value) in starts.items():
        receiver = await client.receiver(partition, filters={name: value})
        assert len(receiver.filters) == 1, what
        assert bodies(await receiver.receive(6 - wanted[what])) == [str(one) for one in range(wanted[what], 6)], what
        await receiver.close()


@pytest.mark.parametrize("kind", **each(EVERY))
async def test_selectors_share_a_queue(new_client: NewClient, own: str, kind: Kind) -> None:
    """Messages that one receiver does not select go to others, now or later."""
    client = await new_client(kind)
    sender = await client.sender(own)
    colours = ("red", "green", "blue")
    messages = [text(f"{colour} {n}", application={"colour": colour}) for n in range(3) for colour in colours]
    assert await sender.send(*messages) == [ACCEPTED] * 9
    for colour in ("red", "blue"):
        receiver = await client.receiver(f"queue://{own}", filters={SELECTOR: f"colour = '{colour}'"})
        assert sorted(bodies(await receiver.receive(3))) == [f"{colour} {n}" for n in range(3)]
    rest = await client.receiver(f"queue://{own}")
    assert sorted(bodies(await rest.receive(3))) == [f"green {n}" for n in range(3)]


@pytest.mark.parametrize("kind", **each([REACTIVE, RHEA, GO, FE2O3]))
async def test_a_browser_removes_no_messages(new_client: NewClient, own: str, kind: Kind) -> None:
    client = await new_client(kind)
    sender = await client.sender(own)
    assert await sender.send(text("0"), text("1")) == [ACCEPTED] * 2
    for _ in range(2):
        browser = await client.receiver(own, capabilities=["queue"], copy=True)
        assert sorted(bodies(await browser.receive(2))) == ["0", "1"]
        await browser.close()
