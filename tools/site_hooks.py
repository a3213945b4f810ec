"""Hooks of mkdocs: README.md is the first page, and links out of `docs/` lead to the repository.

mkdocs loads this file by its path. A link to something that does not exist is left as it is, for mkdocs to report.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:]+)\)")
_DOCS = "docs/"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md as the first page."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - the package of the site only

    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links out of docs/ to the repository, or leave their text when it is not known."""
    source = page.file.src_uri
    return rewritten(markdown, "README.md" if source == "index.md" else _DOCS + source, config.repo_url or "")


def rewritten(markdown: str, source: str, repository: str) -> str:
    """Return a page's text; `source` is its path in the repository, whose address may be empty."""
    folder = posixpath.dirname(source)

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        name, mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(folder, name))
        if not name or not (ROOT / path).exists():
            return match[0]
        if path.startswith(_DOCS) and (ROOT / path).is_file():
            return f"[{text}]({path.removeprefix(_DOCS)}{mark}{anchor})" if source == "README.md" else match[0]
        if source != "README.md" and path == "README.md":
            up = "../" * (folder.count("/"))
            return f"[{text}]({up}index.md{mark}{anchor})"
        return f"[{text}]({repository}/blob/HEAD/{path}{mark}{anchor})" if repository else text

    return _LINK.sub(link, markdown)
