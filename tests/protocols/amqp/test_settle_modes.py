"""Both settle modes are answered as they are asked for, and kept to (parts 2.6.12, 2.8.2, 2.8.3)."""

from __future__ import annotations

from typing import Any

import pytest
from proton import Delivery
from proton import Link as ProtonLink

from protocols.amqp import endpoints, outcomes

SND = [ProtonLink.SND_UNSETTLED, ProtonLink.SND_SETTLED, ProtonLink.SND_MIXED]
RCV = [ProtonLink.RCV_FIRST, ProtonLink.RCV_SECOND]


@pytest.mark.parametrize("rcv", RCV)
@pytest.mark.parametrize("snd", SND)
@pytest.mark.parametrize("kind", ["sender", "receiver"])
def test_modes_are_answered_as_asked(make_server: Any, make_peer: Any, kind: str, snd: int, rcv: int) -> None:
    peer = make_peer(make_server())
    link = getattr(peer.open(), kind)("l")
    link.snd_settle_mode, link.rcv_settle_mode = snd, rcv
    link.source.address = link.target.address = "t"
    link.open()
    peer.run()
    assert (link.remote_snd_settle_mode, link.remote_rcv_settle_mode) == (snd, rcv)


def second(make_server: Any, make_peer: Any, messages: int) -> tuple[Any, Any, list[Any]]:
    """A sender that asked for mode second, and its messages."""
    server = make_server(credit=messages)
    peer = make_peer(server)
    link = peer.open().sender("s")
    link.target.address, link.rcv_settle_mode = "t", ProtonLink.RCV_SECOND
    link.open()
    peer.run()
    deliveries = [peer.transfer(link, str(number)) for number in range(messages)]
    peer.run()
    return server, peer, deliveries


@pytest.mark.parametrize("state", [outcomes.STATE_ACCEPTED, outcomes.rejected(outcomes.NOT_FOUND, "no topic")])
def test_in_mode_second_the_sender_settles_first(make_server: Any, make_peer: Any, state: Any) -> None:
    server, peer, sent = second(make_server, make_peer, 3)
    one, two, three = server.received
    server.engine.accept_deliveries(one.link, [one.delivery])
    server.engine.settle_delivery(two.link, two.delivery, state)
    peer.run()
    assert [delivery.remote_state for delivery in sent] == [Delivery.ACCEPTED, state.code, 0]
    assert not any(delivery.settled for delivery in sent)
    for delivery in sent:  # the third one before its outcome
        delivery.settle()
    peer.run()
    server.engine.accept_deliveries(three.link, [three.delivery])
    peer.run()
    assert not one.link.told
    assert not server.connection.closing


def test_what_a_sender_does_not_settle_is_bounded(
    make_server: Any, make_peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "TOLD_LIMIT", 5)
    server, peer, sent = second(make_server, make_peer, 8)
    link = server.received[0].link
    server.engine.accept_deliveries(link, [one.delivery for one in server.received])
    peer.run()
    assert {delivery.remote_state for delivery in sent} == {Delivery.ACCEPTED}
    assert [delivery.settled for delivery in sent] == [False] * 5 + [True] * 3
    sent[0].settle()
    peer.run()
    peer.transfer(sent[1].link, "more")
    server.engine.grant(link, 1)
    peer.run()
    server.engine.accept_deliveries(link, [server.received[-1].delivery])
    sent[1].link.close()
    peer.run()
    assert server.is_empty_of_links
