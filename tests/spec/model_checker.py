"""Runs TLC on the models in docs/spec: `python -m tests.spec.model_checker` checks both, and that it finds mutations.

TLC's jar is pinned in tests/interop/jars.lock. TLC runs in a temporary directory, with one thread.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gateway.embedded.java import find_java
from tests.interop.toolchains import classpath

SPECS = Path(__file__).parents[2] / "docs" / "spec"
NAMES = ("FlowControl", "SessionTakeover")
BOUNDS = ("FlowControl", "SessionTakeover", "SessionTakeover.long")
LONGEST_S = 1800
_STATES = re.compile(r"^(\d+) states generated, (\d+) distinct states found, (\d+) states left on queue", re.MULTILINE)
_VIOLATED = re.compile(r"Error: (?:Invariant (\w+) is violated|(Temporal properties were violated))")


class Mutation(msgspec.Struct, frozen=True):
    """A specification with a mistake.

    Attributes:
        spec: the specification's name.
        mistake: a description of the mistake.
        breaks: the property that no longer holds.
        before: a text that occurs once in the specification.
        after: the text that replaces it.
        bounds: constants that differ from the small bounds.
        code: the same mistake in the code.
        tests: the tests that found it in the code.
    """

    spec: str
    mistake: str
    breaks: str
    before: str
    after: str
    code: str
    tests: tuple[str, ...]
    bounds: dict[str, int] = {}

    def apply(self, text: str) -> str:
        """Return the specification with the mistake; raise ValueError if `before` does not occur exactly once."""
        if text.count(self.before) != 1:
            raise ValueError(f"{self.spec}: {self.mistake}: `before` occurs {text.count(self.before)} times")
        return text.replace(self.before, self.after)


class Found(msgspec.Struct, frozen=True):
    """TLC's result: the number of distinct states, whether these are all, and the violated property."""

    states: int
    complete: bool
    violated: str
    output: str


def mutations() -> list[Mutation]:
    """Return all mutations."""
    found = tomllib.loads((SPECS / "mutations.toml").read_text())["mutation"]
    return msgspec.convert(found, list[Mutation])


def check(bounds: str, mutation: Mutation | None = None) -> Found:
    """Let TLC check all states of a specification, or stop at the first violation.

    Args:
        bounds: the name of the file with bounds and properties, which starts with the specification's name.
        mutation: a mistake to apply; only the property that it breaks is checked.
    """
    spec = bounds.partition(".")[0]
    text = (SPECS / f"{spec}.tla").read_text()
    config = (SPECS / f"{bounds}.cfg").read_text()
    if mutation is not None:
        text = mutation.apply(text)
        kind = "INVARIANT" if re.search(rf"^INVARIANTS .*\b{mutation.breaks}\b", config, re.MULTILINE) else "PROPERTY"
        left_out = "INVARIANTS|PROPERTIES" if kind == "INVARIANT" else "INVARIANTS|PROPERTIES|SYMMETRY"
        config = re.sub(rf"^({left_out}) .*\n", "", config, flags=re.MULTILINE)
        config += f"{kind} {mutation.breaks}\n"
        for name, value in mutation.bounds.items():
            config = re.sub(rf"^(    {name} = ).*", rf"\g<1>{value}", config, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / f"{spec}.tla").write_text(text)
        (place / "bounds.cfg").write_text(config)
        command = [
            str(find_java().path), "-XX:+UseSerialGC", "-Xmx2g", "-cp", classpath("tla"), "tlc2.TLC",
            "-workers", "1", "-config", "bounds.cfg", f"{spec}.tla",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, timeout=LONGEST_S)
    states, violated = _STATES.findall(done.stdout), _VIOLATED.search(done.stdout)
    if done.returncode and violated is None:
        raise RuntimeError(f"TLC: {done.stdout[-3000:]}{done.stderr[-1000:]}")
    return Found(
        states=int(states[-1][1]) if states else 0,
        complete=bool(states) and states[-1][2] == "0" and violated is None,
        violated=(violated[1] or (mutation.breaks if mutation else "a temporal property")) if violated else "",
        output=done.stdout,
    )


def main(arguments: Sequence[str]) -> int:
    """Check both models, then every mutation, or only the bounds given as arguments; return 1 on a failure."""
    os.nice(5)
    wrong = 0
    for bounds in arguments or BOUNDS:
        began = time.monotonic()
        found = check(bounds)
        wrong += not found.complete
        said = found.violated + found.output if found.violated else "every property holds"
        print(f"{bounds}: {found.states:,} states, {time.monotonic() - began:.0f} s: {said}", flush=True)
    for mutation in () if arguments else mutations():
        began = time.monotonic()
        found = check(f"{mutation.spec}.small", mutation)
        wrong += found.violated != mutation.breaks
        said = f"{found.violated} is violated" if found.violated else "NOT FOUND"
        took = time.monotonic() - began
        print(f"{mutation.spec}, {mutation.mistake}: {said} ({found.states:,} states, {took:.0f} s)", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
