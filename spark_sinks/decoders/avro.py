"""Avro schemas: which of a record's fields a job's columns are, and the schema with only these.

A schema is JSON; nothing of Avro is needed to look into it. What reads the values is Spark (`spark_sinks.decode`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from spark_sinks.decoders.values import Wanted
from spark_sinks.spec.values import TYPE_NAMES

READ: Final = "trivium_read"
"""A field of the reader's schema alone, true by default: Spark makes every field of what it cannot read null."""
PRIMITIVE: Final = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_TYPES: Final[Mapping[str, frozenset[str]]] = {
    "double": frozenset({"int", "long", "float", "double"}),
    "long": frozenset({"int", "long"}),
    "boolean": frozenset({"boolean"}),
    "string": frozenset({"string", "enum"}),
}
_UNITS: Final = {"millis": 1, "micros": 1_000, "nanos": 1_000_000}
"""Of timestamps: how many make a millisecond."""


class SchemaError(ValueError):
    """No schema that a job can use; the text says why."""


class Schema:
    """A schema of records.

    Raises:
        SchemaError: no Avro schema, of no record, or of records in themselves: a message of those could be nested
            without end.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._named: dict[str, Any] = {}
        try:
            found = json.loads(text)
        except ValueError as error:
            raise SchemaError(f"no JSON: {error}") from error
        root = self._known(found, "", ())
        kind = "several types" if isinstance(root, list) else root["type"]
        if kind != "record":
            raise SchemaError(f"a schema of {kind}; records are read")
        self._root: dict[str, Any] = root

    def lacks(self, columns: Sequence[Wanted], time: str | None) -> Iterator[str]:
        """Columns that it does not have, or in another type: one sentence each, with the key of the source."""
        for column in columns:
            try:
                found = self.at(column.path)
            except SchemaError as error:
                yield f"columns.{column.name}: {error}"
                continue
            if found["type"] not in _TYPES[column.type]:
                yield (
                    f"columns.{column.name}: {column.path} is {found['type']} in the schema, "
                    f"no {TYPE_NAMES[column.type]}"
                )
        if time is not None:
            try:
                found = self.at(time)
            except SchemaError as error:
                yield f"time: {error}"
            else:
                if found["type"] not in {"long", "double", "string"}:
                    yield f"time: {time} is {found['type']} in the schema, no number or text"

    def at(self, path: str) -> dict[str, Any]:
        """The type at a path with dots, without its null; SchemaError where there is none."""
        found: dict[str, Any] = self._root
        for name in path.split("."):
            if found["type"] != "record":
                raise SchemaError(f"{path} is not in the schema: {found['type']} has no fields")
            fields = {field["name"]: field["type"] for field in found["fields"]}
            if name not in fields:
                raise SchemaError(f"there is no field {name} in {found['name']}; it has {', '.join(fields)}")
            found = self._single(fields[name], path)
        return found

    def milliseconds(self, path: str) -> int:
        """How many of a number there make a millisecond: by its logical type, else one."""
        return _UNITS.get(str(self.at(path).get("logicalType")).rpartition("-")[2], 1)

    def reader(self, paths: Sequence[str]) -> str:
        """The schema with the fields at these paths and those around them only, and `READ`; as JSON.

        Without logical types: Spark gives the numbers as they are.
        """
        wanted: dict[str, set[str]] = defaultdict(set)  # fields, by the full name of their record
        for path in paths:
            found = self._root
            for name in path.split("."):
                wanted[found["name"]].add(name)
                found = self._single(next(one["type"] for one in found["fields"] if one["name"] == name), path)
        made = self._only(self._root, wanted, set())
        made["fields"].append({"name": READ, "type": "boolean", "default": True})
        return json.dumps(made)

    def _only(self, kind: Any, wanted: Mapping[str, set[str]], told: set[str]) -> Any:
        if isinstance(kind, list):
            return [self._only(one, wanted, told) for one in kind]
        name = kind.get("name")
        if name is None:
            return kind["type"]
        if name in told:  # a name is defined once
            return name
        told.add(name)
        if kind["type"] == "enum":
            return {"type": "enum", "name": name, "symbols": kind["symbols"]}
        fields = [field for field in kind["fields"] if field["name"] in wanted[name]]
        return {
            "type": "record",
            "name": name,
            "fields": [{"name": one["name"], "type": self._only(one["type"], wanted, told)} for one in fields],
        }

    @staticmethod
    def _single(kind: Any, path: str) -> dict[str, Any]:
        """A type without its null; SchemaError where it is one of several."""
        if not isinstance(kind, list):
            return dict(kind)
        single = [one for one in kind if one["type"] != "null"]
        if len(single) != 1:
            raise SchemaError(f"{path} has one of several types in the schema")
        return dict(single[0])

    def _known(self, given: Any, namespace: str, around: tuple[str, ...]) -> Any:
        """A type with every name in it replaced by what it names, all as objects, unions as lists."""
        if isinstance(given, list):
            return [self._known(one, namespace, around) for one in given]
        if isinstance(given, str):
            if given in PRIMITIVE:
                return {"type": given}
            full = given if "." in given else _full(given, namespace)
            full = full if full in around or full in self._named else given
            if full in around:
                raise SchemaError(f"{given} is a record with itself in it")
            if full not in self._named:
                raise SchemaError(f"there is no type {given}")
            return self._named[full]
        if not isinstance(given, dict) or "type" not in given:
            raise SchemaError("no Avro schema")
        kind = given["type"]
        if not isinstance(kind, str):
            return self._known(kind, namespace, around)
        if kind in {"record", "error", "enum", "fixed"}:
            return self._new(given, namespace, around)
        if kind in {"array", "map"}:
            inner = "items" if kind == "array" else "values"
            return {"type": kind, inner: self._known(given.get(inner), namespace, around)}
        if kind in PRIMITIVE:
            return {name: given[name] for name in ("type", "logicalType", "precision", "scale") if name in given}
        return self._known(kind, namespace, around)

    def _new(self, given: Mapping[str, Any], namespace: str, around: tuple[str, ...]) -> Any:
        name = given.get("name")
        if not isinstance(name, str) or not name:
            raise SchemaError(f"{given['type']} without a name")
        own = given.get("namespace", namespace)
        full = name if "." in name else _full(name, own)
        if full in self._named or full in around:
            raise SchemaError(f"two types are named {full}")
        made: dict[str, Any]
        if given["type"] == "enum":
            made = {"type": "enum", "name": full, "symbols": given.get("symbols")}
        elif given["type"] == "fixed":
            made = {"type": "fixed", "name": full, "size": given.get("size")}
        else:
            fields = given.get("fields")
            if not isinstance(fields, list) or not all(isinstance(one, dict) and "name" in one for one in fields):
                raise SchemaError(f"{full} has no fields")
            inside = (*around, full)
            space = full.rpartition(".")[0]
            made = {
                "type": "record",
                "name": full,
                "fields": [
                    {"name": one["name"], "type": self._known(one.get("type"), space, inside)} for one in fields
                ],
            }
        self._named[full] = made
        return made


def _full(name: str, namespace: str) -> str:
    return f"{namespace}.{name}" if namespace else name
