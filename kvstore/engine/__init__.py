"""Ordered, durable key-value storage behind one contract."""

from kvstore.engine.api import (
    CHANGES,
    DATA,
    FAMILIES,
    META,
    RANGES,
    Batch,
    Cursor,
    Engine,
    FileSpan,
    Reader,
    chunks,
)

__all__ = [
    "CHANGES",
    "DATA",
    "FAMILIES",
    "META",
    "RANGES",
    "Batch",
    "Cursor",
    "Engine",
    "FileSpan",
    "Reader",
    "chunks",
]
