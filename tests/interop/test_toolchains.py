"""Fetching and building the foreign clients: locks without addresses, one build, errors that name missing tools."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from gateway.embedded.jars import locked_jars
from tests.interop import toolchains
from tests.interop.toolchains import JARS_LOCK, ToolchainError, go_program, with_source, without_source

AMQP = Path(__file__).parent / "amqp"
ROOT = Path(__file__).parents[2]


def test_the_lock_of_crates_has_hashes_and_no_addresses():
    lock = (AMQP / "rust" / "crates.lock").read_text()
    packages = tomllib.loads(lock)["package"]
    assert [one["name"] for one in packages if "checksum" not in one] == ["driver"]
    assert "source" not in lock
    whole = with_source(lock, "registry+https://example.com/index")
    assert {one.get("source") for one in tomllib.loads(whole)["package"]} == {
        None,
        "registry+https://example.com/index",
    }
    assert without_source(whole) == lock


def test_the_documentation_names_the_versions_that_are_tested():
    crate = tomllib.loads((AMQP / "rust" / "Cargo.toml").read_text())["dependencies"]["fe2o3-amqp"]["version"]
    module = re.search(r"go-amqp v(\S+)", (AMQP / "go" / "go.mod").read_text())
    package = json.loads((AMQP / "node" / "package.json").read_text())["dependencies"]["rhea"]
    jar = next(jar for jar in locked_jars("qpid-jms", JARS_LOCK) if jar.artifact == "qpid-jms-client")
    wheel = re.search(r"^python-qpid-proton==([\d.]+)", (ROOT / "requirements" / "dev.txt").read_text(), re.MULTILINE)
    assert module is not None
    assert wheel is not None
    rows = (ROOT / "docs" / "amqp.md").read_text()
    for name, version in (
        ("fe2o3-amqp", crate.removeprefix("=")),
        ("go-amqp", module[1]),
        ("rhea", package),
        ("Qpid JMS", jar.version),
        ("python-qpid-proton", wheel[1]),
    ):
        assert re.search(rf"^\| [^|]*{name}[^|]*\| {re.escape(version)} \|", rows, re.MULTILINE), (name, version)


def test_a_missing_tool_is_reported_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"go is not installed .*golang-go"):
        go_program(tmp_path)


def test_a_build_is_repeated_only_for_changed_sources(tmp_path: Path):
    source, made, times = tmp_path / "source", tmp_path / "made", []

    def make() -> None:
        times.append(source.read_text())
        made.write_text("made")

    for text in ("one", "one", "two"):
        source.write_text(text)
        toolchains.build_once(tmp_path, [source], made, make)
    assert times == ["one", "two"]
    source.write_text("three")
    with pytest.raises(ZeroDivisionError):
        toolchains.build_once(tmp_path, [source], made, lambda: 1 / 0)
    toolchains.build_once(tmp_path, [source], made, make)
    assert times == ["one", "two", "three"]
