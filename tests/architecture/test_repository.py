"""Rules about the repository as a whole."""

from __future__ import annotations

import ast
import collections
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST_MODULE = 600
PRODUCT = {"gateway", "protocols", "mapping", "flowcontrol", "telemetry", "kafka_records", "spark_sinks"}
# Concatenated, so that this file does not contain them itself.
REGISTRIES = re.compile(
    "|".join(
        re.escape(".".join(parts))
        for parts in (
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("maven", "org"),
            ("maven", "apache", "org"),
            ("registry", "npmjs", "org"),
            ("crates", "io"),
            ("proxy", "golang", "org"),
        )
    )
)


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_holds_a_registrys_address():
    assert [
        str(path.relative_to(ROOT)) for path in tracked() if REGISTRIES.search(path.read_text(errors="replace"))
    ] == []


def test_no_module_is_too_long():
    modules = [path for path in tracked() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] != "tests"]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules}
    assert {path: length for path, length in lengths.items() if length > LONGEST_MODULE} == {}


def test_every_task_is_started_by_the_spawn_module():
    """Only `gateway/runtime/spawn.py` contains failures; the handler of an upload awaits its task group itself."""
    bare = re.compile(r"\b(?:create_task|ensure_future|TaskGroup|run_coroutine_threadsafe|Task)\(")
    doors = {
        "gateway/runtime/spawn.py",
        "gateway/rest/produce/line_uploads.py",
        "gateway/security/login/amqtt_plugins.py",
    }
    product = [
        path
        for path in tracked()
        if path.relative_to(ROOT).parts[0] in {"gateway", "protocols", "mapping", "telemetry", "kafka_records"}
    ]
    found = {str(path.relative_to(ROOT)) for path in product if path.suffix == ".py" and bare.search(path.read_text())}
    assert found <= doors


def test_no_module_uses_private_names_of_another():
    """A private name belongs to its module; only the driver and `kafka_records` may use aiokafka's, and list them."""
    found = []
    for path in tracked():
        where = path.relative_to(ROOT)
        if path.suffix != ".py" or where.parts[0] != "gateway" or where.parts[:3] == ("gateway", "kafka", "driver"):
            continue
        tree = ast.parse(path.read_text())
        nodes = list(ast.walk(tree))
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        own |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_of(node, {"self"})}
        found += [
            f"{where}:{node.lineno} {node.attr}"
            for node in nodes
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and node.attr not in own
            and not _is_of(node, {"self", "cls"})
            and node.attr not in {"_replace", "_asdict"}  # public methods of named tuples
            and ast.unparse(node.value) != "super()"
        ]
        bases = {ast.unparse(base) for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases}
        found += [f"{where} inherits from aiokafka's {base}" for base in bases & _from_aiokafka(nodes)]
    assert found == []


def _is_of(node: ast.Attribute, names: set[str]) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in names


def _from_aiokafka(nodes: list[ast.AST]) -> set[str]:
    """Return the aiokafka classes with private parts that a module imports; requests and listeners have none."""
    public = {"Request", "Response", "RequestStruct", "ConsumerRebalanceListener"}
    imports = [
        node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aiokafka")
    ]
    return {name.asname or name.name for node in imports for name in node.names} - public


@pytest.mark.parametrize(
    ("library", "places"),
    [
        (r"(?:from|import) (?:c?proton|cproton)\b", ("protocols/amqp/native.py",)),
        (r"from aiokafka\.errors import|from aiokafka import .*\berrors\b", ("gateway/kafka/", "kafka_records/")),
        # aiohttp and amqtt want a logger of the standard library.
        (
            r"^(?:from|import) logging\b",
            ("gateway/observe/logs.py", "gateway/observe/management.py", "gateway/security/login/amqtt_plugins.py"),
        ),
        (r"(?:from|import) prometheus_client\b", ("gateway/observe/", "telemetry/")),
    ],
)
def test_a_library_is_imported_only_where_the_architecture_allows(library: str, places: tuple[str, ...]):
    product = [
        path
        for path in tracked()
        if path.relative_to(ROOT).parts[0] in {"gateway", "protocols", "mapping", "telemetry", "kafka_records"}
    ]
    modules = [path for path in product if path.suffix == ".py"]
    found = {str(path.relative_to(ROOT)) for path in modules if re.search(library, path.read_text(), re.MULTILINE)}
    assert found
    assert {path for path in found if not path.startswith(places)} == set()


def test_a_docstring_says_its_thing():
    """One that only points elsewhere makes the reader look it up."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in tracked()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PRODUCT
        for line in path.read_text().splitlines()
        if re.match(r'\s*"""See [^"]*"""$', line)
    ]
    assert found == []


def test_import_contracts_hold():
    found = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    "lock", ["bootstrap.txt", "dev.txt", "gateway.txt", "jars.txt", "release.txt", "run.txt", "site.txt"]
)
def test_every_locked_requirement_has_a_hash(lock):
    text = (ROOT / "requirements" / lock).read_text()
    entries = re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    assert [entry.split()[0] for entry in entries if entry.strip() and "--hash=sha256:" not in entry] == []


def test_locks_agree():
    def pins(lock: str) -> set[str]:
        return set(re.findall(r"^[\w.-]+==\S+", (ROOT / "requirements" / lock).read_text(), flags=re.MULTILINE))

    assert pins("gateway.txt") <= pins("run.txt") <= pins("dev.txt")
    assert pins("jars.txt") <= pins("run.txt")
    large = {"boto3", "deltalake", "duckdb", "numpy", "pandas", "pyarrow"}  # what `make run` need not wait for
    assert large & {pin.partition("==")[0] for pin in pins("run.txt")} == set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Normalized names, as in package indexes (PEP 503).
    named = {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", one)[0]).lower() for one in project["dependencies"]}
    assert named <= {pin.partition("==")[0] for pin in pins("gateway.txt")}


def test_no_test_needs_a_benchmark():
    tests = [path for path in tracked() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] == "tests"]
    found = [
        path for path in tests if re.search(r"^\s*(from|import) loadtest\.bench\b", path.read_text(), re.MULTILINE)
    ]
    assert found == []


def test_a_room_has_at_most_sixteen_modules():
    rooms = collections.Counter(
        path.parent.relative_to(ROOT)
        for path in tracked()
        if path.suffix == ".py"
        and path.name != "__init__.py"
        and path.relative_to(ROOT).parts[0] in (*PRODUCT, "loadtest")
    )
    assert {str(room): count for room, count in rooms.items() if count > 16} == {}
