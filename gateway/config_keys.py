"""Names of keys and environment variables: which there are, and which one was meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, get_args, get_origin

from pydantic import BaseModel

PREFIX: Final = "TRIVIUM_"
DELIMITER: Final = "__"
OTHERS: Final = re.compile(r"TRIVIUM_(CACHE$|TEST_|SERVICE_|PORT$|PORT_)")
"""Variables with our prefix that are no keys: where jars are kept, tests, and what Kubernetes tells the pods beside a
service that is named trivium."""


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds; None for a plain value."""
    found = annotation if isinstance(annotation, type) and get_origin(annotation) is None else None
    return found if found is not None and issubclass(found, BaseModel) else None


def keys(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key below a section, sections among them, as paths."""
    for name, field in model.model_fields.items():
        path = (*above, name)
        yield path
        section = section_of(field.annotation)
        if section is not None:
            yield from keys(section, path)


def nearest(name: str, names: Iterable[str]) -> str:
    """` (did you mean ...?)`, or nothing where no name is like it."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" (did you mean {found[0]}?)" if found else ""


def unknown_variables(model: type[BaseModel], environment: Mapping[str, str]) -> list[str]:
    """A line for each variable that names no key, with the one that may be meant. No value is told.

    A variable is ours by its prefix, or by a prefix that is nearly ours before a key that there is.
    """
    known = {PREFIX + DELIMITER.join(path).upper() for path in keys(model)}
    open_ended = {PREFIX + DELIMITER.join(path).upper() + DELIMITER for path in _mappings(model)}
    lines = []
    for variable in sorted(environment):
        name = variable.upper()
        if not name.startswith(PREFIX):
            beginning, _, rest = name.partition("_")
            if DELIMITER in rest and PREFIX + rest in known and _is_nearly_ours(beginning):
                lines.append(f"{variable}: there is no such key (did you mean {PREFIX + rest}?)")
            continue
        if name in known or OTHERS.match(name):
            continue
        if not any(name.startswith(beginning) for beginning in open_ended):
            lines.append(f"{variable}: there is no such key{nearest(name, known)}")
    return lines


def _is_nearly_ours(beginning: str) -> bool:
    return bool(difflib.get_close_matches(beginning, [PREFIX.removesuffix("_")], cutoff=0.75))


def unknown_key(model: type[BaseModel], path: tuple[str, ...]) -> str:
    """What may be meant by a key that is not there."""
    return nearest(".".join(path), (".".join(known) for known in keys(model)))


def _mappings(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            yield from _mappings(section, (*above, name))
        elif any(get_origin(kind) is not None for kind in (field.annotation, *get_args(field.annotation))):
            origin = get_origin(field.annotation)
            if isinstance(origin, type) and issubclass(origin, Mapping):
                yield (*above, name)
