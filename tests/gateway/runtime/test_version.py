"""The versions of libraries whose private parts are used are bounded, and checked before they are imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.runtime.version import BOUND, check_libraries

ROOT = Path(__file__).parents[3]


def test_the_bounds_are_those_of_the_package_and_met():
    check_libraries()
    bounds = dict(re.findall(r'^    "([\w-]+)==([\w.*]+)",', (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
    assert BOUND.items() <= bounds.items()


@pytest.mark.parametrize(("name", "version"), [("aiohttp", "3.15.0"), ("aiohttp", "3.140.1"), ("aiokafka", "0.14.1")])
def test_another_version_of_a_library_stops_the_start_with_one_sentence(tmp_path, name, version):
    """The version is that of the first distribution on the path, as after `pip install` of another one."""
    described = tmp_path / f"{name}-{version}.dist-info" / "METADATA"
    described.parent.mkdir()
    described.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "gateway", "up", "--data-dir", tmp_path / "data"]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    (said,) = ended.stderr.splitlines()
    assert f"{name} is {version}" in said
    assert f"{name}=={BOUND[name]}" in said
    assert not (tmp_path / "data").exists()
