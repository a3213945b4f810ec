"""Reads a job file, TOML or Python, and reports each mistake in one sentence. Starts no JVM."""

from __future__ import annotations

import ast
import difflib
import runpy
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

from spark_sinks.decoders.needs import lacks
from spark_sinks.spec.jobs import KINDS, JobSpec, Transform
from spark_sinks.spec.parts import REAL_TIME, Declaration

SUFFIXES: Final = frozenset({".toml", ".py"})

NOT_IN_REAL_TIME: Final[Mapping[str, str]] = {
    "udf": "no Python functions", "pandas_udf": "no Python functions", "arrow_udf": "no Python functions",
    "mapInPandas": "no Python functions", "mapInArrow": "no Python functions",
    "applyInPandas": "no Python functions", "applyInArrow": "no Python functions",
    "applyInPandasWithState": "no Python state", "transformWithState": "no Python state",
    "transformWithStateInPandas": "no Python state",
    "session_window": "no session windows",
    "foreachBatch": "no foreachBatch",
    "dropDuplicatesWithinWatermark": "no dropDuplicatesWithinWatermark",
    "readStream": "no join of two streams, and a job's source is given to it",
}  # fmt: skip
"""What Spark rejects in real time only after it has started."""


class JobFileError(ValueError):
    """A job file is invalid; each line of the text names a key and the mistake."""


@dataclass(frozen=True, slots=True)
class JobFile:
    """A job as declared in its file.

    Attributes:
        path: the file's path.
        spec: its validated sections.
        transform: the function of a Python file, from readings (DataFrame) to records with columns `key` and `value`.
    """

    path: Path
    spec: Declaration
    transform: Callable[[Any], Any] | None = None

    @property
    def streaming(self) -> JobSpec:
        """The sections of a streaming job; only valid for one."""
        assert isinstance(self.spec, JobSpec)
        return self.spec

    def running_with(self, run: Mapping[str, Any]) -> JobFile:
        """Return the job with other `run` settings; JobFileError if they contradict its other sections."""
        given = self.spec.model_dump(exclude_unset=True)
        spec = _checked(self.path, lambda: type(self.spec)(**{**given, "run": {**given.get("run", {}), **run}}))
        _check_transform(self.path, spec, self.transform)
        return JobFile(self.path, spec, self.transform)


def is_job_file(name: str) -> bool:
    """Whether the JOB argument of a command line is a file, not the name of a job."""
    return Path(name).suffix in SUFFIXES


def read(path: Path) -> JobFile:
    """Read and check a job file; JobFileError with one line for each mistake.

    A Python file is executed. It must set `JOB` to an instance of a class of `spark_sinks.spec.jobs`; a `Transform`
    also needs a function `transform`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise JobFileError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JobFileError(f"{path}: not UTF-8") from error
    if path.suffix == ".py":
        return _of_python(path)
    if path.suffix != ".toml":
        raise JobFileError(f"{path}: a job file is .toml or .py")
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobFileError(f"{path}: not valid TOML: {error}") from error
    return made(path, given)


def made(path: Path, given: Mapping[str, Any]) -> JobFile:
    """Return the job of a parsed TOML file; JobFileError as in `read`."""
    name = given.get("job")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        fault = "names the kind of job" if name is None else f"unknown kind {name!r}{_nearest(str(name), KINDS)}"
        raise JobFileError(f"{path}: job: {fault}; kinds are {', '.join(KINDS)}")
    if kind is Transform:
        raise JobFileError(f"{path}: job: a transform needs a Python file NAME.py with JOB = Transform(...)")
    return JobFile(path, _checked(path, lambda: kind(**given)))


def _of_python(path: Path) -> JobFile:
    try:
        named = runpy.run_path(str(path), run_name=path.stem)
    except ValidationError as error:
        raise JobFileError(_described(path, error)) from None
    except Exception as error:
        raise JobFileError(f"{path}: {type(error).__name__}: {error}") from error
    spec = named.get("JOB")
    if not isinstance(spec, Declaration):
        raise JobFileError(
            f"{path}: JOB: a Python job must set JOB = Transform(...), or another class of spark_sinks.spec.jobs"
        )
    _check_needs(path, spec)
    transform = named.get("transform")
    _check_transform(path, spec, transform)
    if transform is not None and not isinstance(spec, Transform):
        raise JobFileError(f"{path}: transform: only allowed with JOB = Transform(...), not for a {spec.job} job")
    return JobFile(path, spec, transform)


def _check_transform(path: Path, spec: Declaration, transform: Any) -> None:
    if not isinstance(spec, Transform):
        return
    if not callable(transform):
        raise JobFileError(f"{path}: transform: the job needs a function transform(readings) -> records")
    if spec.run.trigger == REAL_TIME:
        for name, line in _names(path.read_text(encoding="utf-8")):
            if (lack := NOT_IN_REAL_TIME.get(name)) is not None:
                raise JobFileError(
                    f"{path}: line {line}, {name}: real time has {lack}; use run.trigger = 'micro-batch'"
                )


def _names(text: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Name):
            yield node.id, node.lineno


def _checked(path: Path, make: Callable[[], Declaration]) -> Declaration:
    try:
        spec = make()
    except ValidationError as error:
        raise JobFileError(_described(path, error)) from None
    _check_needs(path, spec)
    return spec


def _check_needs(path: Path, spec: Declaration) -> None:
    if missing := [f"{path}: {lack}" for lack in lacks(spec)]:
        raise JobFileError("\n".join(missing))


def _described(path: Path, error: ValidationError) -> str:
    kind = next((kind for kind in KINDS.values() if kind.__name__ == error.title), None)
    lines = []
    for fault in error.errors(include_url=False):
        parts = [part for part in fault["loc"] if part != "[key]"]
        place = [str(part) if str(part).isprintable() else repr(part) for part in parts]
        text = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            known = _keys(kind, place[:-1])
            text = f"unknown key{_nearest(place[-1], known)}; known are {', '.join(known)}"
        elif fault["type"] == "missing":
            text = "is required"
        elif isinstance(fault["input"], str | int | float) and fault["type"] != "value_error":
            text = f"{text}, got {fault['input']!r}"
        elif isinstance(fault["input"], str):
            text = f"{text}, not {fault['input']!r}"
        pairs = zip(parts, place, strict=True)
        key = "".join(f"[{part + 1}]" if isinstance(part, int) else f".{name}" for part, name in pairs)
        lines.append(f"{path}: {key.removeprefix('.')}: {text}" if key else f"{path}: {text}")
    return "\n".join(lines)


def _keys(kind: type[BaseModel] | None, path: list[str]) -> list[str]:
    """Return the keys that are allowed at a place of a job file."""
    model: Any = kind
    for part in path:
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            model = next((one for one in get_args(model) if isinstance(one, type) and issubclass(one, BaseModel)), None)
        else:
            model = model.model_fields[part].annotation
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        model = next((one for one in get_args(model) if isinstance(one, type) and issubclass(one, BaseModel)), None)
    return list(model.model_fields) if model is not None else []


def _nearest(name: str, names: Mapping[str, Any] | list[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
