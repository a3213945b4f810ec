"""Kafka's classes are mapped from an archive, and where that does not fit Kafka starts all the same."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from gateway.embedded.class_archive import archive_options, archive_path
from gateway.embedded.jars import cache_directory, ensure_jars
from gateway.embedded.java import find_java


def maps(pid: int, archive: Path) -> bool:
    """Whether a process has mapped the file."""
    return str(archive) in Path(f"/proc/{pid}/maps").read_text()


async def test_a_broker_maps_what_another_has_recorded(new_broker) -> None:
    recording = await asyncio.create_subprocess_exec(sys.executable, "-m", "gateway.embedded.class_recording")
    assert await recording.wait() == 0
    archive = archive_path("kafka", find_java(), ensure_jars("kafka"), cache_directory())
    broker = new_broker()
    await broker.start()
    assert maps(broker.pid, archive)


async def test_a_damaged_archive_is_left_alone(new_broker, tmp_path: Path) -> None:
    archive = tmp_path / "damaged.jsa"
    assert archive_options(archive) == ()
    archive.write_bytes(b"no archive")
    broker = new_broker(java_options=archive_options(archive))
    await broker.start()
    assert not maps(broker.pid, archive)


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
