"""Imports go down, foreign packages are imported in their places only, and names keep the house's
rules.

The rooms come from ARCHITECTURE.md's picture; see `tests/house/floors.py`. The checker is itself
tested on small trees that break one rule each.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.floors import circles
from tests.house.rules import findings

ROOT = Path(__file__).parent.parent

PICTURE = """\
# Architecture

```text
pyspark_kvstore   the format's name
kvstore
    spark         Spark
    backup        backups
                  of stores
    bulk
    cli
    __init__
    store
    retention mvcc
    engine base   ordered bytes
    storage       blobs
    errors limits
```
"""
TREE = (
    "pyspark_kvstore/__init__.py",
    "kvstore/spark/source.py",
    "kvstore/backup/__init__.py",
    "kvstore/backup/rows.py",
    "kvstore/backup/shard/part.py",
    "kvstore/bulk/__init__.py",
    "kvstore/bulk/ingest.py",
    "kvstore/bulk/part.py",
    "kvstore/__init__.py",
    "kvstore/cli.py",
    "kvstore/store.py",
    "kvstore/retention/gc.py",
    "kvstore/mvcc.py",
    "kvstore/engine/__init__.py",
    "kvstore/engine/rocks.py",
    "kvstore/engine/memory_engine.py",
    "kvstore/engine/api.py",
    "kvstore/storage/object_store.py",
    "kvstore/base/span.py",
    "kvstore/base/digest.py",
    "kvstore/errors.py",
    "kvstore/limits.py",
)
"""The modules of a small project without an import."""


def tree(root: Path, code: dict[str, str]) -> Path:
    """The small project under `root`, with `code` in some of its modules. `kvstore/bulk` is a link,
    as it is in ours."""
    (root / "bulk").mkdir(parents=True)
    (root / "kvstore").mkdir()
    (root / "kvstore" / "bulk").symlink_to("../bulk")
    (root / "ARCHITECTURE.md").write_text(PICTURE)
    for path in dict.fromkeys((*TREE, *code)):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        text = code.get(path, "")
        (root / path).write_text(text if path.endswith(".pyx") else f'"""Opens."""\n{text}\n')
    return root


def test_the_project_keeps_the_rules() -> None:
    assert findings(ROOT) == []


def test_architecture_names_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`([\w/]+(?:\.pyx?|/))`", text)
    assert named
    for path in named:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("kvstore/__init__.py", "from kvstore.store import Store\n__all__ = ['Store']"),
        ("kvstore/engine/rocks.py", "from kvstore.base.span import Span"),
        ("kvstore/base/span.py", "from kvstore.errors import UsageError"),
        ("kvstore/store.py", "from kvstore import limits"),
        ("kvstore/engine/memory_engine.py", "from ..base.span import Span\nfrom . import api"),
        ("kvstore/engine/memory_engine.py", "from kvstore.engine import rocks"),
        ("kvstore/engine/rocks.py", "import rocksdict"),
        ("kvstore/bulk/ingest.py", "import kvstore"),
        ("kvstore/engine/loose_files.py", "import rocksdict"),
        ("kvstore/storage/object_store.py", "from obstore.store import S3Store"),
        ("kvstore/spark/source.py", "import pyspark.sql, kvstore.backup, kvstore.bulk.part"),
        ("pyspark_kvstore/__init__.py", "from kvstore.spark.source import Source"),
        ("kvstore/errors.py", f"{'x' * 96} = 1"),
    ],
)
def test_what_keeps_the_rules_passes(tmp_path: Path, path: str, code: str) -> None:
    assert findings(tree(tmp_path, {path: code})) == []


@pytest.mark.parametrize(
    ("path", "code", "finding"),
    [
        ("kvstore/base/span.py", "from kvstore import bulk", "imports kvstore.bulk, which is abo"),
        ("kvstore/bulk/part.py", "from kvstore.backup.shard import part", "imports kvstore.backup"),
        ("kvstore/bulk/part.py", "from kvstore import bulk", "imports kvstore.bulk, which is abo"),
        ("kvstore/backup/rows.py", "import kvstore.spark.source", "imports kvstore.spark.source,"),
        ("kvstore/mvcc.py", "from kvstore.store import Store", "imports kvstore.store, which is"),
        ("kvstore/retention/gc.py", "from ..store import Store", "imports kvstore.store, which is"),
        ("kvstore/mvcc.py", "from . import store", "imports kvstore.store, which is above it"),
        ("kvstore/base/span.py", "def f():\n    import kvstore.mvcc", "imports kvstore.mvcc, wh"),
        ("kvstore/retention/gc.py", "from kvstore import open", "imports kvstore, which is above"),
        ("kvstore/engine/api.py", "import kvstore.engine", "imports kvstore.engine, which is abo"),
        ("kvstore/store.py", "import rocksdict", "imports rocksdict, which belongs in kvstore/eng"),
        ("kvstore/backup/rows.py", "from pyspark import sql", "imports pyspark, which belongs in"),
        ("kvstore/backup/shard/part.py", "import obstore", "imports obstore, which belongs in kv"),
        ("kvstore/bulk/part.py", f"{'x' * 101} = 1", "line 2 has 105 characters, at most 100"),
        ("kvstore/bulk/__init__.py", "def f():\n    pass", "line 2: an __init__ only re-exports"),
        ("kvstore/bulk/__init__.py", "limit = 3", "line 2: an __init__ only re-exports"),
    ],
)
def test_what_breaks_a_rule_is_named(tmp_path: Path, path: str, code: str, finding: str) -> None:
    found = findings(tree(tmp_path, {path: code}))
    assert len(found) == 1
    assert found[0].startswith(f"{path}: {finding}")


@pytest.mark.parametrize(
    ("code", "finding"),
    [
        (
            {
                "kvstore/engine/rocks.py": "from . import memory_engine",
                "kvstore/engine/memory_engine.py": "import kvstore.engine.rocks",
            },
            "kvstore/engine/__init__.py: a circle: kvstore.engine.memory_engine imports "
            "kvstore.engine.rocks, kvstore.engine.rocks imports kvstore.engine.memory_engine",
        ),
        (
            {
                "kvstore/retention/gc.py": "import kvstore.mvcc",
                "kvstore/mvcc.py": "def f():\n    import kvstore.retention.gc",
            },
            "ARCHITECTURE.md: a circle: kvstore.mvcc imports kvstore.retention.gc, "
            "kvstore.retention.gc imports kvstore.mvcc",
        ),
    ],
)
def test_a_circle_is_named(tmp_path: Path, code: dict[str, str], finding: str) -> None:
    assert findings(tree(tmp_path, code)) == [finding]


def test_the_imports_of_a_cython_module_count(tmp_path: Path) -> None:
    code = "from kvstore.base.span cimport Span\nfrom kvstore.store import Store\ncdef int x = 1"
    root = tree(tmp_path, {"kvstore/limits.pyx": code})
    (root / "kvstore" / "limits.py").unlink()
    assert findings(root) == [
        "kvstore/limits.pyx: imports kvstore.base.span, which is above it",
        "kvstore/limits.pyx: imports kvstore.store, which is above it",
    ]


def test_circles_are_all_nodes_that_reach_themselves() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "f": {"f"}}
    assert circles(edges) == [["a", "b", "c"], ["f"]]


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        (
            "store\n    retention mvcc",
            "retention mvcc\n    store",
            "kvstore/store.py: imports kvstore.retention.gc, which is above it",
        ),
        ("retention mvcc", "retention", "ARCHITECTURE.md: no floor names kvstore.mvcc"),
        (
            "retention mvcc",
            "retention mvcc txn",
            "ARCHITECTURE.md: a floor names txn, which is not there or on another floor",
        ),
        (
            "retention mvcc",
            "retention mvcc base",
            "ARCHITECTURE.md: a floor names base, which is not there or on another floor",
        ),
    ],
)
def test_a_picture_that_differs_from_the_imports_is_refused(
    tmp_path: Path, old: str, new: str, finding: str
) -> None:
    root = tree(tmp_path, {"kvstore/store.py": "import kvstore.retention.gc"})
    assert findings(root) == []
    assert old in PICTURE
    (root / "ARCHITECTURE.md").write_text(PICTURE.replace(old, new))
    found = findings(root)
    assert found
    assert found[0].startswith(finding)


@pytest.mark.parametrize("path", ["kvstore/utils.py", "kvstore/_helpers/a.py"])
def test_a_name_without_an_idea_is_named(tmp_path: Path, path: str) -> None:
    name = Path(path).parts[1].removesuffix(".py")
    assert f"{path}: {name!r} names no idea: call it by what it holds" in findings(
        tree(tmp_path, {path: ""})
    )


def test_a_module_without_a_docstring_is_named(tmp_path: Path) -> None:
    root = tree(tmp_path, {})
    (root / "bulk" / "part.py").write_text("import kvstore\n")
    assert findings(root) == [
        "kvstore/bulk/part.py: has no docstring: open with the problem it solves"
    ]


def test_a_refusal_without_a_remedy_is_named(tmp_path: Path) -> None:
    code = 'fault = UsageError("wrong")\nUsageError("wrong", remedy="pass 1")\n'
    root = tree(tmp_path, {"kvstore/base/span.py": code})
    assert findings(root) == [
        "kvstore/base/span.py: line 2 has no remedy: tell the caller what to do"
    ]
