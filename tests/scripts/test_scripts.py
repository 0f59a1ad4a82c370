"""Every script beside this file, on every engine; `pytest tests/scripts --rewrite` renews them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kvstore
from kvstore.engine import Engine
from kvstore.engine.memory_engine import MemoryEngine
from kvstore.engine.rocks import RocksEngine
from kvstore.opening import engine_at
from tests.harness.scripts import Script

SCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


ENGINES: dict[str, Callable[[Path], Engine]] = {"rocksdb": RocksEngine, "memory": MemoryEngine}
"""Opens each engine without a store; `kvstore.open` knows the engines by the same names."""


@pytest.mark.tiny_limits
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_script(script: Path, engine: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    def open_store(path: Path, clock: kvstore.ManualClock) -> kvstore.Store:
        # Restored stores are on RocksDB, whatever engine the script runs on.
        made_by = engine_at(path) or engine
        return kvstore.open(path, engine=made_by, durability="async", clock=clock)

    written = script.read_text()
    answered = Script(tmp_path, ENGINES[engine], open_store).run(written).rstrip("\n") + "\n"
    if request.config.getoption("--rewrite", default=False):
        script.write_text(answered)
    else:
        assert answered == written


APPLIES = {
    "get": "get",
    "scan, limits and resume": "scan scan_under_ranges",
    "fail on more recent": "conditional",
    "point and range at one time": "same_timestamp",
    "put and delete": "history",
    "delete of what is not there": "conditional",
    "compare and set": "conditional",
    "range tombstone": "del_range fragments",
    "range tombstone, idempotent": "del_range",
    "bad input": "bad_spans bad_spans_store",
    "clear of a span": "clear",
    "revert to a time": "revert_range",
    "incremental iteration": "diff_all changes",
    "export, all revisions": "diff_all",
    "export, latest, full and incremental": "diff_latest",
    "backup and restore": "backup",
    "GC threshold": "gc time",
    "GC rule": "gc",
    "protected timestamps": "holds snapshots",
    "bulk add, stamped when added": "import",
    "bulk add, conflicts": "import_conflicts",
    "undo of a bulk add": "revert revert_order",
    "transactions": "transactions",
}
"""Rules of CockroachDB that this store follows, each with the script that shows it. Some rules do
not apply: intents and inline values; point-wise and predicate range deletes, since one range
tombstone does both; raw and cleared range keys, since GC alone removes them; fingerprints and
statistics; the physical rollback of a time span, which is `revert_range`."""


def test_each_row_of_the_semantics_has_a_script_and_no_script_is_without_one() -> None:
    named = {name for scripts in APPLIES.values() for name in scripts.split()}
    assert named == {script.stem for script in SCRIPTS}
