from collections.abc import Sequence

from mapping.amqp.fields import AmqpDestination
from mapping.record import Received, Record

def to_record(data: bytes, destination: AmqpDestination, now_ms: int, /) -> Record:
    """Map a message as `mapping.amqp.incoming.to_record` does."""

def to_records(
    messages: list[bytes], first: int, destination: AmqpDestination, now_ms: int, records: list[Record], /
) -> None:
    """Map the messages from index `first` on, as `to_record` does, and append them to `records`.

    Raises:
        Unmappable: the message after those appended cannot be mapped.
    """

def from_records(
    records: Sequence[Received], now_ms: int, delivery_count: int, most_bytes: int, /
) -> list[bytes | None]:
    """Map the first records, at least one, until the messages have `most_bytes` bytes together.

    Each is mapped as by `mapping.amqp.outgoing.from_record`; None stands for one that has expired.
    """
