"""Bounds: each limit can be set, wherever it was imported, and gets its old value back."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

import kvstore
from kvstore import limits
from kvstore.backup.shard.rows import batch_writer
from kvstore.errors import UsageError
from tests.harness.bounds import FIXED, PACKAGES, SEED, TINY, bounds, some_tiny

ROOT = Path(kvstore.__file__).parent.parent
LIMITS = [name for name in vars(limits) if name.isupper()]
SHOWN = (
    "backup/cli.py: RETRY_S",
    "backup/chains.py: LABEL_CHARS_MAX",
    "backup/collection.py: RETRY_S",
    "remote/parameters.py: KEY_BYTES_MAX",
    *("remote/verbs.py: READER_LEASE_S_MAX", "remote/verbs.py: SCAN_PIECES_MAX"),
    *("remote/verbs.py: STREAMS_MAX", "remote/verbs.py: TABLE_NAME_BYTES_MAX"),
    "remote/verbs.py: TASK_NAME_BYTES_MAX",
)
"""Waits that a help text or a signature shows, which the caller may set; and bounds that the
document of a server shows, which lie above those that the store checks again."""
LINKS = {"bulk": "kvstore.bulk", "backup": "kvstore.backup", "spark_connector": "kvstore.spark"}
"""The names of the packages to which links in `kvstore/` lead."""

COPIES = {
    "live.pyx": {"VERSIONS_PASSED_MAX"},
    "lookup.pyx": {"KEY_BYTES_MAX"},
    "writes.pyx": {
        "CHANGE_CHUNK_BYTES",
        "COMPRESS_FROM_BYTES",
        "INLINE_VALUE_BYTES",
        "KEY_BYTES_MAX",
        "THIN_FROM_BYTES",
        "VALUE_BYTES_MAX",
    },
}
"""Limits that a compiled module copies. Its `take_bounds` copies them again."""


def imported_limits(tree: ast.Module) -> dict[str, str]:
    """For each name under which a module has a limit, the name of the limit."""
    return {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "kvstore.limits"
        for alias in node.names
    }


def read_at_definition(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Uses of `names` that run when the module is imported, each with its line."""

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Name) and node.id in names:
            yield node.id
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            arguments = node.args
            now = [*arguments.defaults, *filter(None, arguments.kw_defaults)]
            now += getattr(node, "decorator_list", [])
            for each in now:
                yield from walk(each)
            return
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    yield from walk(tree)


@cache
def users_of() -> list[tuple[str, set[str]]]:
    """Each module that imports limits, with their names."""
    found = []
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            names = imported_limits(ast.parse(path.read_text(encoding="utf-8")))
            if names:
                top, *parts = path.relative_to(ROOT).with_suffix("").parts
                found.append((".".join((LINKS.get(top, top), *parts)), set(names.values())))
    return [*found, *((f"kvstore.loops.{Path(name).stem}", COPIES[name]) for name in COPIES)]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_reads_a_limit_when_it_is_defined(package: str) -> None:
    """Otherwise the module would keep a copy that `bounds` cannot set."""
    found = []
    for path in (ROOT / package).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = imported_limits(tree)
        renamed = [name for name, limit in names.items() if name != limit]
        assert not renamed, f"{path} imports a limit as {renamed}: `bounds` does not find it"
        settable = {name for name, limit in names.items() if limit not in FIXED}
        found += [f"{path}: {use}" for use in read_at_definition(tree, settable)]
    assert [use for use in found if not use.endswith(SHOWN)] == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(x=SCAN_CHUNK): pass",
        "def f(*, x=SCAN_CHUNK + 1): pass",
        "class A:\n    x = SCAN_CHUNK",
        "class A:\n    def f(self, x=SCAN_CHUNK): pass",
        "LONGER = SCAN_CHUNK + 1",
        "f = lambda x=SCAN_CHUNK: x",
    ],
)
def test_a_limit_that_is_read_when_it_is_defined_is_found(text: str) -> None:
    assert list(read_at_definition(ast.parse(text), {"SCAN_CHUNK"}))


def test_a_limit_that_is_read_when_it_is_called_is_none_of_them() -> None:
    text = "def f(x=None):\n    return SCAN_CHUNK if x is None else x\ng = lambda: SCAN_CHUNK"
    assert not list(read_at_definition(ast.parse(text), {"SCAN_CHUNK"}))


