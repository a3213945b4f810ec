"""The contract (OpenAPI 3.1), against which requests are validated: operations, parameters and bodies.

The document is assembled from parts (`assemble`), each with the paths and schemas of one subject. `Contract` compiles
it once for use at run time: routes, typed parameters, schemas of bodies.

Extensions of ours: `x-every-operation` at the top has the answers that every operation can give, `x-with-body` those of
every operation with a body; `assemble` expands both. Three more belong to a schema. `x-status` sets the status for a
violation of a keyword, such as `{enum: 422}`; the default is 400. `x-words` sets the error text, where clients of the
dialect look for a certain one; `{value}` in it is replaced by the value that was sent. `x-lines: strimzi` makes errors
in an object's own properties look like those of the Strimzi bridge, which do not name a deeper place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import jsonschema_rs
import msgspec

from protocols.rest.errors import Fault, RestError, invalid, is_text
from protocols.rest.requests import decode

METHODS: Final = ("delete", "get", "head", "options", "patch", "post", "put")
_SHOWN_ERRORS: Final = 8  # of one request; a body may have thousands
_SHOWN_TEXT: Final = 240  # characters of one error: it repeats what the client sent
_STATUS: Final = "x-status"
_WORDS: Final = "x-words"
_LINES: Final = "x-lines"
_BOUNDS: Final = frozenset({"const", "enum", "format", "maxLength", "minLength", "pattern"})  # of a string
_ANYTHING: Final = msgspec.json.Decoder(Any)
_TYPES: Final = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}
_NUMBER_DIGITS: Final = 19  # of an integer in a path or query; no parameter needs more than 64 bits


class Schema:
    """One compiled schema."""

    __slots__ = ("_definition", "_validator")

    def __init__(self, definition: dict[str, Any]) -> None:
        """Compile `definition`, which has no references."""
        self._definition = definition
        self._validator = jsonschema_rs.Draft202012Validator(definition)

    def check(self, value: Any, where: str = "") -> None:
        """Validate a value as `json.loads` returns it.

        `where`, such as "query parameter `timeout`", replaces the JSON path in error texts.

        Raises:
            RestError: 400; or the lowest `x-status` if all violations have one.
        """
        if self._validator.is_valid(value):
            return
        errors = list(islice(self._validator.iter_errors(value), _SHOWN_ERRORS))
        statuses = {self._extension(_STATUS, error) or 400 for error in errors}
        status = 400 if 400 in statuses else min(statuses)
        words = [self._error_text(error) for error in errors]
        if len(words) == 1 and words[0]:
            raise RestError(status, words[0])
        flat = self._definition.get(_LINES) == "strimzi"
        lines: list[str] = []
        for error, own in zip(errors, words, strict=True):
            if own:
                lines.append(own)
            elif flat and len(error.instance_path) < 2:
                lines += _flat_lines(error)
            else:
                lines.append(f"{_cut(error.message)} - at {where or f'`{_json_path(error.instance_path)}`'}")
        raise invalid(*lines, status=status)

    def _error_text(self, error: jsonschema_rs.ValidationError) -> str:
        words: str | None = self._extension(_WORDS, error)
        return words.replace("{value}", _cut(str(error.instance))) if words else ""

    def _extension(self, extension: str, error: jsonschema_rs.ValidationError) -> Any:
        """Return the schema's value in `extension` for the violated keyword, or None."""
        *path, keyword = error.schema_path
        node: Any = self._definition
        for step in path:
            node = node[step]
        return node.get(extension, {}).get(keyword) if isinstance(node, dict) else None


class Parameter(msgspec.Struct, frozen=True):
    """A parameter of a path or query, or a header field."""

    name: str
    place: str  # path, query or header
    kind: str  # string, integer, boolean, number or array
    required: bool
    default: Any
    schema: Schema
    bounded: bool  # whether some texts are not valid

    def value(self, texts: Sequence[str]) -> Any:
        """Convert and validate the texts that were sent; RestError 400."""
        where = f"{self.place} parameter `{self.name}`"
        if not all(map(is_text, texts)):
            raise invalid(f"It is not UTF-8 - at {where}")
        if self.kind == "array":
            value: Any = list(texts)
        elif len(texts) > 1:
            raise invalid(f"It was given more than once - at {where}")
        else:
            value = _typed(self.kind, texts[0])
        self.schema.check(value, where=where)
        return value


