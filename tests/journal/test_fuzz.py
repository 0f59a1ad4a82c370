"""The decoder on bytes that no writer wrote: random, mutated, spliced."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.storage.journal.framing import (
    KIND_JOURNAL,
    PAIR,
    Opening,
    Record,
    encode,
    encode_opening,
    encode_seal,
    stuff,
)
from tests.journal.fuzz_decoder import scan_anything

PIECES = st.lists(
    st.binary(max_size=40)
    | st.sampled_from([PAIR, b"\xfe", b"\xfd", bytes(4), stuff(b"x" * 29), b"\x1d"]),
    max_size=20,
).map(b"".join)


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, list[Record]]:
    """A file as a writer leaves it, with its records."""
    payloads = draw(st.lists(PIECES | st.sampled_from([b"", b"y" * 64300]), max_size=6))
    incarnation = 7 << 32
    records = [
        Record(ordinal, ordinal % 3, payload, incarnation + ordinal // 2)
        for ordinal, payload in enumerate(payloads, 1)
    ]
    parts = [encode_opening(incarnation, 1, Opening(KIND_JOURNAL, "fuzz"))]
    parts += [encode(r.incarnation, r.ordinal, r.type, r.payload) for r in records]
    if draw(st.booleans()):
        parts.append(encode_seal(incarnation + 9, len(records) + 1, records=len(records)))
    return b"".join(parts), records


@st.composite
def mutated(draw: st.DrawFn) -> tuple[bytes, list[Record]]:
    """A file of a writer with a few places cut out, overwritten, doubled or flipped."""
    data, records = draw(files())
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        size = draw(st.integers(0, 80))
        piece = data[at : at + size]
        change = draw(st.sampled_from(["cut", "double", "write", "flip", "tail"]))
        if change == "tail":
            data = data[:at]
            continue
        flipped = bytes((piece[0] ^ (1 << draw(st.integers(0, 7))),)) if piece else b""
        new = {"cut": b"", "double": piece * 2, "write": draw(PIECES), "flip": flipped}[change]
        data = data[:at] + new + data[at + (1 if change == "flip" else size) :]
    return data, records


def check_mutated(case: tuple[bytes, list[Record]], *, live: bool) -> None:
    data, records = case
    assert set(scan_anything(data, live=live)) <= set(records)


def test_an_unharmed_file_gives_exactly_its_records() -> None:
    @given(files())
    def check(case: tuple[bytes, list[Record]]) -> None:
        assert scan_anything(case[0], live=True) == case[1]

    check()


@given(PIECES, st.booleans())
def test_no_bytes_break_the_decoder(data: bytes, live: bool) -> None:
    scan_anything(data, live=live)


@given(mutated(), st.booleans())
def test_no_mutation_makes_a_record_up(case: tuple[bytes, list[Record]], live: bool) -> None:
    check_mutated(case, live=live)


@pytest.mark.soak
@settings(max_examples=20_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutated(), st.booleans())
def test_soak_no_mutation_makes_a_record_up(case: tuple[bytes, list[Record]], live: bool) -> None:
    check_mutated(case, live=live)


@pytest.mark.soak
@settings(max_examples=50_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(PIECES, st.booleans())
def test_soak_no_bytes_break_the_decoder(data: bytes, live: bool) -> None:
    scan_anything(data, live=live)
