"""The check of change entries gives the answer of its oracle to any bytes."""

from __future__ import annotations

import struct
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvstore.changes.index import OP_DELETE, OP_DELETE_RANGE, OP_IMPORT, OP_PUT, RULES
from kvstore.errors import CorruptionError
from kvstore.loops.columns import survey
from tests.loops import blocks_oracle

known = st.sampled_from([OP_PUT, OP_DELETE, OP_DELETE_RANGE, OP_IMPORT])
offset = st.integers(-2, 12) | st.sampled_from([-(1 << 31), (1 << 31) - 1])
ascending = st.lists(st.integers(0, 12), min_size=1, max_size=5).map(lambda n: [0, *sorted(n)])


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, int, bool]:
    """Bodies that fit, nearly fit, and do not."""
    keys = draw(ascending)
    count = len(keys) - 1
    values = draw(st.just([0] * (count + 1)) | ascending.filter(lambda n: len(n) == count + 1))
    places = draw(
        st.none() | st.just(list(range(count))) | st.lists(offset, min_size=count, max_size=count)
    )
    ops = draw(
        st.binary(min_size=count, max_size=count)
        | st.lists(known, min_size=count, max_size=count).map(bytes)
    )
    data = draw(st.binary(min_size=keys[-1] + values[-1], max_size=keys[-1] + values[-1]))
    numbers = [*keys, *values, *(places or [])]
    if draw(st.booleans()):
        numbers[draw(st.integers(0, len(numbers) - 1))] = draw(offset)
    body = struct.pack(f"<{len(numbers)}i", *numbers) + data + ops
    if draw(st.booleans()):
        body = body[: draw(st.integers(0, len(body)))]
    return body, draw(st.just(count) | st.integers(-1, 1 << 33)), places is not None


def answer(call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except CorruptionError as error:
        return error.where, error.problem


@given(bodies())
def test_a_body_is_judged_alike(found: tuple[bytes, int, bool]) -> None:
    expected = answer(blocks_oracle.survey, *found, RULES, "here")
    assert answer(survey, *found, RULES, "here") == expected
    unaligned = memoryview(b"." + found[0])[1:]
    assert answer(survey, unaligned, *found[1:], RULES, "here") == expected
