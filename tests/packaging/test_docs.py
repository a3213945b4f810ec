"""The documents match the code: configuration keys and their defaults, links, commands."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from gateway.process.cli import app
from gateway.settings.config import Config
from gateway.settings.listeners import ListenerConfig, TlsConfig
from tools import clauses, picture, tables

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "protocols", "mapping", "flowcontrol", "telemetry", "kafka_records", "spark_sinks", "loadtest")
ROW = re.compile(r"^\| `([a-z0-9_.]+)` \| (?:`([^`]*)`|-) \| (.*)\|$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE_AND_NAME = re.compile(r"^([\w/]+)\.py:\s+([A-Z]\w+)")
CELL_END = re.compile(r"(?<!\\)\|")
RULE = re.compile(r"\|(?: ?:?-+:? ?\|)+")
WRITTEN = re.compile(r"<!-- (.+?): written by `make \w+`[^>]*-->\n.*?<!-- end of \1 -->\n", re.DOTALL)
MOST_WORDS = 60_000
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def documents() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return sorted(ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file())


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def defaults(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Return the default of every key, with dotted names for keys in sections."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            found |= defaults(type(default), f"{prefix}{name}.")
        else:
            found[prefix + name] = default
    return found


def written(default: Any) -> str | None:
    """Return a default as the page shows it, or None for "-"."""
    if default is None:
        return None
    if isinstance(default, str | Path):
        return str(default)
    return json.dumps(default)


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts generate them."""
    headings = HEADING.findall(FENCE.sub("", path.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def members() -> set[str]:
    """Return `Class.member` for every class of the project, with inherited members."""
    bodies: dict[str, tuple[set[str], list[str]]] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    functions = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
                    names = {function.name for function in functions}
                    known, bases = bodies.setdefault(node.name, (set(), []))
                    known |= names
                    bases += [base.id for base in node.bases if isinstance(base, ast.Name)]

    def every(name: str, below: frozenset[str] = frozenset()) -> set[str]:
        names, bases = bodies.get(name, (set(), []))
        below |= {name}  # classes of one name in several modules may seem to be their own bases
        return names.union(*(every(base, below) for base in bases if base not in below))

    return {f"{name}.{member}" for name in bodies for member in every(name)}


def architecture() -> str:
    """Return the map and the README of each room, without code blocks."""
    rooms = [path for path in documents() if path.name == "README.md" and relative(path).split("/")[0] in PACKAGES]
    assert len(rooms) > 5
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "ARCHITECTURE.md", *rooms)]
    return FENCE.sub("", "\n".join(pages))


def by_hand(text: str) -> list[str]:
    """Return the words of a page without what `make tables` and `make clauses` write."""
    return WRITTEN.sub("", text).split()


def test_the_pages_are_short():
    words = {relative(path): len(by_hand(path.read_text(encoding="utf-8"))) for path in documents()}
    longest = sorted(words, key=words.__getitem__, reverse=True)[:5]
    assert sum(words.values()) <= MOST_WORDS, f"say things once, first in {longest}"


def test_words_that_make_writes_are_not_counted():
    tables_begin, tables_end = tables.BEGIN.format("a b"), tables.END.format("a b")
    assert by_hand(f"one\n{tables_begin}two\n{tables_end}three\n{clauses.BEGIN}four\n{clauses.END}") == ["one", "three"]


def test_the_architecture_is_a_map():
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split()) <= 2500


