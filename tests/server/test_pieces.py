"""Answers to many keys in pieces: each once, in order, and without many vain tries."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from kvstore.remote.server.verbs.reads import in_pieces
from tests.harness.bounds import bounds

FIT = 1000
sizes = st.lists(st.sampled_from([0, 1, 100, FIT, 3 * FIT]), max_size=300)


@given(sizes, st.integers(1, 50), st.integers(1, 400))
def test_pieces_answer_each_key_once_and_prepare_few_keys_again(
    drawn: list[int], rows_first: int, rows_max: int
) -> None:
    prepared = 0

    def answer(start: int, end: int) -> pa.RecordBatch | None:
        nonlocal prepared
        prepared += end - start
        values = [bytes(size) for size in drawn[start:end]]
        if len(values) > 1 and sum(map(len, values)) > FIT:
            return None
        return pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary())})

    with bounds(ARROW_BYTES_MAX=FIT):
        pieces = list(in_pieces(answer, len(drawn), rows_first=rows_first, rows_max=rows_max))
    assert [len(value.as_py()) for piece in pieces for value in piece.column(0)] == drawn
    assert all(0 < piece.num_rows <= rows_max for piece in pieces)
    # A piece has at most twice as many keys as the one before; each try in vain halves that.
    assert prepared <= 5 * len(drawn) + 2 * rows_first
