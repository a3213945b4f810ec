"""The Dockerfile cannot be built everywhere, so check that everything it copies and calls exists."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path

import pytest
import typer

from gateway.process.cli import app
from gateway.settings.config import Config

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(maxsplit=1)) for line in lines if line.strip()]


def of(kind: str) -> list[str]:
    return [rest for name, rest in instructions() if name == kind]


def copied() -> list[str]:
    return [source for rest in of("COPY") if not rest.startswith("--from") for source in rest.split()[:-1]]


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for rest in of("ENV") for pair in rest.split())


def addresses() -> dict[str, str]:
    """Return the addresses in the image's command, by option."""
    (command,) = of("CMD")
    first, *rest = json.loads(command)
    assert first == "up"
    return dict(zip(rest[::2], rest[1::2], strict=True))


@pytest.mark.parametrize("source", copied())
def test_copied_files_exist_and_are_in_the_build_context(source):
    assert (ROOT / source).exists()
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert any(Path(source).match(pattern) for pattern in allowed)


def test_the_packages_of_the_wheel_are_copied():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.removesuffix("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert {*packages, "setup.py"} <= set(copied())
    assert {project["project"]["readme"], *project["project"]["license-files"]} <= set(copied())


def test_called_programs_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (entry,) = of("ENTRYPOINT")
    (command,) = json.loads(entry)
    module, function = project["project"]["scripts"][command].split(":")
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    bound = {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets}
    assert function in defined | bound
    for named in re.findall(r"requirements/[\w.]+", " ".join(of("RUN"))):
        assert named in copied()


def test_extras_and_the_base_are_arguments() -> None:
    """An extra's packages come from the lock file that the tests run with."""
    base, extras = of("ARG")
    assert base.startswith("BASE=python:")
    assert extras == "EXTRAS="
    assert [line.split()[0] for line in of("FROM")] == ["${BASE}"] * 2
    (install,) = [run for run in of("RUN") if "EXTRAS" in run]
    assert install.endswith('--constraints requirements/dev.txt ".${EXTRAS:+[$EXTRAS]}"')


def test_settings_are_keys_of_the_configuration(monkeypatch):
    for name, value in environment().items():
        if name.startswith("TRIVIUM_"):
            monkeypatch.setenv(name, value)
            keys = name.removeprefix("TRIVIUM_").lower().split("__")
            field = Config
            for key in keys:
                assert key in field.model_fields, name
                field = field.model_fields[key].annotation


def test_the_listening_ports_are_exposed():
    options = {option for parameter in typer.main.get_command(app).commands["up"].params for option in parameter.opts}
    assert addresses().keys() <= options
    exposed = set(of("EXPOSE")[0].split())
    assert exposed == {address.rpartition(":")[2] for address in addresses().values()}


def test_health_check_asks_the_management_port():
    (check,) = of("HEALTHCHECK")
    program = json.loads(check.partition("CMD ")[2])
    assert program[:2] == ["python", "-c"]
    compile(program[2], "health check", "exec")
    assert f"127.0.0.1:{addresses()['--management'].rpartition(':')[2]}/healthy" in program[2]


def test_image_is_small_and_not_root():
    stages = [number for number, (kind, _) in enumerate(instructions()) if kind == "FROM"]
    assert len(stages) == 2
    final = instructions()[stages[1] :]
    assert ("USER", "10001:10001") in final
    assert not any("apt-get" in rest for _, rest in final)
