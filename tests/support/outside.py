"""Third-party data that tests use if it lies beside the repository; it is not copied into the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SHARED: Final = Path(__file__).parents[3] / "shared"
NOT_HERE: Final = "not part of the repository"
"""The reason for skipping a test without this data; the only one that CI accepts."""
