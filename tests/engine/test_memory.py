"""The memory engine keeps the contract, with a directory and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.engine import memory_engine
from kvstore.engine.memory_engine import MemoryEngine
from kvstore.testing.engines import DurableEngineContract, EngineContract


class TestMemoryEngine(EngineContract):
    def open(self, path: Path) -> MemoryEngine:
        return MemoryEngine(None)


class TestJournaledMemoryEngine(DurableEngineContract):
    def open(self, path: Path) -> MemoryEngine:
        return MemoryEngine(path)


class TestMemoryEngineOfSmallChunks(TestMemoryEngine):
    """A few rows lie in many chunks, as millions do in chunks of the usual size."""

    @pytest.fixture(autouse=True)
    def _tiny_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(memory_engine, "CHUNK_ENTRIES_MAX", 4)
