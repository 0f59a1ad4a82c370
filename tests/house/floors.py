"""The floors of each package, and the imports between them.

ARCHITECTURE.md opens with a picture: the first code block. It names the packages from the top
down, and below each package, indented, the floors of the modules and rooms directly in it:

    page            a floor names its modules, then describes them
    diff lookup     two spaces end the names; a line indented deeper continues the text

Rules
1. A floor names each module and room of its package once, and no other.
2. A module imports from its own floor and from floors below. An `__init__` is the roof of its
   package unless a floor names it.
3. Modules and packages side by side import each other in no circle, on one floor either.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tests.house.source import Module, imported_modules

PICTURE = "ARCHITECTURE.md"
ROOF = "__init__"

Floors: TypeAlias = list[list[str]]
"""Names of modules, floor by floor, from the top."""

_BLOCK = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Import:
    """An import, and the two places in `package` that it joins: modules, packages or its roof."""

    package: str
    source: str
    target: str
    importer: Module
    imported: str

    @classmethod
    def of(cls, importer: Module, imported: str) -> Import:
        ours, theirs = importer.name.split("."), imported.split(".")
        shared = 0
        while ours[shared : shared + 1] == theirs[shared : shared + 1] != []:
            shared += 1
        source, target = (path[shared] if len(path) > shared else ROOF for path in (ours, theirs))
        return cls(".".join(ours[:shared]), source, target, importer, imported)


def floor_findings(root: Path, modules: Sequence[Module]) -> Iterator[str]:
    """What breaks a rule of this module, one line each, the file at fault first."""
    declared = _declared(root)
    known = {module.name for module in modules}
    by_package: dict[str, list[Import]] = defaultdict(list)
    for module in modules:
        for imported in sorted(imported_modules(module, known)):
            found = Import.of(module, imported)
            by_package[found.package].append(found)
    for package, names in _members(modules).items():
        where, floors = declared.get(package, (f"{package.replace('.', '/')}/__init__.py", []))
        if floors:
            yield from (f"{where}: {text}" for text in _misnamed(package, names, floors))
        yield from _upward(by_package[package], floors)
        yield from (f"{where}: {text}" for text in _circular(by_package[package]))


def picture(root: Path) -> str:
    """The picture of the floors: the first code block of ARCHITECTURE.md."""
    found = _BLOCK.search((root / PICTURE).read_text(encoding="utf-8"))
    assert found is not None, f"{PICTURE} opens with a picture"
    return found[1]


def packages(root: Path) -> list[str]:
    """The packages of the project, as the picture names them, from the top."""
    return [name for (name,) in _floors(picture(root).splitlines())]


def _declared(root: Path) -> dict[str, tuple[str, Floors]]:
    """For each package, the file that names its floors, and the floors. The project is package
    ""."""
    whole = picture(root)
    declared = {"": (PICTURE, _floors(whole.splitlines()))}
    for heading, below in re.findall(r"^(\w+).*\n((?:[ ]+.*\n)*)", whole, re.MULTILINE):
        declared[heading] = (PICTURE, _floors(below.splitlines()))
    return declared


def _floors(lines: Sequence[str]) -> Floors:
    """The floors that the lines of one indentation name. A deeper line continues a text."""
    depth = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    texts = (line[depth:] for line in lines if not line[depth].isspace())
    return [re.split(r"\s{2,}", text)[0].split() for text in texts]


def _members(modules: Sequence[Module]) -> dict[str, set[str]]:
    """For each package, the modules and packages directly in it. The project is package ""."""
    found: dict[str, set[str]] = {}
    for module in modules:
        path = module.name.split(".")
        for depth, name in enumerate(path):
            found.setdefault(".".join(path[:depth]), set()).add(name)
    return found


def _misnamed(package: str, names: set[str], floors: Floors) -> Iterator[str]:
    named = [name for floor in floors for name in floor if name != ROOF]
    for name in sorted(names - set(named)):
        yield f"no floor names {'.'.join(filter(None, (package, name)))}"
    for name in sorted({name for name in named if name not in names or named.count(name) > 1}):
        yield f"a floor names {name}, which is not there or on another floor"


def _upward(found: Sequence[Import], floors: Floors) -> Iterator[str]:
    height = {ROOF: 1} | {name: -level for level, floor in enumerate(floors) for name in floor}
    for each in found:
        if height.get(each.target, 0) > height.get(each.source, 0):
            yield f"{each.importer.path}: imports {each.imported}, which is above it"


def _circular(found: Sequence[Import]) -> Iterator[str]:
    edges: dict[str, set[str]] = defaultdict(set)
    for each in found:
        edges[each.source].add(each.target)
    for group in circles(edges):
        parts = sorted(
            f"{each.importer.name} imports {each.imported}"
            for each in found
            if each.source in group and each.target in group
        )
        yield f"a circle: {', '.join(parts)}"


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of a graph that have an edge inside."""
    reached = {node: _reached(node, edges) for node in edges}
    groups = {
        tuple(sorted(other for other in found if node in reached.get(other, ())))
        for node, found in reached.items()
        if node in found
    }
    return [list(group) for group in sorted(groups)]


def _reached(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    """All nodes at the end of a path of at least one edge from `start`."""
    found: set[str] = set()
    todo = list(edges.get(start, ()))
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += edges.get(node, ())
    return found
