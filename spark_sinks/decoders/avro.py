"""Avro schemas: checks the columns of a job against a schema, and reduces it to their fields.

A schema is JSON, so no Avro library is needed here. Spark decodes the values (`spark_sinks.read.decode`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from spark_sinks.decoders.values import Wanted
from spark_sinks.spec.values import TYPE_NAMES

READ: Final = "trivium_read"
"""A field only in the reader's schema, true by default: Spark sets every field to null if it cannot decode."""
PRIMITIVE: Final = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_TYPES: Final[Mapping[str, frozenset[str]]] = {
    "double": frozenset({"int", "long", "float", "double"}),
    "long": frozenset({"int", "long"}),
    "boolean": frozenset({"boolean"}),
    "string": frozenset({"string", "enum"}),
}
_UNITS: Final = {"millis": 1, "micros": 1_000, "nanos": 1_000_000}
"""Fractions of a millisecond in each timestamp unit."""


class SchemaError(ValueError):
    """The schema cannot be used by a job; the message says why."""


class AvroSchema:
    """A record schema.

    Raises:
        SchemaError: not an Avro schema, not of a record, or of a record that contains itself, whose nesting has no
            limit.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._named: dict[str, Any] = {}
        try:
            schema = json.loads(text)
        except ValueError as error:
            raise SchemaError(f"not JSON: {error}") from error
        root = self._known(schema, "", ())
        kind = "several types" if isinstance(root, list) else root["type"]
        if kind != "record":
            raise SchemaError(f"a schema of {kind}; it must be a record")
        self._root: dict[str, Any] = root

    def lacks(self, columns: Sequence[Wanted], time: str | None) -> Iterator[str]:
        """Yield one sentence, with the source's key, for each column that is missing or has another type."""
        wanted = [(f"columns.{part.name}", part.path, _TYPES[part.type], TYPE_NAMES[part.type]) for part in columns]
        if time is not None:
            wanted.append(("time", time, frozenset({"long", "double", "string"}), "number or text"))
        for key, path, kinds, name in wanted:
            try:
                kind_found = self.at(path)["type"]
            except SchemaError as error:
                yield f"{key}: {error}"
                continue
            if kind_found not in kinds:
                yield f"{key}: {path} is {kind_found} in the schema, not a {name}"

    def at(self, path: str) -> dict[str, Any]:
        """Return the type at a dotted path, without null; SchemaError if there is none."""
        schema: dict[str, Any] = self._root
        for name in path.split("."):
            if schema["type"] != "record":
                raise SchemaError(f"{path} is not in the schema: {schema['type']} has no fields")
            fields = {field["name"]: field["type"] for field in schema["fields"]}
            if name not in fields:
                raise SchemaError(f"{schema['name']} has no field {name}, only {', '.join(fields)}")
            schema = self._single(fields[name], path)
        return schema

    def milliseconds(self, path: str) -> int:
        """Return how many units of a number make a millisecond: by its logical type, else one."""
        return _UNITS.get(str(self.at(path).get("logicalType")).rpartition("-")[2], 1)

    def reader(self, paths: Sequence[str]) -> str:
        """Return the schema as JSON, reduced to the fields at these paths, their parents, and `READ`.

        Logical types are omitted, so that Spark returns plain numbers.
        """
        wanted: dict[str, set[str]] = defaultdict(set)  # fields, by the full name of their record
        for path in paths:
            schema = self._root
            for name in path.split("."):
                wanted[schema["name"]].add(name)
                schema = self._single(next(part["type"] for part in schema["fields"] if part["name"] == name), path)
        made = self._only(self._root, wanted, set())
        made["fields"].append({"name": READ, "type": "boolean", "default": True})
        return json.dumps(made)

    def _only(self, kind: Any, wanted: Mapping[str, set[str]], defined: set[str]) -> Any:
        if isinstance(kind, list):
            return [self._only(part, wanted, defined) for part in kind]
        name = kind.get("name")
        if name is None:
            return kind["type"]
        if name in defined:  # a name is defined once
            return name
        defined.add(name)
        if kind["type"] == "enum":
            return {"type": "enum", "name": name, "symbols": kind["symbols"]}
        fields = [field for field in kind["fields"] if field["name"] in wanted[name]]
        return {
            "type": "record",
            "name": name,
            "fields": [{"name": part["name"], "type": self._only(part["type"], wanted, defined)} for part in fields],
        }

    @staticmethod
    def _single(kind: Any, path: str) -> dict[str, Any]:
        """Return a type without null; SchemaError if it is a union of several types."""
        if not isinstance(kind, list):
            return dict(kind)
        single = [part for part in kind if part["type"] != "null"]
        if len(single) != 1:
            raise SchemaError(f"{path} is a union of several types in the schema")
        return dict(single[0])

    def _known(self, given: Any, namespace: str, around: tuple[str, ...]) -> Any:
        """Resolve all names in a type; types become objects, unions become lists."""
        if isinstance(given, list):
            return [self._known(part, namespace, around) for part in given]
        if isinstance(given, str):
            if given in PRIMITIVE:
                return {"type": given}
            full = given if "." in given else _full(given, namespace)
            full = full if full in around or full in self._named else given
            if full in around:
                raise SchemaError(f"the record {given} contains itself")
            if full not in self._named:
                raise SchemaError(f"unknown type {given}")
            return self._named[full]
        if not isinstance(given, dict) or "type" not in given:
            raise SchemaError("not an Avro schema")
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
            if not isinstance(fields, list) or not all(isinstance(part, dict) and "name" in part for part in fields):
                raise SchemaError(f"{full} has no fields")
            inside = (*around, full)
            space = full.rpartition(".")[0]
            made = {
                "type": "record",
                "name": full,
                "fields": [
                    {"name": part["name"], "type": self._known(part.get("type"), space, inside)} for part in fields
                ],
            }
        self._named[full] = made
        return made


def _full(name: str, namespace: str) -> str:
    return f"{namespace}.{name}" if namespace else name
