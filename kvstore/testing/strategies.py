"""Draws of random tests: few keys, all of them awkward, so that histories collide."""

from __future__ import annotations

from hypothesis import strategies as st

KEYS = [
    b"",
    b"\x00",
    b"\x00\x00",
    b"\x00\x01",
    b"\x00\xff",
    b"\x01",
    b"a",
    b"a\x00",
    b"a\x00\x01",
    b"a\x01",
    b"ab",
    b"b",
    b"\xff",
    b"\xff\xff",
]
"""Keys that are prefixes of each other, and bytes of escapes and terminators."""

keys = st.sampled_from(KEYS)
values = st.sampled_from([b"", b"\x00", b"1", b"2", b"3", b"large" * 300])
"""Values. The last one is too large to travel in the change index."""

spans = st.lists(keys, min_size=2, max_size=2, unique=True).map(sorted)
bounds = st.one_of(
    st.just((b"", None)), spans.map(tuple), keys.map(lambda key: (key, None)), spans.map(tuple)
)
"""`start, end` of a read."""

ops = st.lists(
    st.one_of(
        st.tuples(st.just("put"), keys, values),
        st.tuples(st.just("delete"), keys, st.none()),
        spans.map(lambda span: ("delete_range", *span)),
    ),
    min_size=1,
    max_size=8,
)
"""Writes of one batch."""

rows = st.dictionaries(keys, st.one_of(values, st.none()), min_size=1, max_size=8)
"""Rows of one import; None deletes."""
