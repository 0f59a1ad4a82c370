"""Imports go down, foreign packages are imported in their places only, and names keep the house's
rules.

The floors come from ARCHITECTURE.md's picture and from the docstrings of packages; see
`tests/house/floors.py`. The checker is itself tested on small trees that break one rule each.
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
spark_connector   Spark
    source jobs
backup            backups
    export
    shard         batches
                  of rows
bulk
    cli
    __init__
    ingest sst
kvstore
    cli
    store
    gc mvcc
    engine span   ordered bytes
    storage       blobs
    errors limits
```
"""
TREE = {
    "ARCHITECTURE.md": PICTURE,
    "pyspark_kvstore/__init__.py": "",
    "spark_connector/source.py": "",
    "spark_connector/jobs.py": "",
    "backup/__init__.py": "",
    "backup/rows.py": "",
    "backup/shard/__init__.py": "Floors, from the top:\n\n    part",
    "backup/shard/part.py": "",
    "bulk/__init__.py": "",
    "bulk/cli.py": "",
    "bulk/ingest.py": "",
    "bulk/part.py": "",
    "kvstore/__init__.py": "",
    "kvstore/bulk.py": "",
    "kvstore/cli.py": "",
    "kvstore/store.py": "",
    "kvstore/retention/gc.py": "",
    "kvstore/mvcc.py": "",
    "kvstore/engine/__init__.py": "Floors, from the top:\n\n    rocks memory  two engines\n    api",
    "kvstore/engine/rocks.py": "",
    "kvstore/engine/memory.py": "",
    "kvstore/engine/api.py": "",
    "kvstore/storage/__init__.py": "Floors, from the top:\n\n    object_store",
    "kvstore/storage/object_store.py": "",
    "kvstore/base/span.py": "",
    "kvstore/errors.py": "",
    "kvstore/limits.py": "",
}
"""A small project without an import, and the docstrings of its modules."""


def tree(root: Path, code: dict[str, str]) -> Path:
    """The small project under `root`, with `code` in some of its modules."""
    for path in {**TREE, **code}:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        text = TREE.get(path, "")
        if path.endswith(".py"):
            text = f'"""Opens.\n\n{text}\n"""\n{code.get(path, "")}\n'
        elif path in code:
            text = code[path]
        (root / path).write_text(text)
    return root


def test_the_project_keeps_the_rules() -> None:
    assert findings(ROOT) == []


def test_architecture_names_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for path in re.findall(r"`([\w/]+(?:\.pyx?|/))`", text):
        assert (ROOT / path).exists() or (ROOT / "kvstore" / path).exists(), path


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("kvstore/__init__.py", "from kvstore.store import Store\n__all__ = ['Store']"),
        ("kvstore/bulk.py", "from kvstore.bulk import ingest"),
        ("kvstore/base/span.py", "from kvstore.errors import UsageError"),
        ("kvstore/store.py", "from kvstore import limits"),
        ("kvstore/engine/memory.py", "from ..span import Span\nfrom . import api"),
        ("kvstore/engine/memory.py", "from kvstore.engine import rocks"),
        ("kvstore/engine/rocks.py", "import rocksdict"),
        ("bulk/ingest.py", "import kvstore"),
        ("bulk/cli.py", "from kvstore import bulk"),
        ("kvstore/storage/object_store.py", "from obstore.store import S3Store"),
        ("spark_connector/jobs.py", "import pyspark.sql, backup, bulk.sst, kvstore.bulk"),
        ("pyspark_kvstore/__init__.py", "from kvstore.spark.source import Source"),
        ("kvstore/errors.py", f"{'x' * 96} = 1"),
    ],
)
def test_what_keeps_the_rules_passes(tmp_path: Path, path: str, code: str) -> None:
    assert findings(tree(tmp_path, {path: code})) == []


