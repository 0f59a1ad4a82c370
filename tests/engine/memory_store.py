"""Stores of the memory engine, and the entries of one."""

from __future__ import annotations

from pathlib import Path

import kvstore
from kvstore import ManualClock, Store, bulk
from kvstore.engine.api import DATA, FAMILIES
from kvstore.engine.memory_engine import MemoryEngine

PATH = Path("/store")


def open_memory(path: Path | None, **options: object) -> Store:
    return kvstore.open(path, engine="memory", clock=ManualClock(1), **options)  # type: ignore[arg-type]


def stage(directory: Path, rows: dict[bytes, bytes], import_id: int | None = None) -> bulk.Import:
    made = bulk.Import.create(directory, import_id=import_id)
    with made.writer() as writer:
        for key, value in sorted(rows.items()):
            writer.put(key, value)
    made.seal()
    return made


def entries(engine: MemoryEngine) -> dict[str, dict[bytes, bytes]]:
    return {name: dict(zip(*engine.cursor(name).take(10_000), strict=True)) for name in FAMILIES}


def put(engine: MemoryEngine, key: bytes, value: bytes, family: str = DATA) -> None:
    batch = engine.batch()
    batch.put(key, value, engine.families[family])
    engine.write(batch)
