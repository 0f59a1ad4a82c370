"""Options are honoured or refused, never ignored."""

from __future__ import annotations

import pytest

from kvstore import Span
from kvstore.errors import UsageError
from kvstore.spark.access import Access
from kvstore.spark.format_options import Mode, read_options
from kvstore.spark.read import offered


@pytest.mark.parametrize(
    ("mode", "options", "problem"),
    [
        ("state", {"versionOf": "1"}, "option 'versionof' is not known"),
        ("state", {"startingTimestamp": "1"}, "startingTimestamp means nothing to a read of the"),
        ("state", {"maxRowsPerTrigger": "1"}, "maxRowsPerTrigger means nothing to a read of the"),
        ("changes", {"timestampAsOf": "1"}, "timestampAsOf means nothing to a read of changes"),
        ("changes", {"failOnDataLoss": "true"}, "failOnDataLoss means nothing to a read of"),
        ("stream", {"endingTimestamp": "1"}, "endingTimestamp means nothing to a stream"),
        ("stream", {"filters": "[]"}, "filters means nothing to a stream"),
        ("state", {"timestampAsOf": "1", "versionAsOf": "1"}, "are both given"),
        ("changes", {"startingTimestamp": "1", "startingAfterTimestamp": "1"}, "both given"),
        ("stream", {"maxRowsPerTrigger": "1", "maxBytesPerTrigger": "1"}, "are both given"),
        ("state", {"timestampAsOf": "tomorrow"}, "timestampAsOf='tomorrow' is no time"),
        ("state", {"timestampAsOf": "2026-01-01T00:00:00"}, "is no time: it has no time zone"),
        ("state", {"prefix": "a", "startKey": "b"}, "a prefix goes without start and end"),
        ("state", {"startKey": "b", "endKey": "a"}, "empty span"),
        ("state", {"prefix": "xy", "keyEncoding": "hex"}, "prefix='xy' is not hex"),
        ("state", {"prefix": "x", "keyEncoding": "base64"}, "prefix='x' is not base64"),
        ("state", {"keyEncoding": "latin1", "prefix": "x"}, "keyEncoding='latin1'"),
        ("state", {"keyEncoding": "hex"}, "keyEncoding is given without a key"),
        ("state", {"numPartitions": "0"}, "numPartitions='0'"),
        ("state", {"batchRows": "many"}, "batchRows='many'"),
        ("changes", {"revisions": "newest"}, "revisions='newest'"),
        ("stream", {"failOnDataLoss": "no", "readChangeFeed": "true"}, "failOnDataLoss='no'"),
        ("stream", {}, "a stream reads changes"),
        ("state", {"paths": '["a","b"]'}, "several paths"),
        # `option("prefix", b"a")` becomes this text, and no key begins with it.
        ("state", {"prefix": str(b"a")}, "prefix=b'a' is bytes, and options are text"),
        ("changes", {"startKey": str(b"'")}, 'startKey=b"\'" is bytes'),
        ("stream", {"endKey": str(bytearray(b"\n")), "readChangeFeed": "true"}, "is bytes, and"),
    ],
)
def test_what_is_not_honoured_is_an_error(
    mode: Mode, options: dict[str, str], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        read_options({"path": "/somewhere", **options}, mode)


def test_missing_path_is_an_error() -> None:
    with pytest.raises(UsageError, match="no path"):
        read_options({}, "state")


def test_a_path_may_be_written_as_spark_writes_it() -> None:
    for text in ("/a b", "file:/a%20b", "file:///a%20b"):
        assert read_options({"path": text}, "state").access == Access("/a b")
        assert Access.of(text) == Access("/a b")


def test_times_are_nanoseconds_or_iso_text_and_names_ignore_case() -> None:
    assert read_options({"path": "p", "TIMESTAMPASOF": "17"}, "state").as_of == 17
    options = read_options({"path": "p", "timestampAsOf": "1970-01-01T00:00:01Z"}, "state")
    assert options.as_of == 1_000_000_000


def test_keys_are_text_hex_or_base64() -> None:
    for encoding, text in (("text", "ä"), ("hex", "c3a4"), ("base64", "w6Q=")):
        given = {"path": "p", "prefix": text, "keyEncoding": encoding}
        assert read_options(given, "state").spans == (Span.of_prefix("ä".encode()),)
    bounds = read_options({"path": "p", "startKey": "a", "endKey": "b"}, "state").spans
    assert bounds == (Span(b"a", b"b"),)


def test_ranges_are_prefixes_and_pairs_in_order_and_disjoint() -> None:
    text = '["b", ["k", null], ["a", "aa"], ["bz", "c"], ["z", "zz"]]'
    found = read_options({"path": "p", "ranges": text}, "state").spans
    assert found == (Span(b"a", b"aa"), Span(b"b", b"c"), Span(b"k"))
    given = {"path": "p", "ranges": '["6B"]', "keyEncoding": "hex"}
    assert read_options(given, "state").spans == (Span.of_prefix(b"k"),)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"ranges": "a"}, 'pass JSON, a list of 1 to 1000 prefixes or pairs: ["a", ["b", "c"]]'),
        ({"ranges": "[]"}, "pass JSON, a list"),
        ({"ranges": '"a"'}, "pass JSON, a list"),
        ({"ranges": "[" * 100_000}, "pass JSON, a list"),
        ({"ranges": str([0] * 1001)}, "pass JSON, a list"),
        ({"ranges": "[1]"}, "a range '1'; pass a prefix, or a pair"),
        ({"ranges": '[["a"]]'}, "pass a prefix, or a pair"),
        ({"ranges": '[["b", "a"]]'}, "empty span"),
        ({"ranges": "[\"b'a'\"]"}, "is bytes, and options are text"),
        ({"ranges": '["x"]', "keyEncoding": "hex"}, "ranges='x' is not hex"),
        ({"ranges": '["x"]', "prefix": "x"}, "pass ranges alone"),
        ({"ranges": '["x"]', "table": "t"}, "table and ranges are both given"),
    ],
)
def test_ranges_that_mean_nothing_are_refused(given: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError) as refusal:
        read_options({"path": "p", **given}, "state")
    assert told in str(refusal.value)
    with pytest.raises(UsageError, match="means nothing to a stream"):
        read_options({"path": "p", "readChangeFeed": "true", "ranges": '["x"]'}, "stream")


def test_columns_are_chosen_in_their_order_and_unknown_ones_refused() -> None:
    assert offered(changes=False, columns=["value", "key"]).names == ["value", "key"]
    for columns in (["key", "_change_type"], ["key", "key"], [""]):
        with pytest.raises(UsageError, match="pass some of key, value"):
            offered(changes=False, columns=columns)
