"""The modules of the project as syntax trees, and what each of them imports.

Every import counts, also one inside a function or for types alone: a reader has to know it.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OTHER_NAMES: dict[str, str] = {}
"""Modules that offer a package under a second name. An import of one counts as an import of the
package."""

_CYTHON_IMPORT = re.compile(r"^\s*from ([\w.]+) c?import (\w+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Module:
    """A source file: its path in the project, its dotted name, its syntax tree and its text."""

    path: str
    name: str
    tree: ast.Module
    text: str

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")


def read_modules(root: Path, packages: list[str]) -> list[Module]:
    """All Python and Cython modules of the packages under `root`."""
    return [
        _module(path.relative_to(root), path.read_text(encoding="utf-8"))
        for package in packages
        for path in sorted(_files(root / package))
        if path.suffix in (".py", ".pyx")
    ]


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder, also through links: to `bulk`, `backup` and `spark_connector`."""
    for at, _, names in os.walk(folder, followlinks=True):
        yield from (Path(at, name) for name in names)


def _module(path: Path, text: str) -> Module:
    parts = path.with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    if path.suffix == ".pyx":  # no Python: its imports are kept, one to a line
        text = "\n".join(
            f"from {base} import {name}" for base, name in _CYTHON_IMPORT.findall(text)
        )
    return Module(path.as_posix(), OTHER_NAMES.get(name, name), ast.parse(text), text)


def imports(module: Module) -> Iterator[str]:
    """Yield the dotted name of everything that `module` imports, wherever it does."""
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imported_modules(module: Module, known: set[str]) -> set[str]:
    """The modules among `known` that `module` imports, in whole or a name of them."""
    found = set()
    for name in imports(module):
        while name not in known and name not in OTHER_NAMES and "." in name:
            name = name.rpartition(".")[0]
        found.add(OTHER_NAMES.get(name, name))
    return found & known - {module.name}
