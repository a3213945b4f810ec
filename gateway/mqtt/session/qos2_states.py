"""A client's QoS 2 message from PUBLISH to PUBCOMP, as a table (section 4.3.3, the receiver's side).

The state is that of one packet identifier. `gateway.mqtt.session.qos2` does what the table says; docs/mqtt.md has the
diagram that `make tables` draws from it.
"""

from __future__ import annotations

import enum
from typing import Final


class State(enum.IntEnum):
    """Where a message is; an `IntEnum` since its members are hashed for each message."""

    ENDED = 0  # there is no message, or none any more: the identifier is free
    STORING = 1  # Kafka was not asked yet, or has not answered
    STORING_RELEASED = 2  # the same, and PUBREL came already
    STORED = 3  # PUBREC was sent; PUBREL is awaited
    COPYING = 4  # PUBREL came; the client's own copy is to be sent first, where that is asked for
    COMPLETING = 5  # the state record without the message is on its way to Kafka; PUBCOMP follows


class Event(enum.IntEnum):
    """What happens to a message."""

    PUBLISH = 0
    PUBREL = 1
    STORED = 2  # Kafka has it
    REFUSED = 3  # Kafka has it not, or does not answer
    COPIED = 4  # the client was sent its own copy, or gets none, or has waited long enough
    PERSISTED = 5  # the state record without the message is stored, or the session has none


class Action(enum.IntEnum):
    """What the gateway does then."""

    NOTHING = 0
    STORE = 1  # give the record to Kafka, once its topic's start offsets are in a stored state record
    JOIN = 2  # PUBREC goes with that of the first PUBLISH [MQTT-4.3.3-10]
    PUBREC = 3
    REFUSE = 4  # PUBREC with an error, or the connection's end [MQTT-4.3.3-9]
    AWAIT_COPY = 5
    PUBREC_AWAIT_COPY = 6  # both
    PERSIST = 7  # write a state record without the message
    PUBCOMP = 8


_S, _E, _A = State, Event, Action
TABLE: Final[dict[State, dict[Event, tuple[Action, State]]]] = {
    _S.ENDED: {
        _E.PUBLISH: (_A.STORE, _S.STORING),
        _E.PUBREL: (_A.PUBCOMP, _S.ENDED),  # it ended before, and its PUBCOMP was lost [MQTT-4.3.3-11]
        _E.PERSISTED: (_A.NOTHING, _S.ENDED),  # PUBREL came twice: PUBCOMP was sent
    },
    _S.STORING: {
        _E.PUBLISH: (_A.JOIN, _S.STORING),
        _E.PUBREL: (_A.NOTHING, _S.STORING_RELEASED),
        _E.STORED: (_A.PUBREC, _S.STORED),
        _E.REFUSED: (_A.REFUSE, _S.ENDED),
    },
    _S.STORING_RELEASED: {
        _E.PUBLISH: (_A.JOIN, _S.STORING_RELEASED),
        _E.PUBREL: (_A.NOTHING, _S.STORING_RELEASED),
        _E.STORED: (_A.PUBREC_AWAIT_COPY, _S.COPYING),
        _E.REFUSED: (_A.REFUSE, _S.ENDED),
    },
    _S.STORED: {
        _E.PUBLISH: (_A.PUBREC, _S.STORED),  # again: it is not stored a second time
        _E.PUBREL: (_A.AWAIT_COPY, _S.COPYING),
    },
    _S.COPYING: {
        _E.PUBLISH: (_A.PUBREC, _S.COPYING),
        _E.PUBREL: (_A.NOTHING, _S.COPYING),
        _E.COPIED: (_A.PERSIST, _S.COMPLETING),
    },
    _S.COMPLETING: {
        _E.PUBLISH: (_A.STORE, _S.STORING),  # another message
        _E.PUBREL: (_A.PERSIST, _S.COMPLETING),
        _E.PERSISTED: (_A.PUBCOMP, _S.ENDED),
    },
}
"""State -> event -> action and next state. What is not in it cannot happen; a client's packets are in every state."""
