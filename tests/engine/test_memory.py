"""The memory engine keeps the contract too."""

from __future__ import annotations

from pathlib import Path

from kvstore.engine.memory import MemoryEngine
from tests.engine.contract import DurableContract


class TestMemoryEngine(DurableContract):
    def open(self, path: Path) -> MemoryEngine:
        return MemoryEngine(path)
