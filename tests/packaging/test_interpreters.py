"""Interpreters are found where machines have them, and only those that run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.interpreters import find, supported

OWN = "{}.{}".format(*sys.version_info)


def executable(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A machine without interpreters."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "shims"))
    monkeypatch.delenv("PYENV_ROOT", raising=False)
    return tmp_path


def test_the_interpreter_of_the_tests_is_supported():
    assert OWN in supported()


def test_an_absent_interpreter_is_not_found(machine):
    assert find(OWN) is None


def test_a_shim_that_does_not_run_is_passed_over(machine):
    executable(machine / "shims" / f"python{OWN}", "exit 127")
    kept = executable(
        machine / ".pyenv" / "versions" / f"{OWN}.1" / "bin" / f"python{OWN}", f'exec {sys.executable} "$@"'
    )
    assert find(OWN) == kept
