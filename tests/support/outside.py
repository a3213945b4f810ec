"""Data of others that tests use where it lies beside the repository, and that is not copied into it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SHARED: Final = Path(__file__).parents[3] / "shared"
NOT_HERE: Final = "not part of the repository"
"""Why such a test is skipped elsewhere; the one reason that CI accepts."""
