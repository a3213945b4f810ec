"""Every version that deploy/ names is in the table of its README, which says how it is checked."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

from gateway.embedded.jars import locked_version

ROOT = Path(__file__).parents[2]
HERE = ROOT / "deploy"
IMAGE = re.compile(r"(?:image[:=] ?|FROM |SPARK=|BASE=)([a-z][\w./-]*:[\w.-]+)")
JAR = re.compile(r"[a-z][\w.-]+:[a-z][\w.-]+:\d[\w.]*")
GROUP = re.compile(r"apiVersion: ([\w-]+(?:\.[\w-]+)+/\w+)")
NUMBER = re.compile(r"(?<![\w.])v?\d+\.\d+\.\d+(?:-\w+)?(?![\w.])")
IN_KUBERNETES = re.compile(r"(?:networking|rbac\.authorization|kustomize\.config)\.k8s\.io/")
"""Checked against Kubernetes' own schemas, and by kustomize's tests."""


def named_in(text: str) -> set[str]:
    """Return the versions in a file: images, jars, versions of custom resources, and other numbers with three parts."""
    found = {name for kind in (IMAGE, JAR, GROUP) for name in kind.findall(text)}
    rest = text
    for name in found:
        rest = rest.replace(name, "")
    return {name for name in found if not IN_KUBERNETES.match(name)} | set(NUMBER.findall(rest))


def listed() -> dict[str, str]:
    """Return how each version of the table is checked."""
    section = (HERE / "README.md").read_text(encoding="utf-8").partition("## Versions")[2]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    return {name: how for names, how in rows for name in re.findall(r"`([^`]+)`", names)}


def test_each_version_is_in_the_table_and_no_other() -> None:
    files = [ROOT / "Dockerfile", *(path for path in HERE.rglob("*") if path.is_file() and path.suffix != ".md")]
    named: set[str] = set()
    for path in files:
        if path.suffix not in {".json", ".pyc"}:  # dashboards, which name no program's version
            named |= named_in(path.read_text(encoding="utf-8"))
    assert named == set(listed())


def test_a_new_version_of_any_kind_is_found() -> None:
    text = "image: new/one:v2\nFROM python:3.14\n--packages=a.b:c_2.13:1.0\napiVersion: some.io/v1\nversion: 7.8.9\n"
    assert named_in(text) == {"new/one:v2", "python:3.14", "a.b:c_2.13:1.0", "some.io/v1", "7.8.9"}
    assert named_in("address: 127.0.0.1:1883\napiVersion: apps/v1\n") == set()


def test_what_is_said_to_follow_the_locks_does() -> None:
    spark, kafka = version("pyspark"), locked_version("kafka", "kafka-clients")
    assert {spark, f"apache/spark:{spark}-java17", f"apache/kafka:{kafka}"} <= set(listed())
