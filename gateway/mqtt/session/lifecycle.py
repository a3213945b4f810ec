"""The life-cycle of a session in one gateway process, as a table: where it is, what happens, what is done, where next.

The state is that of one client id. `gateway.mqtt.registry.session_registry` does what the table says; docs/mqtt.md has
the diagram that `make tables` draws from it.
"""

from __future__ import annotations

import enum
from typing import Final


class State(enum.IntEnum):
    """Where the session of a client id is, as this process knows it."""

    ABSENT = 0  # there is none
    ELSEWHERE = 1  # another gateway has it, or had it: its records are followed
    CLAIMING = 2  # a CONNECT waits for the gateways that may have a message of it on its way to Kafka
    OPENING = 3  # a CONNECT is under way; from here to SAVING the session is an object
    CONNECTED = 4
    SAVING = 5  # its connection has ended, its records are on their way to Kafka
    AWAY = 6  # its client is away: two records, and a deadline


class Event(enum.IntEnum):
    """What happens to it."""

    CONNECT = 0  # a CONNECT has come this far: it continues the session, or makes one
    CLAIM = 1  # a CONNECT has come, and others, or we as its former owner, may have a message of it on the way
    READY = 2  # the CONNECT's records are stored: CONNACK
    FAIL = 3  # the CONNECT has failed, and the session was there before
    DISCONNECT = 4  # the connection has ended, and the session outlives it
    END = 5  # expired, ended with its connection, or discarded by Clean Start
    WILL = 6  # the will is due
    SAVED = 7  # everything is stored
    # who was asked has answered or is dead, or the CONNECT is given up; or its gateway stops and has released it
    RELEASED = 8
    ORPHANED = 9  # the gateway that had it is dead
    # a record of another gateway
    CLAIMED = 10  # a newer one, whose writer waits for our answer
    MOVED = 11  # a newer one, whose writer does not wait for us
    OUTDATED = 12  # an older one, or a deletion of what we have in memory
    DELETED = 13
    RIVAL = 14  # one with our epoch that lies before ours, unknown when ours was written; its writer may have served


class Action(enum.IntEnum):
    """What the gateway does then."""

    NOTHING = 0
    CREATE = 1  # make an object; its records are stored before CONNACK
    LOAD = 2  # the same, from the records
    RESUME = 3  # the same, with the object that is still there
    CLAIM = 4  # write a record with the next epoch that names whom we wait for
    TAKE_OVER = 5  # write the record as ours, without a connection; its will may be due
    ATTACH = 6  # the connection gets the session
    SAVE = 7  # write both records
    DISSOLVE = 8  # the object goes, the records stay
    END = 9  # delete the records; publish the will
    PUBLISH_WILL = 10
    HAND_OVER = 11  # close the connection; write the last in-flight record when Kafka has answered for QoS 2 messages
    RELEASE = 12  # keep the other gateway's record, and answer that nothing is on the way here, as soon as this is so
    ASK = 13  # wait for that gateway's answer too
    SET_ASIDE = 14  # the object goes as if it were handed over, the record stays ours; the next CONNECT asks
    FOLLOW = 15  # keep the other gateway's record
    FORGET = 16  # the records are gone
    WRITE = 17  # write our record over it


FOREIGN: Final = (Event.CLAIMED, Event.MOVED, Event.OUTDATED, Event.DELETED)
"""What other gateways' records say: in every state, but that where there is nothing no record is outdated."""

_S, _E, _A = State, Event, Action


def _without_object(state: State, *, ours: bool) -> dict[Event, tuple[Action, State]]:
    """What other gateways' records do to a session that is not an object here; `ours`: we have written the last."""
    return {
        _E.CLAIMED: (_A.RELEASE, _S.ELSEWHERE),
        _E.MOVED: (_A.FOLLOW, _S.ELSEWHERE),
        _E.OUTDATED: (_A.WRITE if ours else _A.NOTHING, state),
        _E.DELETED: (_A.FORGET, _S.ABSENT),
    }


def _object(state: State) -> dict[Event, tuple[Action, State]]:
    """The same for an object: it is handed over to a newer writer; a deletion by others is written over."""
    return {
        _E.CLAIMED: (_A.HAND_OVER, _S.ELSEWHERE),
        _E.MOVED: (_A.HAND_OVER, _S.ELSEWHERE),
        _E.OUTDATED: (_A.WRITE, state),
        _E.DELETED: (_A.WRITE, state),
    }


TABLE: Final[dict[State, dict[Event, tuple[Action, State]]]] = {
    _S.ABSENT: {
        _E.CONNECT: (_A.CREATE, _S.OPENING),
        _E.CLAIMED: (_A.RELEASE, _S.ELSEWHERE),
        _E.MOVED: (_A.FOLLOW, _S.ELSEWHERE),
        _E.DELETED: (_A.NOTHING, _S.ABSENT),
    },
    _S.ELSEWHERE: {
        _E.CLAIM: (_A.CLAIM, _S.CLAIMING),
        _E.ORPHANED: (_A.TAKE_OVER, _S.AWAY),
        _E.RELEASED: (_A.TAKE_OVER, _S.AWAY),
        **_without_object(_S.ELSEWHERE, ours=False),
    },
    _S.CLAIMING: {
        _E.RELEASED: (_A.TAKE_OVER, _S.AWAY),
        _E.RIVAL: (_A.ASK, _S.CLAIMING),
        **_without_object(_S.CLAIMING, ours=True),
    },
    _S.OPENING: {
        _E.READY: (_A.ATTACH, _S.CONNECTED),
        _E.FAIL: (_A.SAVE, _S.SAVING),
        _E.END: (_A.END, _S.ABSENT),  # the CONNECT has failed, and the session was new
        _E.RIVAL: (_A.SET_ASIDE, _S.AWAY),
        **_object(_S.OPENING),
    },
    _S.CONNECTED: {
        _E.DISCONNECT: (_A.SAVE, _S.SAVING),
        _E.END: (_A.END, _S.ABSENT),
        **_object(_S.CONNECTED),
    },
    _S.SAVING: {
        _E.CONNECT: (_A.RESUME, _S.OPENING),
        _E.SAVED: (_A.DISSOLVE, _S.AWAY),
        _E.END: (_A.END, _S.ABSENT),
        _E.WILL: (_A.PUBLISH_WILL, _S.SAVING),
        _E.RIVAL: (_A.SET_ASIDE, _S.AWAY),
        **_object(_S.SAVING),
    },
    _S.AWAY: {
        _E.CONNECT: (_A.LOAD, _S.OPENING),
        _E.CLAIM: (_A.CLAIM, _S.CLAIMING),  # not everybody has answered yet
        _E.END: (_A.END, _S.ABSENT),
        _E.WILL: (_A.PUBLISH_WILL, _S.AWAY),
        **_without_object(_S.AWAY, ours=True),
    },
}
"""State -> event -> action and next state. What is not in it cannot happen.

A CONNECT that meets CONNECTED closes that connection first [MQTT-3.1.4-3]; one with Clean Start ends the session first.
"""
