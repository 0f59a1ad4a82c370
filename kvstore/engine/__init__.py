"""Ordered, durable key-value storage behind one contract."""

from kvstore.engine.api import (
    CHANGES,
    DATA,
    FAMILIES,
    META,
    RANGES,
    Cursor,
    Engine,
    FileSpan,
    Reader,
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
    "Reader",
    "chunks",
]