@pytest.mark.parametrize(
    ("path", "code", "finding"),
    [
        ("kvstore/base/span.py", "from kvstore import bulk", "imports bulk, which is above it"),
        ("kvstore/base/span.py", "import kvstore.bulk", "imports bulk, which is above it"),
        (
            "bulk/part.py",
            "from kvstore.backup.shard import part",
            "imports backup.shard.part, which is",
        ),
        ("bulk/part.py", "from kvstore.bulk import cli", "imports bulk.cli, which is above it"),
        ("bulk/part.py", "from kvstore import bulk", "imports bulk, which is above it"),
        ("backup/rows.py", "import kvstore.spark.jobs", "imports kvstore.spark.jobs, which"),
        ("kvstore/mvcc.py", "from kvstore.store import Store", "imports kvstore.store, which is"),
        ("kvstore/retention/gc.py", "from ..store import Store", "imports kvstore.store, which is"),
        ("kvstore/mvcc.py", "from . import store", "imports kvstore.store, which is above it"),
        (
            "kvstore/base/span.py",
            "def f():\n    import kvstore.mvcc",
            "imports kvstore.mvcc, which is",
        ),
        (
            "kvstore/retention/gc.py",
            "from kvstore import open",
            "imports kvstore, which is above it",
        ),
        ("kvstore/engine/api.py", "from . import rocks", "imports kvstore.engine.rocks, which is"),
        (
            "kvstore/engine/api.py",
            "import kvstore.engine",
            "imports kvstore.engine, which is above",
        ),
        ("kvstore/store.py", "import rocksdict", "imports rocksdict, which belongs in kvstore/eng"),
        ("backup/rows.py", "from pyspark import sql", "imports pyspark, which belongs in spark"),
        ("backup/shard/part.py", "import obstore", "imports obstore, which belongs in kvstore/st"),
        ("bulk/part.py", f"{'x' * 101} = 1", "line 5 has 105 characters, at most 100"),
        ("bulk/__init__.py", "def f():\n    pass", "line 5: an __init__ only re-exports"),
        ("bulk/__init__.py", "limit = 3", "line 5: an __init__ only re-exports"),
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
                "kvstore/engine/rocks.py": "from . import memory",
                "kvstore/engine/memory.py": "import kvstore.engine.rocks",
            },
            "kvstore/engine/__init__.py: a circle: kvstore.engine.memory imports "
            "kvstore.engine.rocks, kvstore.engine.rocks imports kvstore.engine.memory",
        ),
        (
            {
                "kvstore/retention/gc.py": "import kvstore.mvcc",
                "kvstore/mvcc.py": "def f():\n    import kvstore.retention.gc",
            },
            "ARCHITECTURE.md: a circle: kvstore.retention.gc imports kvstore.mvcc, "
            "kvstore.mvcc imports kvstore.retention.gc",
        ),
    ],
)
def test_a_circle_on_one_floor_is_named(tmp_path: Path, code: dict[str, str], finding: str) -> None:
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
            "store\n    gc mvcc",
            "gc mvcc\n    store",
            "kvstore/store.py: imports kvstore.retention.gc, which is above it",
        ),
        ("gc mvcc", "gc", "ARCHITECTURE.md: no floor names kvstore.mvcc"),
        (
            "gc mvcc",
            "gc mvcc txn",
            "ARCHITECTURE.md: a floor names txn, which is not there or on another floor",
        ),
        (
            "gc mvcc",
            "gc mvcc span",
            "ARCHITECTURE.md: a floor names span, which is not there or on another floor",
        ),
        (
            "spark_connector   Spark\n    source jobs",
            "spark_connector",
            "ARCHITECTURE.md: no floor names spark_connector",
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


def test_a_module_that_a_docstring_does_not_name_is_named(tmp_path: Path) -> None:
    root = tree(tmp_path, {"kvstore/engine/logs.py": "", "kvstore/retention/gc.py": ""})
    assert findings(root) == [
        "kvstore/engine/__init__.py: no floor names kvstore.engine.logs",
        "kvstore/retention/gc.py: no floor names kvstore.retention.gc",
        "kvstore/retention/gc.py: no floor names kvstore.retention.gc",
    ]


@pytest.mark.parametrize("path", ["kvstore/utils.py", "kvstore/_helpers/a.py"])
def test_a_name_without_an_idea_is_named(tmp_path: Path, path: str) -> None:
    name = Path(path).parts[1].removesuffix(".py")
    assert f"{path}: {name!r} names no idea: call it by what it holds" in findings(
        tree(tmp_path, {path: ""})
    )


def test_a_module_without_a_docstring_is_named(tmp_path: Path) -> None:
    root = tree(tmp_path, {})
    (root / "bulk" / "sst.py").write_text("import kvstore\n")
    assert findings(root) == ["bulk/part.py: has no docstring: open with the problem it solves"]


def test_a_refusal_without_a_remedy_is_named(tmp_path: Path) -> None:
    code = '"""Opens."""\nfault = UsageError("wrong")\nUsageError("wrong", remedy="pass 1")\n'
    root = tree(tmp_path, {"kvstore/base/span.py": code})
    (line,) = findings(root)
    assert line.startswith("kvstore/base/span.py: line 6 has no remedy")
