"""How long the reader of a group waits for others, and Kafka keeps its position."""

from __future__ import annotations

import msgspec


class GroupTimes(msgspec.Struct, frozen=True):
    """How long groups wait and keep."""

    revoke_wait_s: float = 3.0  # a rebalance, for records that subscribers hold
    # how long the records of a subscription filter without subscribers here are kept, while other subscribers keep its
    # partitions here: clients come back
    return_wait_s: float = 30.0
    session_timeout_ms: int = 10_000
    # the longest a join may take, though Kafka answers, before Refused BUSY: other members take part in it
    join_timeout_s: float = 30.0
    kept_ms: int = -1  # how long Kafka keeps a commit when the group has no members; -1: as it is configured
