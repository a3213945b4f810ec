"""The C extensions: every `_native.c` of our packages is the module of that name. All else is in pyproject.toml.

Its parts, when it has several, are `_native_*.c` beside it.
"""

import os
from pathlib import Path

from setuptools import Extension, setup

# Hidden: what the parts of a module have in common is nobody else's.
FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Wshadow", "-fvisibility=hidden"]
if "CI" in os.environ:
    FLAGS.append("-Werror")


def extension(source: Path) -> Extension:
    """The module beside which its source lies."""
    return Extension(
        ".".join(source.with_suffix("").parts),
        [str(source), *map(str, sorted(source.parent.glob("_native_*.c")))],
        include_dirs=["."],
        depends=["protocols/native.h", *map(str, source.parent.glob("_native.h"))],
        extra_compile_args=FLAGS,
    )


# Relative: setuptools builds in the project's directory, and refuses absolute paths.
packages = [Path(name) for name in ("gateway", "mapping", "protocols")]
setup(ext_modules=[extension(source) for package in packages for source in sorted(package.rglob("_native.c"))])
