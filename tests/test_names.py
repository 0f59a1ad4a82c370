"""Rules over the names of the packages: one word for one thing, and no function without a
caller."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("kvstore", "bulk", "backup", "spark_connector", "pyspark_kvstore")

LOOPS = Path("kvstore/loops")
"""Modules that are compiled. A `.pyi` beside each names its functions and classes, and
`shapes.py` the shapes that they take, by names that the packages above have for their own."""

TESTING = "testing"
"""Users and tests call packages of this name. Models in them have the names of the modelled
classes."""

LIBRARIES = (Path("kvstore/storage/journal"), Path("kvstore/tasks.py"))
"""Libraries that are kept whole: users may call the parts that the packages above do not."""

OURS = {"NamedTuple", "Protocol", "Enum", "Exception"}
"""Foreign bases that call no method of a class by its name."""


@cache
def trees() -> dict[Path, ast.Module]:
    """The modules of the packages, parsed when a test first asks: a worker may run none of them."""
    return {
        path.relative_to(ROOT): ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py*"))
        if path.suffix in {".py", ".pyi"}
    }


def is_alias(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation)


def test_no_two_public_types_share_a_name() -> None:
    places = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if path.is_relative_to(LOOPS) or TESTING in path.parts:
                continue
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path))
            elif isinstance(node, ast.AnnAssign) and is_alias(node):
                places[ast.unparse(node.target)].append(str(path))
    shared = {
        name: paths for name, paths in places.items() if len(paths) > 1 and not name.startswith("_")
    }
    assert shared == {}


def classes() -> dict[str, list[str]]:
    """Each class of the packages with the names of its bases."""
    return {
        node.name: [ast.unparse(base).partition("[")[0].split(".")[-1] for base in node.bases]
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def test_each_error_is_raised_or_groups_others_that_are() -> None:
    known = classes()

    def is_error(name: str) -> bool:
        return name == "Exception" or any(map(is_error, known.get(name, ())))

    raised = {
        ast.unparse(node.func if isinstance(node, ast.Call) else node.exc).split(".")[-1]
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) or (isinstance(node, ast.Raise) and node.exc is not None)
    }
    bases = {base for names in known.values() for base in names}
    assert {name for name in known if is_error(name)} - raised - bases == set()


def used_names() -> Counter[str]:
    """The names that the packages read, call or import, and the words of their programs."""
    found: Counter[str] = Counter()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                found[node.id] += 1
            elif isinstance(node, ast.Attribute):
                found[node.attr] += 1
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                imported = re.findall(r"^from [\w.]+ import (\w+)$", node.value, re.MULTILINE)
                found.update(imported)
                found.update(re.findall(r"^kvstore[\w.]*:(\w+)$", node.value))  # imported by name
    for source in [*(ROOT / LOOPS).glob("*.pyx"), *(ROOT / LOOPS).glob("*.pxi")]:
        found.update(re.findall(r"(?<!\bdef )\b\w+", source.read_text()))
    return found


def offered() -> tuple[set[str], set[str]]:
    """The words that the documents use in code, and the classes that they list with all members."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md")]
    text = "\n".join(page.read_text() for page in pages if "_build" not in page.parts)
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    listed = re.findall(r"autoclass:: [\w.]*?(\w+)\n   :members:", text)
    known, every = classes(), set(listed)
    while more := {base for name in every for base in known.get(name, ())} - every:
        every |= more
    return set(re.findall(r"\w+", code)), every


def functions() -> Iterator[tuple[Path, str | None, str]]:
    """Public functions and methods: the module, the class and the name. Functions that a decorator
    registers, and methods that override a foreign class's, are left out."""
    known = classes()

    def is_foreign(name: str) -> bool:
        return name not in OURS and (name not in known or any(map(is_foreign, known[name])))

    for path, tree in trees().items():
        kinds = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        ours = [kind for kind in kinds if not any(map(is_foreign, known[kind.name]))]
        for owner, body in [(None, tree.body), *((kind.name, kind.body) for kind in ours)]:
            for node in body:
                if isinstance(node, ast.FunctionDef) and not is_registered(node):
                    yield path, owner, node.name


def is_registered(function: ast.FunctionDef) -> bool:
    return any(isinstance(decorator, ast.Call) for decorator in function.decorator_list)


def test_each_public_function_is_called_or_offered_to_users() -> None:
    used, (written, listed) = used_names(), offered()
    left = [
        f"{path}: {f'{owner}.' if owner else ''}{name}"
        for path, owner, name in functions()
        if not name.startswith("_")
        and not used[name]
        and name not in written
        and owner not in listed
        if TESTING not in path.parts
        if not any(path.is_relative_to(library) for library in LIBRARIES)
    ]
    assert left == []
