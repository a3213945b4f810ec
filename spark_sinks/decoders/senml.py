"""Sensor Measurement Lists (RFC 8428), packs in JSON and in CBOR: each measurement becomes a reading.

Base fields hold for their record and those after it. Name and time are joined with their base, a value and a sum
added to theirs, a unit counts before the base unit (4.6). A pack is good as a whole or not at all.
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
from spark_sinks.decoders.values import Fault, Row, Wanted, number, row, text
from spark_sinks.spec.parts import SENML_FIELDS

VERSION: Final = 10  # RFC 8428, 4.4: a pack of a newer one must not be used
RELATIVE_BELOW: Final = 2**28  # 4.5.3: a time below is in seconds from now
MOST_READINGS: Final = 10_000
"""Of one pack: each takes the record's key, headers and value with it through the job."""
LONGEST_NAME: Final = 1_024
"""Characters of a resolved name: a long base name stands in front of every name of a pack."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9:./_-]*")  # 4.5.1
_LABELS: Final[Mapping[int, str]] = {
    -1: "bver", -2: "bn", -3: "bt", -4: "bu", -5: "bv", -6: "bs",
    0: "n", 1: "u", 2: "v", 3: "vs", 4: "vb", 5: "s", 6: "t", 7: "ut", 8: "vd",
}  # fmt: skip
"""Of CBOR (6, table 4)."""
_VALUES: Final = ("v", "vs", "vb", "vd")


@dataclass(frozen=True)
class Senml:
    """Reads packs."""

    columns: tuple[Wanted, ...]

    def __call__(self, value: bytes, sent_ms: int) -> Sequence[Row]:
        """See `Decoder`; the time of each reading is epoch ms."""
        records = _records(value)
        if len(records) > MOST_READINGS:
            raise Fault(f"a pack of {len(records)} records; {MOST_READINGS} are taken")
        base = _Base()
        rows = []
        for place, record in enumerate(records):
            try:
                reading = base.resolved(record, sent_ms)
                if reading is not None:
                    rows.append(row(self.columns, reading.get, reading["t"]))
            except Fault as fault:
                raise Fault(f"record {place} of the pack: {fault}") from None
        if not rows:
            raise Fault("the pack has no measurement")
        return rows


@dataclass
class _Base:
    """What holds for the records that follow."""

    name: str = ""
    time: float = 0.0
    unit: str | None = None
    value: float = 0.0
    sum: float | None = None
    versions: set[int] = field(default_factory=set)

    def resolved(self, record: Any, sent_ms: int) -> dict[str, Any] | None:
        """A record by the names of its fields, `t` in epoch ms; None: it has base fields only."""
        if not isinstance(record, Mapping):
            raise Fault("no object")
        given = {_LABELS.get(label, label) if type(label) is int else label: found for label, found in record.items()}
        for label in given:
            if isinstance(label, str) and label.endswith("_"):  # 4.4: must be understood
                raise Fault(f"{label[:40]} is not understood")
        self._take(given)
        here = {label: given[label] for label in (*SENML_FIELDS, "t") if given.get(label) is not None}
        if not here and any(given.get(label) is not None for label in ("bn", "bt", "bu", "bv", "bs", "bver")):
            return None
        name = self.name + (_text(here, "n") or "")
        if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
            raise Fault("no name, or one with characters that names do not have")
        made: dict[str, Any] = {"n": name, "t": _epoch_ms(self.time + (_number(here, "t") or 0.0), sent_ms)}
        if (unit := _text(here, "u") or self.unit) is not None:
            made["u"] = unit
        if (update := _number(here, "ut")) is not None:
            made["ut"] = update
        if "s" in here or self.sum is not None:  # 4.1: one of the two is enough
            made["s"] = (self.sum or 0.0) + (_number(here, "s") or 0.0)
        values = [label for label in _VALUES if label in here]
        if len(values) > 1 or not (values or "s" in made):
            raise Fault("a record has one of v, vs, vb and vd, or a sum")
        for label in values:
            made[label] = self._value(label, here)
        return made

    def _take(self, given: Mapping[Any, Any]) -> None:
        version = given.get("bver", next(iter(self.versions), VERSION))
        if type(version) is not int or not 0 < version <= VERSION:
            raise Fault(f"a version of SenML that is not known; {VERSION} is")
        self.versions.add(version)
        if len(self.versions) > 1:
            raise Fault("another version than the record before")
        self.name = _text(given, "bn") if given.get("bn") is not None else self.name
        self.unit = _text(given, "bu") if given.get("bu") is not None else self.unit
        self.time = _number(given, "bt") if given.get("bt") is not None else self.time
        self.value = _number(given, "bv") if given.get("bv") is not None else self.value
        self.sum = _number(given, "bs") if given.get("bs") is not None else self.sum

    def _value(self, label: str, here: Mapping[str, Any]) -> Any:
        found = here[label]
        if label == "v":
            return self.value + _number(here, "v")
        if label == "vb" and not isinstance(found, bool):
            raise Fault("vb is no boolean")
        if label == "vd" and isinstance(found, bytes):  # in CBOR; JSON has it as such a text
            return base64.urlsafe_b64encode(found).rstrip(b"=").decode()
        return found if label == "vb" else _text(here, label)


def _records(value: bytes) -> Sequence[Any]:
    """The records of a pack, JSON or CBOR: no array of CBOR begins with a byte that JSON's does."""
    if value[:1] and value[0] & 0xE0 == 0x80:
        found = loaded(value)
    else:
        try:
            found = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise Fault("the value is no SenML pack, neither in JSON nor in CBOR") from error
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise Fault("the value is no SenML pack: it is no array")
    return found


def _epoch_ms(seconds: float, sent_ms: int) -> int:
    at = seconds * 1000 + (sent_ms if seconds < RELATIVE_BELOW else 0)
    if not math.isfinite(at) or not 0 <= at < 10**14:
        raise Fault("a time out of range")
    return round(at)


def _number(record: Mapping[Any, Any], label: str) -> Any:
    """A finite number, None where there is none; `Fault` for anything else."""
    return _made(number, record, label, "finite number")


def _text(record: Mapping[Any, Any], label: str) -> Any:
    """A text, None where there is none; `Fault` for anything else."""
    return _made(text, record, label, "text")


def _made(make: Callable[[Any], Any], record: Mapping[Any, Any], label: str, what: str) -> Any:
    found = record.get(label)
    made = make(found)
    if made is None and found is not None:
        raise Fault(f"{label} is no {what}")
    return made
