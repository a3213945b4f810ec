"""The C extensions: every `_native.c` of our packages is the module of that name. All else is in pyproject.toml."""

import os
from pathlib import Path

from setuptools import Extension, setup

FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Wshadow", *(["-Werror"] if "CI" in os.environ else [])]


def extension(source: Path) -> Extension:
    """The module beside which its source lies."""
    return Extension(
        ".".join(source.with_suffix("").parts),
        [str(source)],
        include_dirs=["."],
        depends=["protocols/native.h"],
        extra_compile_args=FLAGS,
    )


# Relative: setuptools builds in the project's directory, and refuses absolute paths.
packages = [Path(name) for name in ("gateway", "mapping", "protocols")]
setup(ext_modules=[extension(source) for package in packages for source in sorted(package.rglob("_native.c"))])
