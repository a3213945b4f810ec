"""The wheel contains the project's five packages with their data, and nothing else."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"flowcontrol", "gateway", "kafka_records", "mapping", "protocols", "spark_sinks", "telemetry"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    target = tmp_path_factory.mktemp("wheel")
    # Built from the sdist, to check that this is complete too.
    command = [Path(sys.executable).with_name("uv"), "build", "--offline", "--no-build-isolation", "--out-dir", target]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = target.glob("*.whl")
    with zipfile.ZipFile(built) as opened:
        yield opened


def test_wheel_holds_exactly_the_project_s_packages(wheel):
    names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == PACKAGES
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    for package in PACKAGES:
        tracked = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
        assert tracked == {name for name in names if name.startswith(f"{package}/") and name.endswith(".py")}


def test_wheel_holds_the_data_files(wheel):
    listed = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = [name for name in listed.split() if (ROOT / name).is_file()]
    data = [name for name in names if not name.endswith((".py", ".c", ".h", ".md"))]
    assert len(data) > 20
    assert sorted(set(data) - set(wheel.namelist())) == []
    assert [name for name in data if wheel.read(name) != (ROOT / name).read_bytes()] == []


def test_wheel_holds_the_extensions_and_not_their_sources(wheel):
    names = set(wheel.namelist())
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for source in (path for package in PACKAGES for path in (ROOT / package).rglob("_native.c")):
        assert str(source.relative_to(ROOT).with_suffix(suffix)) in names
    assert not any(name.endswith((".c", ".h")) for name in names)


def test_wheel_has_command_and_licence(wheel):
    entry_points, metadata = (
        wheel.read(next(name for name in wheel.namelist() if name.endswith(f".dist-info/{file}"))).decode()
        for file in ("entry_points.txt", "METADATA")
    )
    assert "trivium = gateway.process.cli:main" in entry_points
    assert "License-Expression: Apache-2.0" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_no_other_distribution_has_the_same_packages():
    owners = importlib.metadata.packages_distributions()
    for package in PACKAGES:
        # An editable install lists no packages, so any entry belongs to another distribution.
        assert set(owners.get(package, ["trivium"])) == {"trivium"}
