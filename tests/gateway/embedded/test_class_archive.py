"""Kafka's classes are mapped from an archive. For a damaged one see test_broker.py, for Spark's tests/spark_sinks."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from gateway.embedded.broker import EmbeddedBroker
from gateway.embedded.class_archive import archive_path
from gateway.embedded.jars import cache_directory, ensure_jars
from gateway.embedded.java import find_java
from tests.support.processes import maps
from tools.class_recording import KEPT, remove_useless


async def test_a_broker_maps_what_another_has_recorded(stoppable: EmbeddedBroker) -> None:
    """The tests' brokers start with the options for the archive."""
    recording = await asyncio.create_subprocess_exec(sys.executable, "-m", "tools.class_recording", "kafka")
    assert await recording.wait() == 0
    archive = archive_path("kafka", find_java(), ensure_jars("kafka"), cache_directory())
    assert maps(stoppable.pid, archive)


async def test_what_a_killed_recording_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "jars").symlink_to(ensure_jars("kafka")[0].parent)
    left = tmp_path / "classes" / "recording-killed"
    left.mkdir(parents=True)
    recording = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tools.class_recording", "kafka", env={**os.environ, "TRIVIUM_CACHE": str(tmp_path)}
    )
    assert await recording.wait() == 0
    assert archive_path("kafka", find_java(), ensure_jars("kafka", tmp_path), tmp_path).exists()
    assert not left.exists()


def test_each_java_and_each_set_of_jars_has_its_own(tmp_path: Path) -> None:
    java, jars = find_java(), ensure_jars("kafka")
    assert java.build.startswith(f"{java.version}.")
    other = tmp_path / jars[0].name
    other.write_bytes(b"")
    places = {
        archive_path("kafka", java, jars, tmp_path),
        archive_path("kafka", java, jars, tmp_path),
        archive_path("kafka", java._replace(build="another"), jars, tmp_path),
        archive_path("kafka", java, [other, *jars[1:]], tmp_path),
        archive_path("spark", java, jars, tmp_path),
    }
    assert len(places) == 4


def test_archives_go_with_their_jars_and_not_with_other_checkouts(tmp_path: Path) -> None:
    there = tmp_path / "there.jar"
    there.touch()
    others = [tmp_path / f"{number}.jar" for number in range(KEPT + 2)]

    def archive(name: str, jar: Path | None, age_s: int) -> Path:
        made = tmp_path / f"spark-{name}.jsa"
        made.touch()
        os.utime(made, (0, 1_000_000 - age_s))
        if jar is not None:
            made.with_suffix(".of").symlink_to(jar)
        return made

    of_others = [archive(f"other{number}", jar, 0) for number, jar in enumerate(others)]
    own = [archive(f"own{age}", there, age) for age in range(KEPT + 2)]
    unknown = [archive(f"unknown{age}", None, age) for age in range(KEPT + 1)]
    for jar in others[1:]:
        jar.touch()
    kafka = tmp_path / "kafka-other.jsa"
    kafka.touch()
    remove_useless(tmp_path, "spark")
    left = set(tmp_path.glob("*.jsa"))
    assert left == {*of_others[1:], *own[:KEPT], *unknown[:KEPT], kafka}
    assert {link.stem for link in tmp_path.glob("*.of")} == {path.stem for path in (*of_others[1:], *own[:KEPT])}
