"""Decodes Sensor Measurement Lists (RFC 8428), packs in JSON and in CBOR: each measurement becomes a reading.

Base fields apply to their record and the following ones. A name is appended to the base name; times, values and sums
are added to their base; a unit overrides the base unit (4.6). A pack is accepted or rejected as a whole.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from spark_sinks.decoders.cbor import loaded
from spark_sinks.decoders.values import ReadingFault, Row, Wanted, number, row, text
from spark_sinks.spec.parts import SENML_FIELDS

VERSION: Final = 10  # RFC 8428, 4.4: a pack with a newer version must not be used
RELATIVE_BELOW: Final = 2**28  # 4.5.3: a smaller time is relative, in seconds from now
MOST_READINGS: Final = 10_000
"""The most readings of one pack: each carries the record's key, headers and value through the job."""
LONGEST_NAME: Final = 1_024
"""The most characters of a resolved name: a long base name is repeated in every name of a pack."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9:./_-]*")  # 4.5.1
_LABELS: Final[Mapping[int, str]] = {
    -1: "bver", -2: "bn", -3: "bt", -4: "bu", -5: "bv", -6: "bs",
    0: "n", 1: "u", 2: "v", 3: "vs", 4: "vb", 5: "s", 6: "t", 7: "ut", 8: "vd",
}  # fmt: skip
"""Labels in CBOR (6, table 4)."""
_VALUES: Final = ("v", "vs", "vb", "vd")


@dataclass(frozen=True)
class Senml:
    """Decodes packs."""

    columns: tuple[Wanted, ...]

    def __call__(self, value: bytes, sent_ms: int) -> Sequence[Row]:
        """Decode a pack to its readings; the time of each is epoch ms."""
        records = _records(value)
        if len(records) > MOST_READINGS:
            raise ReadingFault(f"the pack has {len(records)} records; at most {MOST_READINGS} are allowed")
        base = _Base()
        rows = []
        for index, record in enumerate(records):
            try:
                reading = base.resolved(record, sent_ms)
                if reading is not None:
                    rows.append(row(self.columns, reading.get, reading["t"]))
            except ReadingFault as fault:
                raise ReadingFault(f"record {index} of the pack: {fault}") from None
        if not rows:
            raise ReadingFault("the pack has no measurement")
        return rows


@dataclass
class _Base:
    """The base fields that apply to the following records."""

    name: str = ""
    time: float = 0.0
    unit: str | None = None
    value: float = 0.0
    sum: float | None = None
    versions: set[int] = field(default_factory=set)

    def resolved(self, record: Any, sent_ms: int) -> dict[str, Any] | None:
        """Resolve a record to its field names, `t` in epoch ms; None if it has only base fields."""
        if not isinstance(record, Mapping):
            raise ReadingFault("not an object")
        given = {_LABELS.get(label, label) if type(label) is int else label: value for label, value in record.items()}
        for label in given:
            if isinstance(label, str) and label.endswith("_"):  # 4.4: must be understood
                raise ReadingFault(f"{label[:40]} is not supported")
        self._take(given)
        here = {label: given[label] for label in (*SENML_FIELDS, "t") if given.get(label) is not None}
        if not here and any(given.get(label) is not None for label in ("bn", "bt", "bu", "bv", "bs", "bver")):
            return None
        name = self.name + (_text(here, "n") or "")
        if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
            raise ReadingFault("no name, or one with invalid characters")
        made: dict[str, Any] = {"n": name, "t": _epoch_ms(self.time + (_number(here, "t") or 0.0), sent_ms)}
        if (unit := _text(here, "u") or self.unit) is not None:
            made["u"] = unit
        if (update := _number(here, "ut")) is not None:
            made["ut"] = update
        if "s" in here or self.sum is not None:  # 4.1: one of the two is enough
            made["s"] = (self.sum or 0.0) + (_number(here, "s") or 0.0)
        values = [label for label in _VALUES if label in here]
        if len(values) > 1 or not (values or "s" in made):
            raise ReadingFault("a record must have one of v, vs, vb and vd, or a sum")
        for label in values:
            made[label] = self._value(label, here)
        return made

    def _take(self, given: Mapping[Any, Any]) -> None:
        version = given.get("bver", next(iter(self.versions), VERSION))
        if type(version) is not int or not 0 < version <= VERSION:
            raise ReadingFault(f"an unknown version of SenML; the newest known is {VERSION}")
        self.versions.add(version)
        if len(self.versions) > 1:
            raise ReadingFault("another version than the previous record")
        self.name = _text(given, "bn") if given.get("bn") is not None else self.name
        self.unit = _text(given, "bu") if given.get("bu") is not None else self.unit
        self.time = _number(given, "bt") if given.get("bt") is not None else self.time
        self.value = _number(given, "bv") if given.get("bv") is not None else self.value
        self.sum = _number(given, "bs") if given.get("bs") is not None else self.sum

    def _value(self, label: str, here: Mapping[str, Any]) -> Any:
        value = here[label]
        if label == "v":
            return self.value + _number(here, "v")
        if label == "vb" and not isinstance(value, bool):
            raise ReadingFault("vb is not a boolean")
        if label == "vd" and isinstance(value, bytes):  # CBOR has bytes, JSON has base64
            return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
        return value if label == "vb" else _text(here, label)


def _records(value: bytes) -> Sequence[Any]:
    """Decode a pack, JSON or CBOR: a CBOR array never starts with the same byte as JSON."""
    if value[:1] and value[0] & 0xE0 == 0x80:
        decoded = loaded(value)
    else:
        try:
            decoded = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ReadingFault("the value is not a SenML pack, neither in JSON nor in CBOR") from error
    if not isinstance(decoded, Sequence) or isinstance(decoded, str | bytes):
        raise ReadingFault("the value is not a SenML pack: it is not an array")
    return decoded


def _epoch_ms(seconds: float, sent_ms: int) -> int:
    at = seconds * 1000 + (sent_ms if seconds < RELATIVE_BELOW else 0)
    if not math.isfinite(at) or not 0 <= at < 10**14:
        raise ReadingFault("a time out of range")
    return round(at)


def _number(record: Mapping[Any, Any], label: str) -> Any:
    """Return a finite number, or None if missing; `ReadingFault` for anything else."""
    return _made(number, record, label, "finite number")


def _text(record: Mapping[Any, Any], label: str) -> Any:
    """Return a text, or None if missing; `ReadingFault` for anything else."""
    return _made(text, record, label, "text")


def _made(make: Callable[[Any], Any], record: Mapping[Any, Any], label: str, what: str) -> Any:
    entry = record.get(label)
    made = make(entry)
    if made is None and entry is not None:
        raise ReadingFault(f"{label} is not a {what}")
    return made
