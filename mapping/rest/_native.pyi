from collections.abc import Callable

from mapping.record import Headers, Record
from protocols.rest.requests import JsonRecord, TextRecord

def json_records(
    entries: list[JsonRecord],
    topic: str,
    partition: int | None,
    headers: Headers,
    more: Callable[[int, JsonRecord], Record],
    /,
) -> list[Record]: ...
def text_records(
    entries: list[TextRecord],
    topic: str,
    partition: int | None,
    headers: Headers,
    more: Callable[[int, TextRecord], Record],
    binary: bool,
    /,
) -> list[Record]: ...
