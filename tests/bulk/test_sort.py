"""Sorting in bounded memory gives the same rows as sorting in memory, however small the bound
is."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.base.span import Span
from kvstore.bulk.sort import cuts, merged, sorted_batches, sorted_runs
from kvstore.errors import CorruptionError, StorageError, UsageError

Rows = list[tuple[bytes, bytes]]

SCHEMA = pa.schema([("key", pa.binary()), ("value", pa.binary())])


def batch(rows: Rows) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"key": k, "value": v} for k, v in rows], schema=SCHEMA)


def rows_of(batches: Iterable[pa.RecordBatch]) -> Rows:
    return [(row["key"], row["value"]) for part in batches for row in part.to_pylist()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.tuples(st.binary(max_size=2), st.binary(max_size=3)), max_size=9)),
    st.sampled_from([1, 60, 200, 1 << 20]),
    st.sampled_from(["error", "last"]),
)
def test_rows_come_out_sorted_and_in_order_of_arrival_within_a_key(
    tmp_path: Path, parts: list[Rows], bytes_max: int, duplicates: str
) -> None:
    arrived = [row for part in parts for row in part]
    expected = sorted(arrived, key=lambda row: row[0])
    if duplicates == "last":
        expected = sorted(dict(arrived).items())
    found = sorted_batches(
        map(batch, parts),
        tmp_path,
        duplicates=duplicates,  # type: ignore[arg-type]
        bytes_max=bytes_max,
    )
    assert rows_of(found) == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.sampled_from([2000, 1 << 20]), st.booleans())
def test_batches_that_ascend_or_cross_are_sorted_as_all_rows_at_once(
    tmp_path: Path, pick: random.Random, bytes_max: int, is_last: bool
) -> None:
    """Rows of a table and entries of its indexes: each kind has a beginning of its own, and keys
    that differ far behind it, or end with zeros."""
    arrived: list[Rows] = []
    parts = [b"\0\0\0\0", b"a", b"\0", b"bbbbbbbb"]
    for number in range(pick.randrange(1, 12)):
        start = pick.choice([b"row", b"index", b""]) + b"\0" * pick.randrange(3)
        keys = [
            start + b"".join(pick.choices(parts, k=pick.randrange(9)))
            for _ in range(pick.randrange(12))
        ]
        ordered = sorted(set(keys)) if pick.random() < 0.6 else keys
        arrived.append([(key, b"%d" % number) for key in ordered])
    rows = [row for part in arrived for row in part]
    expected = sorted(dict(rows).items()) if is_last else sorted(rows, key=lambda row: row[0])
    found = sorted_batches(
        map(batch, arrived),
        tmp_path,
        duplicates="last" if is_last else "error",
        bytes_max=bytes_max,
    )
    assert rows_of(found) == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.tuples(st.binary(max_size=2), st.binary(max_size=3)), max_size=9)),
    st.sampled_from([1, 60, 1 << 20]),
    st.integers(1, 5),
)
def test_runs_of_several_writers_merge_into_pieces_that_hold_each_row_once_in_order(
    tmp_path: Path, writers: list[Rows], bytes_max: int, count: int
) -> None:
    runs = [
        run for rows in writers for run in sorted_runs([batch(rows)], tmp_path, bytes_max=bytes_max)
    ]
    borders = cuts(runs, count)
    assert len(borders) < count
    assert borders == sorted(set(borders))
    spans = [Span(a, b) for a, b in pairwise([b"", *borders, None])]  # type: ignore[arg-type]
    pieces = [rows_of(merged(runs, span, bytes_max=bytes_max)) for span in spans]
    for span, piece in zip(spans, pieces, strict=True):
        assert all(key in span for key, _ in piece)
    expected = sorted((row for rows in writers for row in rows), key=lambda row: row[0])
    assert [row for piece in pieces for row in piece] == expected


def test_pieces_of_runs_are_about_even_whatever_the_runs_hold(tmp_path: Path) -> None:
    """One writer has all low keys, and ten times as many rows as each other writer."""
    low = [(b"a%06d" % n, b"v") for n in range(20_000)]
    others = [[(b"%c%06d" % (98 + k, n), b"v") for n in range(2_000)] for k in range(5)]
    runs = [run for rows in (low, *others) for run in sorted_runs([batch(rows)], tmp_path)]
    spans = [Span(a, b) for a, b in pairwise([b"", *cuts(runs, 6), None])]  # type: ignore[arg-type]
    sizes = [len(rows_of(merged(runs, span))) for span in spans]
    assert sizes == pytest.approx([5000] * 6, rel=0.1)


@given(
    st.binary(max_size=9),
    st.lists(st.binary(max_size=12) | st.integers(0, 3).map(bytes), max_size=60),
    st.integers(0, 3),
)
def test_keys_with_a_common_beginning_and_of_any_length_are_ordered_as_bytes(
    tmp_path_factory: pytest.TempPathFactory, common: bytes, ends: list[bytes], skipped: int
) -> None:
    arrived = [(common + end, b"%d" % place) for place, end in enumerate(ends)]
    whole = batch([(b"skipped", b"")] * skipped + arrived)
    found = sorted_batches([whole.slice(skipped)], tmp_path_factory.getbasetemp())
    assert rows_of(found) == sorted(arrived, key=lambda row: row[0])


def test_what_does_not_fit_goes_to_disk_and_ranges_stay_small(tmp_path: Path) -> None:
    pick = random.Random(3)
    rows = [(pick.randbytes(8), b"v" * 92) for _ in range(20_000)]
    pick.shuffle(rows)
    parts = [batch(rows[at : at + 500]) for at in range(0, len(rows), 500)]
    bytes_max = 200_000
    found = list(sorted_batches(parts, tmp_path, bytes_max=bytes_max))
    assert rows_of(found) == sorted(rows)
    assert len(list(tmp_path.glob("run-*.arrow"))) >= 10
    assert max(part.nbytes for part in found) < bytes_max


def test_a_flipped_bit_or_a_lost_end_of_a_run_is_noticed(tmp_path: Path) -> None:
    pick = random.Random(4)
    rows = sorted((pick.randbytes(8), pick.randbytes(300)) for _ in range(10_000))
    (run,) = sorted_runs([batch(rows)], tmp_path)
    assert len(run.blocks) > 2
    file = Path(run.path)
    whole = file.read_bytes()
    for at in [0, len(whole) - 1, *(pick.randrange(len(whole)) for _ in range(30))]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << pick.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(CorruptionError, match="fails its checksum"):
            list(merged([run], Span()))
    file.write_bytes(whole[:-1])
    with pytest.raises(CorruptionError):
        list(merged([run], Span()))
    file.write_bytes(whole)
    assert rows_of(merged([run], Span())) == rows


def test_a_span_reads_only_the_blocks_it_needs(tmp_path: Path) -> None:
    rows = [(b"%06d" % n, bytes(300)) for n in range(20_000)]
    (run,) = sorted_runs([batch(rows)], tmp_path)
    second, third = (block.first for block in run.blocks[1:3])
    damaged = bytearray(Path(run.path).read_bytes())
    damaged[run.blocks[0].offset] ^= 1
    damaged[run.blocks[3].offset] ^= 1
    Path(run.path).write_bytes(damaged)
    found = rows_of(merged([run], Span(second + b"\0", third + b"\0")))
    assert found == [row for row in rows if second < row[0] <= third]


def test_an_unknown_rule_for_duplicates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        list(sorted_batches([], tmp_path, duplicates="first"))  # type: ignore[arg-type]


@pytest.mark.parametrize("left", ["nothing", "a directory", "an empty file"])
def test_a_run_that_is_gone_is_told_as_such(tmp_path: Path, left: str) -> None:
    """The job that made the run was given up meanwhile."""
    rows = [pa.record_batch({"key": pa.array([b"a"]), "value": pa.array([b"1"])})]
    (run,) = sorted_runs(rows, tmp_path / "runs")
    Path(run.path).unlink()
    if left == "a directory":
        Path(run.path).mkdir()
    elif left == "an empty file":
        Path(run.path).touch()
    expected = CorruptionError if left == "an empty file" else StorageError
    with pytest.raises(expected, match=run.path):
        list(merged([run], Span()))


def test_a_run_whose_offsets_lead_out_of_it_is_damaged(tmp_path: Path) -> None:
    (run,) = sorted_runs([batch([(b"%03d" % number, b"v") for number in range(100)])], tmp_path)
    whole = bytearray(Path(run.path).read_bytes())
    offsets = whole.index(b"".join((3 * at).to_bytes(4, "little") for at in range(9)))
    whole[offsets + 4 : offsets + 8] = (1 << 30).to_bytes(4, "little")
    Path(run.path).write_bytes(whole)
    (block,) = run.blocks
    forged = run._replace(blocks=[block._replace(crc=crc32(whole))])
    with pytest.raises(CorruptionError, match="no record batch"):
        list(merged([forged], Span()))
