"""Every script beside this file, on every engine; `pytest tests/scripts --rewrite` renews them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kvstore
from kvstore.engine import Engine
from kvstore.engine.memory import MemoryEngine
from kvstore.engine.rocks import RocksEngine
from kvstore.opening import engine_at
from tests.harness.scripts import Script

SCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


ENGINES: dict[str, Callable[[Path], Engine]] = {"rocksdb": RocksEngine, "memory": MemoryEngine}
"""How to open each engine on its own; `kvstore.open` knows them by the same names."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_script(script: Path, engine: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    def open_store(path: Path, clock: kvstore.ManualClock) -> kvstore.Store:
        # Restored stores are RocksDB's, whatever the script runs on.
        made_by = engine_at(path) or engine
        return kvstore.open(path, engine=made_by, durability="async", clock=clock)

    written = script.read_text()
    answered = Script(tmp_path, ENGINES[engine], open_store).run(written).rstrip("\n") + "\n"
    if request.config.getoption("--rewrite", default=False):
        script.write_text(answered)
    else:
        assert answered == written
