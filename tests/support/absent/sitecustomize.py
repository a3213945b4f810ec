"""Hides modules from a process, as if they were not installed; `tests.support.without_parts` puts it on the path."""

import os
import sys


class Hidden:
    """A finder that finds nothing, before the others, for the modules that TESTS_HIDDEN names and those below them."""

    names = tuple(os.environ.get("TESTS_HIDDEN", "").split())

    def find_spec(self, name, path=None, target=None):
        for hidden in self.names:
            if name == hidden or name.startswith(f"{hidden}."):
                raise ModuleNotFoundError(f"No module named {name!r}", name=hidden)


sys.meta_path.insert(0, Hidden())
