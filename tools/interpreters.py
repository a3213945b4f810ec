"""Find the interpreters that the project supports on this machine: on PATH, in pyenv and of uv.

`python tools/interpreters.py` prints each with its path, and names those that are absent. It uses only the standard
library, so that any Python runs it before anything is installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ANSWER_LIMIT_S = 30.0
_CLASSIFIER = re.compile(r'"Programming Language :: Python :: (3\.\d+)"')


def supported() -> list[str]:
    """Return the versions that pyproject.toml names, such as 3.11, the oldest first."""
    return _CLASSIFIER.findall((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def find(version: str) -> Path | None:
    """Return an interpreter of a version that runs, or None. A shim of pyenv may stand on PATH and not run."""
    named = [Path(folder, f"python{version}") for folder in os.get_exec_path()]
    home = Path.home()
    folders = (Path(os.environ.get("PYENV_ROOT") or home / ".pyenv", "versions"), home / ".local/share/uv/python")
    kept = [
        path for folder in folders for path in sorted(folder.glob(f"*{version}.*/bin/python{version}"), reverse=True)
    ]
    return next((path for path in (*named, *kept) if path.is_file() and _runs(path, version)), None)


def _runs(path: Path, version: str) -> bool:
    script = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run(  # noqa: S603 - the user's own interpreters
            [path, "-c", script], capture_output=True, text=True, timeout=ANSWER_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.stdout.strip() == version


if __name__ == "__main__":
    for supported_version in supported():
        sys.stdout.write(f"{supported_version}\t{find(supported_version) or 'absent'}\n")
