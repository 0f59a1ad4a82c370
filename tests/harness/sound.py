"""The entries of a store that has every kind of entry, as bytes to be damaged."""

from __future__ import annotations

import tempfile
from pathlib import Path

import kvstore
from kvstore import ManualClock, bulk
from tests.harness.crafted import Stored, stored_in
from tests.harness.parts import parts_of

WHOLE_ROWS = 30
"""The number of rows from which on record batches take an entry as a whole, if `WHOLE_ROWS_MIN` is
set to it."""


def sound_entries() -> Stored:
    """Keys with zeros, large values, deletions, range tombstones, an import that stands and one
    that was reverted, a clear, holds, changesets, two generations, one entry of many rows."""
    with (
        tempfile.TemporaryDirectory() as directory,
        kvstore.open(None, engine="memory", clock=ManualClock(1)) as store,
    ):
        for key in (b"a", b"b", b"\x00", b"b\x00c", b"q", b"x" * 300):
            store.put(key, b"v" + key)
        _import(store, Path(directory), b"i")
        _import(store, Path(directory), b"j")
        store.revert_import(store.imports.all()[1].import_id)
        store.clear_range(b"q", b"r")
        store.hold("reader")
        store.put(b"large", b"v" * 5000)
        store.delete(b"a")
        store.delete_range(b"b", b"c")
        with store.transaction() as transaction:
            for row in range(WHOLE_ROWS):
                transaction.put(b"row%04d" % row, b"v" * (row % 7))
        with store.changeset():
            store.put(b"b", b"2")
            store.delete_range(b"a\x00", b"row0002")
        store.reshard(3)
        for row in range(9):
            store.put(b"row%04d" % row, b"again")
        with store.transaction() as transaction:
            transaction.put(b"k", b"1")
            transaction.put(b"l", b"2")
            transaction.delete_range(b"row0005", b"row0006")
        store.sync()
        return stored_in(parts_of(store).engine)


def _import(store: kvstore.Store, directory: Path, key: bytes) -> None:
    staging = directory / key.decode()
    staged = bulk.Import.create(staging)
    with staged.writer() as writer:
        writer.put(key, b"row")
        writer.put(key + b"\x00", b"row")
    staged.seal()
    bulk.ingest(store, staging)
