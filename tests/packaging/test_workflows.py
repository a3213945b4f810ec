"""The workflows test what the project says it supports, by commands that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.interpreters import ROOT, supported

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def test_every_supported_python_is_tested_and_gets_a_wheel():
    ci = jobs(ROOT / ".github" / "workflows" / "ci.yml")
    for job in ("test", "wheel"):
        assert ci[job]["strategy"]["matrix"]["python"] == supported()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheels = project["tool"]["cibuildwheel"]["build"]
    assert wheels == [f"cp{version.replace('.', '')}-*" for version in supported()]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_real_commands_and_have_few_rights(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z-]+)", text))
    assert named or "cibuildwheel" in text
    assert named <= targets
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_code_owners_name_existing_paths():
    lines = (ROOT / ".github" / "CODEOWNERS").read_text(encoding="utf-8").splitlines()
    paths = [line.split()[0] for line in lines if line.startswith("/")]
    assert paths
    assert [path for path in paths if not (ROOT / path.lstrip("/")).exists()] == []
