"""Ordered, durable key-value storage behind one contract."""

from kvstore.engine.api import (
    CHANGES,
    DATA,
    FAMILIES,
    META,
    RANGES,
    Cursor,
    Engine,
    EntryReader,
    FileSpan,
    WriteBatch,
    chunks,
)

__all__ = [
    "CHANGES",
    "DATA",
    "FAMILIES",
    "META",
    "RANGES",
    "WriteBatch",
    "Cursor",
    "Engine",
    "FileSpan",
    "EntryReader",
    "chunks",
]
