"""Finding Java: every way in which it can be missing has its own error message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.embedded import child
from gateway.embedded.java import JavaError, find_java


def fake_java(directory: Path, answer: str) -> dict[str, str]:
    path = directory / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\ncat >&2 <<'E'\n{answer}\nE\n")
    path.chmod(0o755)
    return {"JAVA_HOME": str(directory), "PATH": "/bin:/usr/bin"}


def test_real_java_is_found():
    assert find_java().version >= 17


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "25" 2025-09-16', 25),
        ('openjdk version "21-ea"', 21),
    ],
)
def test_version_is_read(tmp_path, answer, version):
    found = find_java(fake_java(tmp_path, answer))
    assert (found.path, found.version) == (tmp_path / "bin" / "java", version)


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ('openjdk version "1.8.0_392"', "is Java 8, which is too old: install Java 17 or newer"),
        ('openjdk version "11.0.21" 2023-10-17', "is Java 11, which is too old"),
        ("Error: could not find libjvm.so", "did not print its version: Error: could not find libjvm.so"),
        ("", "did not print its version: it printed nothing"),
    ],
)
def test_useless_java_is_refused(tmp_path, answer, complaint):
    with pytest.raises(JavaError, match=complaint):
        find_java(fake_java(tmp_path, answer))


def test_missing_java_is_refused(tmp_path):
    with pytest.raises(JavaError, match="Java is missing: install Java 17 or newer"):
        find_java({"PATH": str(tmp_path)})
    with pytest.raises(JavaError, match="there is no bin/java in it"):
        find_java({"JAVA_HOME": str(tmp_path)})


def test_launcher_becomes_the_command_with_the_same_process_id():
    process = subprocess.Popen(child.command_line("sh", "-c", "echo $$"), stdout=subprocess.PIPE, text=True)
    assert process.communicate()[0] == f"{process.pid}\n"


def test_launcher_gives_up_when_its_parent_is_gone_already():
    command = child.command_line("true")
    command[command.index(str(Path(child.__file__))) + 1] = "1"
    assert command[0] == sys.executable
    assert subprocess.run(command, check=False).returncode == child.PARENT_IS_GONE
