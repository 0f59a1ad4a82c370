"""Spans contain the keys between their bounds, and an empty span cannot be made."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstore.base.span import Span, prefix_end, require_key
from kvstore.errors import UsageError
from kvstore.limits import KEY_BYTES_MAX

# Few bytes and short keys, so that borders meet often.
keys = st.lists(st.sampled_from([0x00, 0x01, 0x61, 0xFE, 0xFF]), max_size=4).map(bytes)
ends = st.none() | keys


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start, end = draw(keys), draw(ends)
    assume(end is None or start < end)
    return Span(start, end)


@given(spans(), keys)
def test_start_is_inside_and_end_is_not(span: Span, key: bytes) -> None:
    assert span.start in span
    assert span.end is None or span.end not in span
    assert (key in span) == (key >= span.start and (span.end is None or key < span.end))


@given(keys, keys)
def test_prefix_holds_exactly_the_keys_that_begin_with_it(prefix: bytes, key: bytes) -> None:
    assert (key in Span.of_prefix(prefix)) == key.startswith(prefix)


@given(keys)
def test_prefix_end_is_the_least_key_above(prefix: bytes) -> None:
    end = prefix_end(prefix)
    if end is None:
        assert prefix.rstrip(b"\xff") == b""
    else:
        assert prefix + b"\xff" * 9 < end
        assert not end.startswith(prefix)


@given(keys, keys)
def test_span_of_a_key_holds_only_this_key(key: bytes, other: bytes) -> None:
    assert (other in Span.of_key(key)) == (other == key)


@given(spans(), keys, ends, keys)
def test_intersection_holds_what_both_hold(
    span: Span, start: bytes, end: bytes | None, key: bytes
) -> None:
    shared = span.intersect(start, end)
    in_both = key in span and start <= key and (end is None or key < end)
    assert (shared is not None and key in shared) == in_both


@given(keys, keys)
def test_empty_span_is_refused(one: bytes, other: bytes) -> None:
    with pytest.raises(UsageError, match="empty span"):
        Span(max(one, other), min(one, other))


def test_default_is_every_key() -> None:
    assert Span.of() == Span() == Span.of_prefix(b"") == Span(b"", None)
    assert b"" in Span()
    assert b"\xff" * 100 in Span()


def test_prefix_goes_without_bounds() -> None:
    assert Span.of(prefix=b"a") == Span(b"a", b"b") == Span.of(b"a", b"b")
    for bounds in ({"start": b"a"}, {"end": b"b"}, {"start": b""}):
        with pytest.raises(UsageError, match="prefix goes without"):
            Span.of(prefix=b"a", **bounds)


def test_longest_key_can_be_named_alone_and_a_longer_one_is_refused() -> None:
    longest = b"k" * KEY_BYTES_MAX
    assert require_key(longest) is longest
    assert longest in Span.of_key(longest)
    for make in (require_key, Span.of_key, Span.of_prefix):
        with pytest.raises(UsageError, match="65537 bytes, at most 65536"):
            make(longest + b"k")
    with pytest.raises(UsageError, match="end has 65538 bytes, at most 65537"):
        Span(b"", longest + b"kk")


@pytest.mark.parametrize("key", ["text", 7, None, array("b", b"k")])
def test_key_of_another_type_is_refused_by_name(key: object) -> None:
    for make in (require_key, Span.of_key, Span.of_prefix, Span):
        with pytest.raises(UsageError, match=f"must be bytes, not {type(key).__name__}"):
            make(key)  # type: ignore[operator]