@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_is_settable_wherever_it_is_imported_or_fixed_with_a_reason(name: str) -> None:
    if name in FIXED:
        assert FIXED[name]
        with pytest.raises(ValueError, match="is fixed"), bounds({name: 1}):
            pass
        return
    before = getattr(limits, name)
    users = [importlib.import_module(module) for module, names in users_of() if name in names]
    assert users, f"nobody uses {name}"
    with bounds({name: before + 1}):
        assert {getattr(module, name) for module in (limits, *users)} == {before + 1}
    assert all(getattr(module, name) is before for module in (limits, *users))


def test_every_user_of_limits_that_is_no_module_of_python_takes_them_again() -> None:
    named = {}
    for path in ROOT.glob("kvstore/**/*.p[xy][xi]"):
        words = set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
        if words.intersection(LIMITS):
            named[path.name] = words.intersection(LIMITS)
    assert named == COPIES


def test_compiled_loops_compare_with_the_limits_that_are_set() -> None:
    """A put and a get take a shortcut in compiled code, and fall back to the checks in Python,
    which raise the errors."""
    with kvstore.open(None, "memory") as store:
        store.put(b"long", b"value")
        with bounds(KEY_BYTES_MAX=3, VALUE_BYTES_MAX=4):
            with pytest.raises(UsageError, match="at most 3"):
                store.put(b"long", b"v")
            with pytest.raises(UsageError, match="at most 3"):
                store.get(b"long")
            with pytest.raises(UsageError, match="at most 4"):
                store.put(b"key", b"value")
            assert list(store.scan(b"lon\x00")) == [(b"long", b"value")]
        store.put(b"longer", b"value")
    for name in COPIES:
        assert hasattr(importlib.import_module(f"kvstore.loops.{Path(name).stem}"), "take_bounds")


def test_limits_nest_and_return_after_an_error() -> None:
    before = batch_writer.ROW_GROUP_ROWS_MAX
    with bounds(ROW_GROUP_ROWS_MAX=5):
        with suppress(InterruptedError), bounds(ROW_GROUP_ROWS_MAX=7):
            assert batch_writer.ROW_GROUP_ROWS_MAX == 7
            raise InterruptedError
        assert batch_writer.ROW_GROUP_ROWS_MAX == limits.ROW_GROUP_ROWS_MAX == 5
    assert batch_writer.ROW_GROUP_ROWS_MAX is before


@pytest.mark.parametrize("name", ["NO_SUCH_BOUND", "__doc__", "scan_chunk"])
def test_a_name_that_is_no_limit_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="has no"), bounds({name: 1}):
        pass


IMPORTED_INSIDE = """
from tests.harness.bounds import bounds
import kvstore.limits, sys
assert "kvstore.bulk.sort" not in sys.modules
with bounds(RUN_BYTES_MAX=7):
    from kvstore.bulk import sort
    assert sort.RUN_BYTES_MAX == 7
assert sort.RUN_BYTES_MAX == kvstore.limits.RUN_BYTES_MAX > 7
"""


def test_modules_that_are_imported_inside_see_the_limits_and_lose_them() -> None:
    """This runs in a process of its own, in which nothing is imported yet."""
    subprocess.run([sys.executable, "-c", IMPORTED_INSIDE], check=True, cwd=ROOT)


def test_tiny_limits_are_limits_and_smaller_than_the_usual_ones() -> None:
    assert all(tiny < getattr(limits, name) for name, tiny in TINY.items())
    assert not TINY.keys() & FIXED.keys()


def test_some_tiny_limits_are_those_of_the_seed_that_was_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = [some_tiny(seed) for seed in range(20)]
    assert {bool(each) for each in drawn} == {True, False}
    assert capsys.readouterr().err.startswith(f"{SEED}=0\n")
    monkeypatch.setenv(SEED, "7")
    assert some_tiny() == drawn[7]


def test_a_journal_a_feed_and_a_scan_take_the_limits_of_the_moment_they_begin(
    tmp_path: Path,
) -> None:
    with bounds(SCAN_CHUNK=2, FEED_BATCH_ROWS=3, JOURNAL_FILE_RECORDS=4):
        with kvstore.open(tmp_path / "store", "memory") as store:
            feed = store.feed("all", start=0)
            for number in range(10):
                store.put(b"%d" % number, b"")
            rows = [each.num_rows for each in store.scan_batches()]
            assert (sum(rows), max(rows)) == (10, 2)
            sizes = [len(each.events) for each in feed.batches()]
            assert (sum(sizes), max(sizes)) == (10, 3)
        assert len(list((tmp_path / "store").rglob("*-journal*"))) > 2
