"""The states of an inbound QoS 2 message from PUBLISH to PUBCOMP, as a table (section 4.3.3, receiver).

Each packet identifier has one state. `gateway.mqtt.session.qos2` executes the table; docs/mqtt.md has the diagram that
`make tables` draws from it.
"""

from __future__ import annotations

import enum
from typing import Final


class Qos2State(enum.IntEnum):
    """The state of a message; an `IntEnum`, since its members are hashed for each message."""

    ENDED = 0  # no message: the identifier is free
    STORING = 1  # not submitted to Kafka yet, or not answered
    STORING_RELEASED = 2  # the same, and PUBREL was received
    STORED = 3  # PUBREC was sent; PUBREL is awaited
    COPYING = 4  # PUBREL was received; the client's own copy must be sent first, if configured
    COMPLETING = 5  # the in-flight record without the message is being written; PUBCOMP follows


class Qos2Event(enum.IntEnum):
    """An event for a message."""

    PUBLISH = 0
    PUBREL = 1
    STORED = 2  # by Kafka
    REFUSED = 3  # by Kafka, or Kafka does not answer
    COPIED = 4  # the client's own copy was sent, does not exist, or was waited for long enough
    PERSISTED = 5  # the in-flight record without the message is stored, or the session has none


class Qos2Action(enum.IntEnum):
    """The gateway's reaction."""

    NOTHING = 0
    STORE = 1  # submit the record to Kafka, once its topic's start offsets are in a stored in-flight record
    JOIN = 2  # PUBREC is sent together with that of the first PUBLISH [MQTT-4.3.3-10]
    PUBREC = 3
    REFUSE = 4  # PUBREC with an error, or close the connection [MQTT-4.3.3-9]
    AWAIT_COPY = 5
    PUBREC_AWAIT_COPY = 6  # both
    PERSIST = 7  # write an in-flight record without the message
    PUBCOMP = 8


_S, _E, _A = Qos2State, Qos2Event, Qos2Action
TABLE: Final[dict[Qos2State, dict[Qos2Event, tuple[Qos2Action, Qos2State]]]] = {
    _S.ENDED: {
        _E.PUBLISH: (_A.STORE, _S.STORING),
        _E.PUBREL: (_A.PUBCOMP, _S.ENDED),  # ended before, and PUBCOMP was lost [MQTT-4.3.3-11]
        _E.PERSISTED: (_A.NOTHING, _S.ENDED),  # second PUBREL: PUBCOMP was sent already
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
        _E.PUBLISH: (_A.PUBREC, _S.STORED),  # a repetition is not stored again
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
"""State -> event -> action and next state. Missing combinations cannot happen; a client's packets always can."""
