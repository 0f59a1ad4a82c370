"""The memory engine keeps the contract, with a directory and without."""

from __future__ import annotations

from pathlib import Path

from kvstore.engine.memory import MemoryEngine
from tests.engine.contract import DurableContract, EngineContract


class TestMemoryEngine(EngineContract):
    def open(self, path: Path) -> MemoryEngine:
        return MemoryEngine(None)


class TestJournaledMemoryEngine(DurableContract):
    def open(self, path: Path) -> MemoryEngine:
        return MemoryEngine(path)