class BodyContract(msgspec.Struct, frozen=True):
    """The body of an operation: the schema for each media type, None for types that are not JSON."""

    required: bool
    media: dict[str, Schema | None]


class Operation(msgspec.Struct, frozen=True):
    """One operation of the contract."""

    name: str
    method: str
    template: str
    path: tuple[Parameter, ...]  # in the order of the template
    query: dict[str, Parameter]
    headers: tuple[Parameter, ...]
    body: BodyContract | None
    answers: dict[str, tuple[str, ...]]  # media types by status ("200")
    typed_path: bool  # whether the values of the path must be converted or validated
    defaults: dict[str, Any]  # of the query's parameters

    def path_values(self, texts: Sequence[str]) -> tuple[Any, ...]:
        """Return the path's values, typed. Raises RestError 400, with `Fault.BAD_NUMBER` for a bad number."""
        if not self.typed_path:
            return tuple(texts)
        values = []
        for parameter, text in zip(self.path, texts, strict=True):
            try:
                values.append(parameter.value((text,)))
            except RestError as error:
                error.fault = Fault.BAD_NUMBER if parameter.kind == "integer" else None
                raise
        return tuple(values)

    def query_values(self, given: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Return the declared query parameters, typed, with defaults; others are ignored.

        Raises:
            RestError: 400 for a value that violates the contract, or for a missing one.
        """
        values = dict(self.defaults)
        for name, parameter in self.query.items():
            texts = given.get(name)
            if texts is not None:
                values[name] = parameter.value(texts)
            elif parameter.required:
                raise invalid(f"It is missing - at query parameter `{name}`")
        return values

    def success_media(self) -> tuple[str, ...]:
        """Return the media types of 2xx answers, the preferred one first."""
        return tuple(
            dict.fromkeys(media for status, types in self.answers.items() if status[0] == "2" for media in types)
        )


class Contract:
    """The whole document, compiled."""

    def __init__(self, document: dict[str, Any]) -> None:
        """Compile a `document` from `assemble`; ValueError if it is not consistent."""
        self.document = document
        self.operations: dict[str, Operation] = {}
        for operation in self._compiled():
            if operation.name in self.operations:
                raise ValueError(f"{operation.name} is defined twice in the contract")
            self.operations[operation.name] = operation

    def _compiled(self) -> Iterator[Operation]:
        for template, item in self.document["paths"].items():
            shared = [self._resolved(parameter) for parameter in item.get("parameters", ())]
            for method in METHODS:
                if method in item:
                    yield self._operation(method, template, item[method], shared)

    def _operation(self, method: str, template: str, entry: dict[str, Any], shared: list[Any]) -> Operation:
        own = [self._resolved(parameter) for parameter in entry.get("parameters", ())]
        parameters = {(one["in"], one["name"]): _parameter(one) for one in (*shared, *own)}
        names = [part[1:-1] for part in template.split("/") if part.startswith("{")]
        named = {name for location, name in parameters if location == "path"}
        if named != set(names):
            raise ValueError(f"{method} {template}: the path's parameters are {sorted(names)}, not {sorted(named)}")
        path = tuple(parameters["path", name] for name in names)
        query = {name: parameter for (location, name), parameter in parameters.items() if location == "query"}
        return Operation(
            name=entry["operationId"],
            method=method.upper(),
            template=template,
            path=path,
            query=query,
            headers=tuple(parameter for (location, _), parameter in parameters.items() if location == "header"),
            body=self._body(entry.get("requestBody")),
            answers={
                status: tuple(self._resolved(answer).get("content", ()))
                for status, answer in entry["responses"].items()
            },
            typed_path=any(parameter.bounded for parameter in path),
            defaults={name: one.default for name, one in query.items() if one.default is not None},
        )

    def _body(self, entry: dict[str, Any] | None) -> BodyContract | None:
        if entry is None:
            return None
        body = self._resolved(entry)
        media = {
            name: Schema(content["schema"]) if name.endswith("json") and "schema" in content else None
            for name, content in body["content"].items()
        }
        return BodyContract(body.get("required", False), media)

    def _resolved(self, node: Any) -> Any:
        """Return `node` with its references replaced by their targets."""
        if isinstance(node, dict):
            reference = node.get("$ref")
            if reference is None:
                return {name: self._resolved(value) for name, value in node.items()}
            target: Any = self.document
            for step in reference.removeprefix("#/").split("/"):
                target = target[step.replace("~1", "/").replace("~0", "~")]
            return self._resolved(target)
        return [self._resolved(value) for value in node] if isinstance(node, list) else node


def assemble(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Assemble one document from its parts; the first has the common fields (title, version, licence).

    Raises:
        ValueError: A path's method or a component is defined in two parts.
    """
    document: dict[str, Any] = {**parts[0], "tags": [], "paths": {}, "components": {}}
    for part in parts:
        document["tags"] += part.get("tags", ())
        for path, item in part.get("paths", {}).items():
            _merge(document["paths"].setdefault(path, {}), item, path)
        for kind, components in part.get("components", {}).items():
            _merge(document["components"].setdefault(kind, {}), components, kind)
    everywhere = document.pop("x-every-operation", {})
    with_body = document.pop("x-with-body", {})
    for item in document["paths"].values():
        for method in METHODS:
            operation = item.get(method)
            if operation is not None:
                added = {**everywhere, **(with_body if "requestBody" in operation else {})}
                operation["responses"] = dict(sorted({**added, **operation["responses"]}.items()))
    return document


def _merge(into: dict[str, Any], part: Mapping[str, Any], where: str) -> None:
    twice = into.keys() & part.keys()
    if twice:
        raise ValueError(f"{where}: {', '.join(sorted(twice))} is defined in two parts of the contract")
    into.update(part)


def _parameter(entry: dict[str, Any]) -> Parameter:
    definition = entry["schema"]
    kind = definition.get("type", "string")
    return Parameter(
        name=entry["name"],
        place=entry["in"],
        kind=kind if isinstance(kind, str) else kind[0],
        required=entry.get("required", False),
        default=definition.get("default"),
        schema=Schema(definition),
        bounded=kind != "string" or bool(definition.keys() & _BOUNDS),
    )


def _typed(kind: str, text: str) -> Any:
    """Convert a text; return it unchanged if it is not of the kind, so that the schema refuses it."""
    if kind == "integer":
        digits = text.removeprefix("-")
        return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= _NUMBER_DIGITS else text
    if kind == "boolean":
        return {"true": True, "false": False}.get(text, text)
    return text


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_TEXT else text[:_SHOWN_TEXT] + "..."


def _flat_lines(error: jsonschema_rs.ValidationError) -> list[str]:
    """Describe a violation in a flat object in the words of the Strimzi bridge's validator."""
    kind = error.kind
    if isinstance(kind, jsonschema_rs.ValidationErrorKind.AdditionalProperties):
        return [f'Property "{_cut(name)}" does not match additional properties schema' for name in kind.unexpected]
    lines = [f'Property "{name}" does not match schema' for name in error.instance_path]
    if isinstance(kind, jsonschema_rs.ValidationErrorKind.Type):
        return [
            *lines,
            f"Instance type {_TYPES.get(type(error.instance), 'number')} is invalid. Expected {', '.join(kind.types)}",
        ]
    return [*lines, _cut(error.message)]


def _json_path(path: Sequence[str | int]) -> str:
    return "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def check_body(schema: Schema | None, body: bytes) -> None:
    """Validate a JSON body; RestError 400, or the schema's `x-status`."""
    if schema is not None:
        schema.check(decode(_ANYTHING, body))
