"""Writing parts: rows, batches and calls that a writer refuses, and the part that it leaves
behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk
from kvstore.bulk.sort import sorted_runs
from kvstore.bulk.staging import discard
from kvstore.errors import ClosedError, ImportRefusedError, KeyOrderError, StorageError, UsageError
from kvstore.limits import SCAN_CHUNK
from tests.bulk.staged import binary, stage

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_keys_out_of_order_are_refused_by_name(tmp_path: Path) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    writer = staged.writer()
    writer.put(b"b", b"")
    with pytest.raises(KeyOrderError) as caught:
        writer.write(pa.record_batch({"key": binary(b"c", b"a"), "value": binary(b"", b"")}))
    assert (caught.value.previous, caught.value.key) == (b"c", b"a")
    with pytest.raises(KeyOrderError, match="twice"):
        staged.writer().write(
            pa.record_batch({"key": binary(b"a", b"a"), "value": binary(b"", b"")})
        )


def test_a_part_that_holds_half_of_a_write_takes_no_more_and_does_not_finish(
    tmp_path: Path,
) -> None:
    """Its first and last key would differ from its record, and rows would lie outside its span."""
    staged = bulk.Import.create(tmp_path / "staged")
    writer = staged.writer()
    with pytest.raises(KeyOrderError):
        writer.write(pa.record_batch({"key": binary(b"b", b"a"), "value": binary(b"", b"")}))
    for go_on in (
        lambda: writer.put(b"c", b""),
        lambda: writer.write(pa.record_batch({"key": binary(b"c"), "value": binary(b"")})),
        writer.finish,
    ):
        with pytest.raises(UsageError, match="half of a write"):
            go_on()
    assert writer.is_closed
    assert staged.seal().parts == ()
    assert list((tmp_path / "staged").glob("part-*")) == []


@pytest.mark.parametrize("at", [1, SCAN_CHUNK - 1, SCAN_CHUNK, SCAN_CHUNK + 904])
def test_disorder_is_named_wherever_it_stands_in_a_batch(tmp_path: Path, at: int) -> None:
    """The writer takes the rows of a batch in chunks."""
    keys = [b"%08d" % number for number in range(2 * SCAN_CHUNK)]
    keys[at], previous = b"0", keys[at - 1]
    writer = bulk.Import.create(tmp_path / "staged").writer()
    with pytest.raises(KeyOrderError) as caught:
        writer.write(pa.record_batch({"key": binary(*keys), "value": binary(*keys)}))
    assert (caught.value.previous, caught.value.key) == (previous, b"0")
    with pytest.raises(UsageError, match="half of a write"):
        writer.finish()


def test_a_table_of_several_pieces_is_written_as_one_batch(
    store: kvstore.Store, tmp_path: Path
) -> None:
    keys = pa.chunked_array([binary(b"a"), binary(), binary(b"b", b"c\x00"), binary(b"d")])
    values = pa.chunked_array([binary(b"1", b"2"), pa.array([None, b"4"], pa.binary())])
    table = pa.table({"key": keys, "value": values, "op": ["put", "put", "delete", "put"]})
    store.put(b"c\x00", b"old")
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.write(table)
    staged.seal()
    bulk.ingest(store, tmp_path / "staged")
    assert list(store.scan()) == [(b"a", b"1"), (b"b", b"2"), (b"d", b"4")]

    disordered = pa.table({"key": [*keys.to_pylist(), b"a"], "value": [b"v"] * 5})
    pieces = pa.concat_tables([disordered.slice(0, 2), disordered.slice(2)])
    with pytest.raises(KeyOrderError) as caught:
        bulk.Import.create(tmp_path / "other").writer().write(pieces)
    assert (caught.value.previous, caught.value.key) == (b"d", b"a")


def test_a_single_row_that_is_refused_leaves_the_part_as_it_was(
    store: kvstore.Store, tmp_path: Path
) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.put(b"b", b"1")
        with pytest.raises(KeyOrderError):
            writer.put(b"a", b"2")
        writer.put(b"c", b"3")
    assert staged.seal().rows == 2
    bulk.ingest(store, tmp_path / "staged")
    assert dict(store.scan()) == {b"b": b"1", b"c": b"3"}


def test_a_value_no_store_would_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.bulk.part.VALUE_BYTES_MAX", 3)
    monkeypatch.setattr("kvstore.base.arguments.VALUE_BYTES_MAX", 3)
    writer = bulk.Import.create(tmp_path / "staged").writer()
    for add in (
        lambda: writer.put(b"a", b"1234"),
        lambda: writer.write(pa.record_batch({"key": binary(b"a"), "value": binary(b"1234")})),
    ):
        with pytest.raises(UsageError, match="4 bytes"):
            add()
    writer.put(b"a", b"123")


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_buffers_are_keys_and_values(store: kvstore.Store, tmp_path: Path, kind: type) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.put(kind(b"a\0"), kind(b"1"))
        writer.delete(kind(b"b"))
        with pytest.raises(UsageError, match="value must be bytes, not str"):
            writer.put(b"c", "text")  # type: ignore[arg-type]
    staged.seal()
    store.put(b"b", b"old")
    bulk.ingest(store, tmp_path / "staged")
    assert list(store.scan()) == [(b"a\0", b"1")]


def test_wrong_paths_and_ids_are_told_as_such(store: kvstore.Store, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(ImportRefusedError, match="not a directory"):
        bulk.ingest(store, file)
    with pytest.raises(UsageError, match="lies in a file"):
        bulk.Import.create(file / "staged")
    for wrong in ("7", True, 1.0, -1, 1 << 63):
        with pytest.raises(UsageError, match="ids are integers"):
            bulk.Import.create(tmp_path / "staged", import_id=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["put", "rows", "rows and put", "rows and rows"])
def test_a_delete_and_a_put_of_one_key_are_two_rows_of_it(tmp_path: Path, how: str) -> None:
    writer = bulk.Import.create(tmp_path / "staged").writer()
    ops = pa.array(["delete", "put"])
    both = pa.record_batch({"key": binary(b"b", b"b"), "value": binary(None, b"1"), "op": ops})
    row = pa.record_batch({"key": binary(b"b"), "value": binary(b"1")})
    if how == "put":
        writer.delete(b"b")
    elif how == "rows":
        writer.put(b"a", b"1")
    else:
        writer.write(both.slice(0, 1))
    again = {
        "put": lambda: writer.put(b"b", b"1"),
        "rows": lambda: writer.write(both),
        "rows and put": lambda: writer.put(b"b", b"1"),
        "rows and rows": lambda: writer.write(row),
    }
    with pytest.raises(KeyOrderError, match="key b'b' came twice"):
        again[how]()
    writer.put(b"c", b"2")
    part = writer.finish()
    assert part is not None
    assert part.rows == 2


@pytest.mark.parametrize(
    "batch",
    [
        pa.record_batch({"key": pa.array(["a"]), "value": binary(b"")}),
        pa.record_batch({"key": binary(b"a"), "value": pa.array([1])}),
        pa.record_batch({"key": binary(None), "value": binary(b"")}),
        pa.record_batch({"key": binary(b"a"), "value": binary(None)}),
        pa.record_batch({"key": binary(b"a")}),
        pa.record_batch({"key": binary(b"a"), "value": binary(b""), "op": pa.array(["upsert"])}),
        pa.record_batch(
            {"key": binary(b"a"), "value": binary(b""), "op": pa.nulls(1, pa.string())}
        ),
        pa.record_batch({"key": binary(b"a"), "value": binary(b""), "op": pa.array([1])}),
        pa.record_batch({"key": binary(b"a"), "value": binary(b""), "op": binary(b"\xff")}),
        pa.record_batch([binary(b"a"), binary(b""), binary(b"b")], names=["key", "value", "key"]),
        None,
    ],
    ids=[
        *("text key", "number value", "null key", "null value", "no value"),
        *("unknown op", "null op", "number op", "op that is no text", "two keys", "none"),
    ],
)
def test_batches_of_another_shape_are_refused(tmp_path: Path, batch: pa.RecordBatch) -> None:
    with pytest.raises(UsageError), bulk.Import.create(tmp_path / "staged").writer() as writer:
        writer.write(batch)
    assert list((tmp_path / "staged").iterdir()) == []


def test_a_sealed_or_foreign_directory_cannot_be_staged_into(tmp_path: Path) -> None:
    staged = stage(tmp_path / "staged", {b"a": b"1"})
    with pytest.raises(UsageError):
        bulk.Import.create(tmp_path / "staged")
    for too_late in (staged.seal, staged.writer):
        with pytest.raises(UsageError, match="sealed"):
            too_late()
    with pytest.raises(UsageError):
        bulk.Import.create(tmp_path / "other", import_id=0)


def test_a_directory_that_was_given_up_is_not_brought_back_by_who_still_writes(
    tmp_path: Path,
) -> None:
    """Tasks of a failed job continue to run for seconds."""
    staged = bulk.Import.create(tmp_path / "staged")
    late, begun = staged.writer(), staged.writer()
    begun.put(b"a", b"1")
    sorting = tmp_path / "staged" / "sorting"
    rows = [pa.record_batch({"key": binary(b"a"), "value": binary(b"1")})]
    sorted_runs(rows, sorting)
    discard(tmp_path / "staged")
    with pytest.raises(StorageError):
        late.put(b"b", b"")
    with pytest.raises(StorageError):
        begun.finish()
    with pytest.raises(StorageError):
        sorted_runs(rows, sorting)
    assert list(tmp_path.iterdir()) == []
    discard(tmp_path / "staged")  # a second process discards it too


def test_sealing_with_an_open_writer_and_writing_after_finish_are_refused(tmp_path: Path) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    writer = staged.writer()
    writer.put(b"a", b"")
    with pytest.raises(UsageError, match="open"):
        staged.seal()
    writer.finish()
    with pytest.raises(ClosedError):
        writer.put(b"b", b"")


_WRITTEN = """
import os, sys
from pathlib import Path
import pyarrow as pa
from kvstore import bulk

def most():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))

def write(name, mebibytes):
    made = bulk.Import.create(Path(sys.argv[1], name))
    values = pa.array([os.urandom(1 << 10) for _ in range(1 << 10)], pa.binary())
    with made.writer() as writer:
        for step in range(mebibytes):
            keys = pa.array([b"%04d%04d" % (step, row) for row in range(1 << 10)], pa.binary())
            writer.write(pa.record_batch({"key": keys, "value": values}))
    assert made.seal().rows == mebibytes << 10

write("small", 16)
before = most()
write("large", 160)
print(most() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_part_of_any_size_is_written_in_bounded_memory(tmp_path: Path) -> None:
    """A few stretches of a MiB for each thread, and the index: 0.3 % of the bytes."""
    command = [sys.executable, "-c", _WRITTEN, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(told) < 16 << 20
