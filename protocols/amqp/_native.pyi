from collections.abc import Sequence
from typing import Any

from protocols.amqp.formats import Foreign, State

def take_usual(
    links: dict[int, Any],  # the engine's links by address
    sent: dict[int, tuple[Any, Any, int]],  # the engine's unsettled deliveries by address: link, token, size in bytes
    transactional: bool,
    events: list[Any],  # new events are appended to it
    /,
) -> int:
    """Process usual deliveries from the front of proton's event queue, and stop at the first other event.

    Usual are complete messages of one transfer within credit and limits, and `accepted` outcomes of sent deliveries.

    Returns:
        The type of the first event that is left for the engine, or 0 when there is none.
    """

def accept(link: Any, deliveries: Sequence[int | None], /) -> None:
    """Settle received deliveries of a link as accepted; None stands for one that the peer sent settled."""

def send(
    link: Any,
    number: int,  # the first message's delivery tag, 32 bits; the next messages count on
    messages: Sequence[bytes],
    tokens: Sequence[Any] | None,  # one for each message; None sends them settled
    sent: dict[int, tuple[Any, Any, int]],  # the engine's unsettled deliveries; the new ones are added
    /,
) -> int:
    """Send messages on a link that has credit for them, and return their size in bytes."""

def scan(data: bytes, state: State, /) -> tuple[State, Foreign | None]:
    """Read on in a stream of frames; the second result is None where no foreign format is."""