def test_the_architecture_names_real_members_and_files():
    text = architecture()
    spans = re.findall(r"`([^`]+)`", text)
    named = {found for span in spans for found in re.findall(r"\b([A-Z]\w+\.[a-z_]\w+)\b", span)}
    assert len(named) > 40
    assert sorted(named - members()) == []
    paths = {found for span in spans for found in re.findall(rf"^((?:{'|'.join(PACKAGES)})/[\w/.]*\w)", span)}
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_architecture_uses_the_words_of_the_code():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    sources = [ROOT / name for name in listed if name.endswith((".py", ".toml", ".yaml", "Makefile"))]
    code = {word for path in sources if path.is_file() for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    text = architecture()
    words = {word for span in re.findall(r"`([^`]+)`", text) for word in re.findall(r"[A-Za-z_]\w{2,}", span)}
    assert len(words) > 200
    assert sorted(words - code) == []


def definitions() -> dict[str, set[str]]:
    """Return the top-level names of each module, by the module's dotted name."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            body = ast.parse(path.read_text(encoding="utf-8")).body
            targets = [
                target for node in body if isinstance(node, ast.Assign | ast.AnnAssign)
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            ]  # fmt: skip
            names = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
            found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = names
    return found


def test_the_architecture_names_real_definitions():
    text = architecture()
    spans = re.findall(r"`([^`]+)`", text)
    named = {found for span in spans for found in re.findall(r"(?<![\w./])((?:[a-z_]\w*\.)+)([A-Z]\w+)", span)}
    named |= {(path.replace("/", "."), name) for span in spans for path, name in FILE_AND_NAME.findall(span)}
    modules = definitions()

    def is_there(module: str, name: str) -> bool:
        ending = f".{module.rstrip('.')}"
        return any(name in names for path, names in modules.items() if f".{path}".endswith(ending))

    assert len(named) > 40
    assert [one for one in sorted(named) if one[0] != "asyncio." and not is_there(*one)] == []


def test_the_page_has_every_key_with_its_default():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = {key: default or None for key, default, _ in ROW.findall(page)}
    of_a_listener = defaults(ListenerConfig, "listeners.") | defaults(TlsConfig, "listeners.tls.")
    known = defaults(Config) | {key: value for key, value in of_a_listener.items() if value is not PydanticUndefined}
    assert rows == {key: written(default) for key, default in known.items()}


@pytest.mark.parametrize("document", documents(), ids=relative)
def test_relative_links_have_targets(document: Path):
    broken = []
    for target in LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (fragment and path.suffix == ".md" and fragment not in anchors(path)):
            broken.append(target)
    assert broken == []


def test_the_readme_names_real_make_targets():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"run", "test"} <= named
    assert named <= targets


def test_the_readme_names_real_commands_and_all_options_of_up():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    root = typer.main.get_command(app)
    named = re.findall(r"(?:^|`)trivium ((?:[a-z]+ ?)+)", readme, re.MULTILINE)
    assert named
    for words in named:
        command: Any = root
        for word in words.split():
            if not hasattr(command, "commands"):
                break  # an argument
            assert word in command.commands, f"trivium {words}"
            command = command.commands[word]
    up: Any = root
    options = {option for parameter in up.commands["up"].params for option in parameter.opts}
    section = readme.split("## The gateway")[1].split("\n## ")[0]
    assert set(re.findall(r"`(--[a-z][a-z-]*)", section)) == options


def test_the_picture_is_up_to_date_and_shows_existing_modules():
    drawing = picture.read()
    assert picture.draw(drawing) == picture.PICTURE.read_text(encoding="utf-8"), "run `make picture`"
    boxes = [box for row in drawing.row for box in row.box]
    assert [code for box in boxes for code in box.code if not (ROOT / code).exists()] == []
    assert [box.id for box in boxes if box.kind != "outside" and not box.code] == []


def test_the_tables_are_up_to_date():
    for path, page in tables.pages():
        assert path.read_text(encoding="utf-8") == page, f"{relative(path)}: run `make tables`"


def test_boxes_that_cannot_be_drawn_are_reported():
    one, other = picture.Box("a", (1, 2), "a"), picture.Box("b", (2, 3), "b")
    with pytest.raises(ValueError, match="not free"):
        picture.draw(picture.Drawing((picture.Row(("r",), (one, other)),), ()))
    apart = picture.Drawing(
        (picture.Row(("r",), (one,)), picture.Row(("s",), (picture.Box("b", (3, 4), "b"),))),
        (picture.Arrow(("a", "b")),),
    )
    with pytest.raises(ValueError, match="not above each other"):
        picture.draw(apart)


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/glossary.md"])
def test_a_page_for_maintainers_names_real_files(name: str):
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", (ROOT / name).read_text(encoding="utf-8")))
    tops = "|".join((*PACKAGES, "tests", "tools", "docs", "examples", "requirements"))
    named = {path for span in spans for path in re.findall(rf"(?:^|\s)((?:{tops})/[\w./]*)", span)}
    written = {path for path in named if not re.search(r"[A-Z]{4}", path)}  # ROOM and NAME are placeholders
    assert len(written) > 5
    assert [path for path in sorted(written) if not (ROOT / path.rstrip(".")).exists()] == []


def test_each_decision_that_is_named_is_a_page_of_its_own():
    """A folded decision is one line that names its page; whoever refers to it names that page."""
    pages = {path.name[:4]: path.read_text(encoding="utf-8") for path in tables.DECISIONS.glob("[0-9]*.md")}
    moved = {number: found[2] for number, text in pages.items() if (found := tables.MOVED.match(text))}
    assert moved
    assert [number for number, target in moved.items() if target in moved or target not in pages] == []
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wrong = []
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if not path.is_file() or (path.parent == tables.DECISIONS and path.name[:4] in moved):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        lists = re.findall(r"ADRs?\s+(\d{4}(?:(?:,| and)\s+\d{4})*)", text)
        named = {number for found in lists for number in re.findall(r"\d{4}", found)}
        named |= set(re.findall(r"\badr/(\d{4})", text))
        wrong += [f"{name}: {number}" for number in sorted(named) if number not in pages or number in moved]
    assert wrong == []


def tables_of(text: str) -> list[list[str]]:
    """Return the rows of each Markdown table: adjacent lines that begin with a bar, outside of fenced blocks."""
    found: list[list[str]] = [[]]
    for line in FENCE.sub("", text).splitlines():
        if line.lstrip().startswith("|"):
            found[-1].append(line.strip())
        elif found[-1]:
            found.append([])
    return [rows for rows in found if rows]


@pytest.mark.parametrize("page", documents(), ids=relative)
def test_the_rows_of_a_table_have_as_many_cells_as_its_head(page: Path) -> None:
    for rows in tables_of(page.read_text(encoding="utf-8")):
        assert len(rows) > 2, rows
        assert RULE.fullmatch(rows[1]), rows[1]
        bars = [len(CELL_END.findall(row)) for row in rows]
        wrong = [row for row, count in zip(rows, bars, strict=True) if count != bars[0] or not row.endswith("|")]
        assert not wrong, f"{bars[0] - 1} cells are in the head"


def test_a_table_with_a_lost_or_an_extra_cell_is_found() -> None:
    [rows] = tables_of("text\n| a | b\\|c |\n|---|---|\n| 1 |\n```\n| no |\n```\n")
    assert [len(CELL_END.findall(row)) for row in rows] == [3, 3, 2]
