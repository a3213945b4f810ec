"""The life cycle of a session in one gateway process, as a table of states, events, actions and next states.

Each client id has one state. `gateway.mqtt.registry.session_registry` executes the table; docs/mqtt.md has the diagram
that `make tables` draws from it.
"""

from __future__ import annotations

import enum
from typing import Final


class SessionState(enum.IntEnum):
    """The state of a client id's session, as this process knows it."""

    ABSENT = 0  # there is no session
    ELSEWHERE = 1  # another gateway has it, or had it; its records are followed
    CLAIMING = 2  # a CONNECT waits for gateways that may have messages of the session in flight to Kafka
    OPENING = 3  # a CONNECT is being processed; from here to SAVING there is a `Session` object
    CONNECTED = 4
    SAVING = 5  # the connection has ended, the records are being written to Kafka
    AWAY = 6  # the client is away: only two records and a deadline are kept


class Event(enum.IntEnum):
    """An event for a session."""

    CONNECT = 0  # a CONNECT may continue the session, or create one
    CLAIM = 1  # a CONNECT came, but other gateways, or we as former owner, may have messages of it in flight
    READY = 2  # the records for the CONNECT are stored: CONNACK is due
    FAIL = 3  # the CONNECT has failed, and the session existed before
    DISCONNECT = 4  # the connection has ended, and the session outlives it
    END = 5  # expired, ended with its connection, or discarded by Clean Start
    WILL = 6  # the will is due
    SAVED = 7  # everything is stored
    # all asked gateways have answered or are dead, or the CONNECT is given up; or a stopping gateway has released it
    RELEASED = 8
    OWNER_DIED = 9  # the gateway that owned it is dead
    # a record of another gateway was read
    CLAIMED = 10  # newer than ours; its writer waits for our answer
    MOVED = 11  # newer than ours; its writer does not wait for us
    OUTDATED = 12  # older than ours, or a deletion of a session that we have in memory
    DELETED = 13
    RIVAL = 14  # same epoch, stored before ours but unknown when ours was written; its writer may have served it


class Action(enum.IntEnum):
    """The gateway's reaction."""

    NOTHING = 0
    CREATE = 1  # create a `Session`; its records are stored before CONNACK
    LOAD = 2  # the same, from the stored records
    RESUME = 3  # the same, with the `Session` that still exists
    CLAIM = 4  # write a record with the next epoch that names the gateways we wait for
    TAKE_OVER = 5  # write the record as ours, without a connection; the will may be due
    ATTACH = 6  # give the session to the connection
    SAVE = 7  # write both records
    UNLOAD = 8  # drop the `Session`, keep the records
    END = 9  # delete the records; publish the will
    PUBLISH_WILL = 10
    HAND_OVER = 11  # close the connection; write the last in-flight record when Kafka has answered for QoS 2 messages
    RELEASE = 12  # keep the other gateway's record, and answer it as soon as nothing is in flight here
    ASK = 13  # wait for that gateway's answer too
    SET_ASIDE = 14  # drop the `Session` as in HAND_OVER, but the record stays ours; the next CONNECT claims
    FOLLOW = 15  # keep the other gateway's record
    FORGET = 16  # the records were deleted
    WRITE = 17  # overwrite it with our record


_S, _E, _A = SessionState, Event, Action


def _without_object(state: SessionState, *, ours: bool) -> dict[Event, tuple[Action, SessionState]]:
    """Return the reactions to other gateways' records without a `Session` here; `ours`: we wrote the last record."""
    return {
        _E.CLAIMED: (_A.RELEASE, _S.ELSEWHERE),
        _E.MOVED: (_A.FOLLOW, _S.ELSEWHERE),
        _E.OUTDATED: (_A.WRITE if ours else _A.NOTHING, state),
        _E.DELETED: (_A.FORGET, _S.ABSENT),
    }


def _object(state: SessionState) -> dict[Event, tuple[Action, SessionState]]:
    """Return the reactions with a `Session` here: hand it over to a newer writer, overwrite a deletion."""
    return {
        _E.CLAIMED: (_A.HAND_OVER, _S.ELSEWHERE),
        _E.MOVED: (_A.HAND_OVER, _S.ELSEWHERE),
        _E.OUTDATED: (_A.WRITE, state),
        _E.DELETED: (_A.WRITE, state),
    }


TABLE: Final[dict[SessionState, dict[Event, tuple[Action, SessionState]]]] = {
    _S.ABSENT: {
        _E.CONNECT: (_A.CREATE, _S.OPENING),
        _E.CLAIMED: (_A.RELEASE, _S.ELSEWHERE),
        _E.MOVED: (_A.FOLLOW, _S.ELSEWHERE),
        _E.DELETED: (_A.NOTHING, _S.ABSENT),
    },
    _S.ELSEWHERE: {
        _E.CLAIM: (_A.CLAIM, _S.CLAIMING),
        _E.OWNER_DIED: (_A.TAKE_OVER, _S.AWAY),
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
        _E.SAVED: (_A.UNLOAD, _S.AWAY),
        _E.END: (_A.END, _S.ABSENT),
        _E.WILL: (_A.PUBLISH_WILL, _S.SAVING),
        _E.RIVAL: (_A.SET_ASIDE, _S.AWAY),
        **_object(_S.SAVING),
    },
    _S.AWAY: {
        _E.CONNECT: (_A.LOAD, _S.OPENING),
        _E.CLAIM: (_A.CLAIM, _S.CLAIMING),  # not all gateways have answered yet
        _E.END: (_A.END, _S.ABSENT),
        _E.WILL: (_A.PUBLISH_WILL, _S.AWAY),
        **_without_object(_S.AWAY, ours=True),
    },
}
"""State -> event -> action and next state. Missing combinations cannot happen.

In CONNECTED, a CONNECT first closes the old connection [MQTT-3.1.4-3]; with Clean Start it first ends the session.
"""
