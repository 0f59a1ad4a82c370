"""The JSON reader returns a value of the requested type, or raises `CorruptionError` with the
place."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.codec.json import JsonObject, read_object
from kvstore.errors import CorruptionError
from kvstore.limits import JSON_DEPTH_MAX
from tests.harness.traced import traced

REFUSED = {
    "nothing": b"",
    "cut short": b'{"a": 1',
    "two objects": b"{} {}",
    "a list": b"[1]",
    "a text": b'"a"',
    "null": b"null",
    "a name twice": b'{"a": 1, "b": {"c": 1, "c": 2}}',
    "a name twice by escapes": b'{"a": 1, "\\u0061": 2}',
    "NaN": b'{"a": NaN}',
    "infinity": b'{"a": [-Infinity]}',
    "a number beyond a double": b'{"a": 1e999}',
    "an integer of 5000 digits": b'{"a": ' + b"9" * 5000 + b"}",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"a": 1}',
    "broken UTF-8": b'{"a": "\xff"}',
    "a line break in a string": b'{"a": "\n"}',
    "deep lists": b'{"a": ' + b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "deep after a string of brackets": b'{"\\\\\\"]]": ' + b"[" * 65 + b"]" * 65 + b"}",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_strict_object_is_corruption(name: str) -> None:
    with pytest.raises(CorruptionError, match=r"^the record is damaged: ") as raised:
        read_object(REFUSED[name], where="the record")
    assert len(str(raised.value)) < 300


def test_depth_is_refused_where_the_stack_is_nearly_used_up() -> None:
    def at_depth(left: int) -> None:
        if left:
            at_depth(left - 1)
        else:
            read_object(REFUSED["deep lists"], where="the record")

    with pytest.raises(CorruptionError, match="nested deeper"):
        at_depth(sys.getrecursionlimit() // 2)


def test_brackets_in_strings_and_side_by_side_are_no_depth() -> None:
    fields = {"text": '"\\[{' * 1000, "lists": [[]] * 1000, "end": "\\"}
    assert read_object(json.dumps(fields).encode(), where="the record") == fields
    deepest = b'{"a":' * (JSON_DEPTH_MAX - 1) + b"{}" + b"}" * (JSON_DEPTH_MAX - 1)
    assert "a" in read_object(b" " * (3 << 20) + deepest, where="the record")
    with pytest.raises(CorruptionError, match="nested deeper"):
        read_object(b" " * (3 << 20) + b'{"a":' + deepest + b"}", where="the record")


@pytest.mark.traces_memory
def test_size_is_refused_before_parsing() -> None:
    data = b'{"a": [' + b"[]," * 1_000_000 + b"[]]}"
    says = "3000011 bytes of JSON, at most 1000 are read"
    with traced() as memory, pytest.raises(CorruptionError, match=says):
        read_object(data, where="the record", bytes_max=1000)
    assert memory.peak < 100_000


FIELDS = read_object(
    json.dumps(
        {
            "text": "a",
            "lone": "\ud800",
            "number": 7,
            "negative": -1,
            "large": 1 << 63,
            "real": 1.5,
            "yes": True,
            "none": None,
            "hex": "00ff",
            "capitals": "00FF",
            "spaces": "00 ff",
            "odd": "00f",
            "list": [1, "a"],
            "object": {"b": 1},
            "objects": [{"b": 1}, {"b": "c"}],
        }
    ).encode(),
    where="the record",
)

WRONG: dict[str, tuple[Callable[[JsonObject], object], str]] = {
    "missing": (lambda f: f.field("absent", int), "field 'absent' is missing"),
    "text for integer": (lambda f: f.integer("text"), "field 'text' holds 'a', not an integer"),
    "boolean for integer": (lambda f: f.integer("yes"), "holds True, not an integer"),
    "real for integer": (lambda f: f.integer("real"), "holds 1.5, not an integer"),
    "integer for boolean": (lambda f: f.field("number", bool), "holds 7, not true or false"),
    "null for text": (lambda f: f.text("none"), "holds None, not a text"),
    "lone surrogate": (lambda f: f.text("lone"), "not a text of whole characters"),
    "below": (lambda f: f.integer("negative"), "holds -1, not from 0 to"),
    "above": (lambda f: f.integer("large"), "holds 9223372036854775808, not from 0 to"),
    "optional of a wrong type": (lambda f: f.optional("text", int), "not an integer"),
    "optional out of bounds": (lambda f: f.optional_integer("negative"), "not from 0 to"),
    "capital hex": (lambda f: f.hexed("capitals"), "holds '00FF', not hexadecimal"),
    "hex with spaces": (lambda f: f.hexed("spaces"), "not hexadecimal"),
    "odd hex": (lambda f: f.hexed("odd"), "not hexadecimal"),
    "no hex": (lambda f: f.hexed("text"), "not hexadecimal"),
    "list for object": (lambda f: f.inner("list"), "holds a list of 2, not a dict"),
    "object for list": (lambda f: f.items_of("object", int), "holds a dict of 1, not a list"),
    "items": (lambda f: f.items_of("list", int), "not a list, each item an integer"),
    "items that are no objects": (lambda f: f.objects("list"), "not a list of objects"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_field_of_another_type_is_corruption(name: str) -> None:
    take, problem = WRONG[name]
    with pytest.raises(CorruptionError) as raised:
        take(FIELDS)
    assert raised.value.where == "the record"
    assert problem in raised.value.problem


def test_an_error_names_the_place_of_a_nested_object() -> None:
    with pytest.raises(CorruptionError) as raised:
        FIELDS.objects("objects")[1].integer("b")
    assert raised.value.where == "the record: objects[1]"
    with pytest.raises(CorruptionError) as raised:
        FIELDS.inner("object").text("b")
    assert raised.value.where == "the record: object"


def test_fields_are_what_was_written() -> None:
    assert FIELDS.text("text") == "a"
    assert FIELDS.integer("number") == 7
    assert FIELDS.integer("large", most=1 << 63) == 1 << 63
    assert FIELDS.integer("negative", least=-1) == -1
    assert FIELDS.field("yes", bool) is True
    assert FIELDS.optional("none", int) is None
    assert FIELDS.optional_integer("absent") is None
    assert FIELDS.hexed("hex") == b"\x00\xff"
    assert FIELDS.objects("objects")[0].integer("b") == 1
    assert isinstance(FIELDS, dict)
    assert json.loads(json.dumps(FIELDS)) == FIELDS


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=20,
)  # fmt: skip


@given(fields=st.dictionaries(TEXTS, VALUES, max_size=8), ascii_only=st.booleans())
def test_what_json_writes_is_read_back(fields: dict[str, object], ascii_only: bool) -> None:
    data = json.dumps(fields, ensure_ascii=ascii_only).encode()
    assert read_object(data, where="the record") == fields


NEARLY_JSON = st.text(alphabet='{}[]":,\\0ea ', max_size=200).map(str.encode)


@given(data=st.binary(max_size=200) | NEARLY_JSON)
def test_any_bytes_end_in_an_object_or_in_corruption(data: bytes) -> None:
    try:
        found = read_object(data, where="the record")
    except CorruptionError:
        return
    assert json.loads(data) == found
