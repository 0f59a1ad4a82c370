"""The arguments of verbs: what each may be, declared once for client, server and OpenAPI document.

A `Parameter` makes JSON of what a caller of a client passes, and reads an argument out of JSON, or
out of a query, where it is bytes. It has the schemas (JSON Schema, as OpenAPI 3.1 has it) of the
values that it reads. So the server refuses what the document excludes, takes what the document
names, and a client refuses a wrong argument before it travels.

Invariants
1. A null is no value: an argument is left out instead, unless its kind says otherwise.
2. A number in JSON that is whole is an integer, as in JSON Schema, also where it is written as
   `5.0`; above 2**53 it must be written as an integer, because a float would be another number.
"""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from kvstore.base import arguments
from kvstore.base.arguments import AGE, INTEGER, SECONDS, ArgumentKind, require_value
from kvstore.base.span import require_key
from kvstore.base.timestamp import (
    ACCEPTED,
    NOW,
    OLDEST,
    OTHER_UNITS_MAX,
    TIMESTAMP_MAX,
    TimeLike,
    Timestamp,
    ahead_of,
    counts_from_now,
    is_count,
    is_oldest,
    to_timestamp,
)
from kvstore.errors import Argument, UsageError
from kvstore.limits import KEY_BYTES_MAX
from kvstore.remote.protocol import from_json, to_json
from kvstore.timeline.expiries import Expires, sent_expiry

Schema = Mapping[str, Any]
Read = Callable[[Any, str], Any]

_FLOAT_EXACT_MAX: Final = 1 << 53
_SECONDS_MAX: Final = timedelta.max.total_seconds()
_INTEGER: Final = re.compile(rb"-?[0-9]{1,19}")
_NUMBER: Final = re.compile(rb"[0-9]{1,19}(\.[0-9]{1,19})?")


@dataclass(frozen=True, slots=True)
class Parameter:
    """What an argument of a verb may be. `of_json` and `of_query` return its value, `of_caller` its
    JSON; or they raise `UsageError` that calls the argument by its name."""

    schema: Schema
    of_json: Read
    of_query: Read
    hint: str
    """What to pass, for a caller that has left it out."""
    query_schema: Schema | None = None
    """The schema in a query, where it is another one; empty for what cannot travel there."""
    is_required: bool = False
    is_nullable: bool = False
    is_rows: bool = False
    """Whether an Arrow stream of the request takes its place."""
    of_caller: Read | None = None
    """What a caller of a client passes, as JSON; None where both are the same."""

    @property
    def required(self) -> Parameter:
        """The same, which a call must have."""
        return replace(self, is_required=True)

    @property
    def or_null(self) -> Parameter:
        """The same, or null."""
        return replace(self, is_nullable=True)

    @property
    def or_rows(self) -> Parameter:
        """The same, which a call must have as JSON, unless it brings an Arrow stream."""
        return replace(self, is_required=True, is_rows=True)

    @property
    def json_schema(self) -> Schema:
        """The schema of the argument in JSON."""
        return {"oneOf": [self.schema, {"type": "null"}]} if self.is_nullable else self.schema

    def but(self, hint: str) -> Parameter:
        """The same, with another hint."""
        return replace(self, hint=hint)

    def sent(self, found: Any, name: str) -> Any:
        """The JSON of what a caller of a client passes."""
        if found is None and self.is_nullable:
            return None
        return (self.of_caller or self.of_json)(found, name)

    def read(self, found: Any, name: str) -> Any:
        """The value of the argument, whichever way it came."""
        if type(found) is bytes:
            return self.of_query(found, name)
        if found is None:
            if self.is_nullable:
                return None
            raise UsageError((Argument(name), " is null"), "leave it out, or pass a value")
        return self.of_json(found, name)


# -- bytes and texts ---------------------------------------------------------------------------

BASE64_SCHEMA: Final[Schema] = {
    "type": "object",
    "properties": {
        "base64": {
            "type": "string",
            "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
        }
    },
    "required": ["base64"],
    "additionalProperties": False,
}
"""Bytes that are no UTF-8."""


def _bytes_kind(what: str, require: Read, most: int | None = None) -> Parameter:
    """Bytes. `require` returns those that a caller passes."""
    bound = {} if most is None else {"maxLength": most}  # ASCII: others take more bytes each
    plain = {"type": "string", **bound}

    def of_json(found: Any, name: str) -> bytes:
        return _short(from_json(found, name=name), name)

    def _short(found: bytes, name: str) -> bytes:
        if most is not None and len(found) > most:
            raise UsageError(
                (Argument(name), f" has {len(found)} bytes, at most {most}"), "shorten it"
            )
        return found

    return Parameter(
        {"description": f"{what}: text, or base64", "oneOf": [plain, BASE64_SCHEMA]},
        of_json,
        _short,
        "pass bytes",
        {"description": f"{what}: its bytes, percent-encoded", **plain},
        of_caller=lambda found, name: to_json(require(found, name)),
    )


KEY: Final = _bytes_kind(
    "a key", lambda found, name: require_key(found, name=name), KEY_BYTES_MAX
).but("pass a key")
BOUND: Final = _bytes_kind(
    "a bound of keys", lambda found, name: require_key(found, name=name, room=1), KEY_BYTES_MAX + 1
)
"""A bound may lie just above the longest key."""
VALUE: Final = _bytes_kind("a value", lambda found, name: require_value(found, name=name)).but(
    "pass the value, or delete the key"
)
SPAN: Final[Mapping[str, Parameter]] = {"start": BOUND, "end": BOUND, "prefix": KEY}
"""The arguments of a span: its bounds, or the prefix of its keys. All keys where all are left
out."""


def _of_texts(kind: ArgumentKind[Any]) -> Parameter:
    """A kind whose values travel as text."""

    def of_json(found: Any, name: str) -> Any:
        return kind.check(name, found)

    def of_query(found: bytes, name: str) -> Any:
        return kind.check(name, _decoded(found, name))

    return Parameter(kind.schema, of_json, of_query, kind.hint)


def text(
    least: int = 0, most: int | None = None, *, pattern: str = "", hint: str = ""
) -> Parameter:
    """A text of `least` to `most` characters, that matches `pattern` from end to end."""
    return _of_texts(arguments.text(least, most, pattern=pattern, hint=hint))


TEXT: Final = text()
NAME: Final = text(1, hint="pass a name")


def word(words: Sequence[str]) -> Parameter:
    """One of the words."""
    return _of_texts(arguments.word(*words))


_FLAG: Final = replace(arguments.FLAG, hint="pass true or false")


def _flag(found: Any, name: str) -> bool:
    return _FLAG.check(name, found)


def _flag_of_query(found: bytes, name: str) -> bool:
    return _flag({b"true": True, b"false": False}.get(found, found), name)


FLAG: Final = Parameter(_FLAG.schema, _flag, _flag_of_query, _FLAG.hint)

# -- numbers -----------------------------------------------------------------------------------


def _of_numbers(
    kind: ArgumentKind[Any],
    of_caller: ArgumentKind[Any],
    written: re.Pattern[bytes],
    number: Callable[[bytes], float],
) -> Parameter:
    """A kind of numbers. In a query, those are `written` in digits. `of_caller` is what a caller
    of a client may pass in general: another value is refused in its words."""

    def of_json(found: Any, name: str) -> Any:
        return kind.check(name, _whole(found))

    def of_query(found: bytes, name: str) -> Any:
        is_number = written.fullmatch(found) is not None
        return kind.check(name, number(found) if is_number else found[:100])

    def sent(found: Any, name: str) -> Any:
        return kind.check(name, of_caller.check(name, found))

    return Parameter(kind.schema, of_json, of_query, kind.hint, of_caller=sent)


def integer(least: int, most: int, *, hint: str = "") -> Parameter:
    """An integer from `least` to `most`."""
    hint = hint or f"pass an integer from {least} to {most}"
    return _of_numbers(arguments.integer(least, most, hint=hint), INTEGER, _INTEGER, int)


def count(least: int = 0, most: int = sys.maxsize) -> Parameter:
    """A number of things."""
    return integer(least, most, hint=f"pass a count from {least} to {most}")


def seconds(most: float = _SECONDS_MAX, *, above: float | None = None) -> Parameter:
    """A duration in seconds, at most `most`, and above `above` if it is given."""
    return _of_numbers(arguments.seconds(most, above=above), SECONDS, _NUMBER, float)


def age() -> Parameter:
    """A duration in seconds, which a caller of a client passes as a timedelta."""

    def of_caller(found: Any, name: str) -> float:
        age = AGE.or_none.check(name, found)
        assert age is not None, "None is left out"
        return age.total_seconds()

    return replace(seconds(), of_caller=of_caller)


# -- times -------------------------------------------------------------------------------------

TIME_FORMAT: Final = "kvstore-time"
"""The format of texts that name times: ISO-8601 with a zone, or a word that counts from now."""
DUE_FORMAT: Final = "kvstore-due-time"
"""The same, for times that lie ahead."""
_UNIT: Final = "(us|ms|[smhdw]|(microsecond|millisecond|second|minute|hour|day|week)s?)"
_AGO: Final = f"now|today|yesterday|-[0-9]{{1,18}}(us|ms|[smhdw])|([0-9]{{1,18}}|an?) ?{_UNIT} ago"
_AHEAD: Final = rf"\+?[0-9]{{1,18}} ?{_UNIT}"
_DAY: Final = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_CLOCK: Final = "[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.,][0-9]{1,9})?)?"
_ISO: Final = (
    rf"{_DAY}((Z|UTC|[+-][0-9]{{2}}:?[0-9]{{2}})?|{_CLOCK}(Z|UTC|[+-][0-9]{{2}}(:?[0-9]{{2}})?))"
)
_FEW_DIGITS: Final = "[0-9]{1,9}"
_OTHER_UNITS: Final = tuple((10**9 * size, 253_402_300_800 * size - 1) for size in (1, 1000, 10**6))
"""Numbers that count seconds, milliseconds or microseconds by mistake: the store refuses them."""


def _plain_times() -> list[Schema]:
    """The schemas of times as numbers."""
    found: list[Schema] = []
    least = 0
    for first, last in _OTHER_UNITS:
        found.append({"type": "integer", "minimum": least, "maximum": first - 1})
        least = last + 1
    return [*found, {"type": "integer", "minimum": least, "maximum": TIMESTAMP_MAX}]


def _time(what: str, words: Sequence[str] = (), *, ahead: bool = False) -> Parameter:
    pattern = f"^({_AHEAD if ahead else _AGO}|{_ISO}|{_FEW_DIGITS})$"
    form = {
        "type": "string",
        "format": DUE_FORMAT if ahead else TIME_FORMAT,
        "pattern": pattern,
    }
    ways: list[Schema] = [*_plain_times(), form]
    if words:
        ways.append({"type": "string", "enum": list(words)})
    accepted = f"{ACCEPTED}{'; +1h counts from now' if ahead else ''}"
    schema = {"description": ", or ".join([f"{what}: {accepted}", *words]), "anyOf": ways}

    def of_text(found: str, name: str) -> str:
        is_word = found in words or (
            ahead_of(found) is not None if ahead else counts_from_now(found)
        )
        if not is_word and not (OLDEST in words and is_oldest(found)):
            to_timestamp(found, name=name)  # the store says whether it is of another unit
        return found

    def of_json(found: Any, name: str) -> int | str:
        if type(found) is str:
            return of_text(found, name)
        found = _whole(found)
        if type(found) is not int or not 0 <= found <= TIMESTAMP_MAX:
            raise UsageError(
                (Argument.of(name, found), " must be nanoseconds or ISO-8601"),
                "pass an integer of 63 bits, or a text",
            )
        return found

    def of_query(found: bytes, name: str) -> int | str:
        is_number = _INTEGER.fullmatch(found) is not None
        return of_json(int(found) if is_number else _decoded(found, name), name)

    def of_caller(found: Any, name: str) -> int | str:
        if type(found) is str and found in words:
            return found
        if OLDEST in words and is_oldest(found):
            return OLDEST
        return _sent_expiry(found, name) if ahead else sent_time(found, name)

    return Parameter(schema, of_json, of_query, "pass a time", of_caller=of_caller)


def sent_time(time: TimeLike, name: str) -> int | str:
    """A time as the server reads it: a number, or a word, which counts from the server's time."""
    if isinstance(time, timedelta):
        # The instant is the check: the age lies within the timeline, and not ahead.
        age = TIMESTAMP_MAX - to_timestamp(time, name=name, now=lambda: TIMESTAMP_MAX)
        return f"-{age // 1000}us"
    if counts_from_now(time):
        return str(time)
    at = to_timestamp(time, name=name)
    if at > OTHER_UNITS_MAX or is_count(time):
        return int(at)
    return str(at)  # a small number would be refused: it may count seconds


def _sent_expiry(expires: Expires, name: str) -> int | str:
    sent = sent_expiry(expires)
    return f"+{-sent // 1000}us" if sent < 0 else sent_time(Timestamp(sent), name)


def time_or(*words: str) -> Parameter:
    """A time, or one of the words."""
    return _time("a time", [each for each in words if each != NOW])


TIME: Final = _time("a time")
START: Final = time_or(OLDEST).but("pass a time; 0 for all changes")
EXPIRY: Final = _time("the time at which the key is deleted", ahead=True)


# -- texts of their own format -------------------------------------------------------------------

DEFINITION_FORMAT: Final = "kvstore-definition"
"""The format of a definition of a table: see `docs/reference/formats.md`."""


def json_text(format_: str, what: str) -> Parameter:
    """A text that is a JSON object: the verb reads it."""
    kind = text(2, pattern=r"\{[\s\S]*\}", hint=f"pass {what} as JSON, in a text")
    more = {"contentMediaType": "application/json", "format": format_, "description": what}
    return replace(kind, schema={**kind.schema, **more})


# -- lists ---------------------------------------------------------------------------------------


def list_of(kind: Parameter, *, least: int = 0) -> Parameter:
    """A list of values of a kind. It travels as JSON alone."""
    schema: dict[str, Any] = {"type": "array", "items": kind.schema}
    if least:
        schema["minItems"] = least
    hint = "pass a list as JSON, or an Arrow stream"

    def of_json(found: Any, name: str) -> list[Any]:
        if type(found) is not list or len(found) < least:
            raise UsageError((Argument(name), " must be a list"), hint)
        return [kind.read(each, f"{name}[{number}]") for number, each in enumerate(found)]

    def of_caller(found: Any, name: str) -> list[Any]:
        if isinstance(found, str | bytes) or not isinstance(found, Iterable):
            raise UsageError((Argument(name), " must be a list"), hint)
        return [kind.sent(each, f"{name}[{number}]") for number, each in enumerate(found)]

    return Parameter(schema, of_json, _no_query, hint, {}, of_caller=of_caller)


def one_or_many(kind: Parameter) -> Parameter:
    """A value of a kind, or a list of them."""
    many = list_of(kind)

    def of_json(found: Any, name: str) -> Any:
        return (many if type(found) is list else kind).of_json(found, name)

    schema = {"anyOf": [kind.schema, many.schema]}
    return Parameter(
        schema, of_json, kind.of_query, kind.hint, kind.schema, of_caller=kind.of_caller
    )


def object_of(schema: Schema, read: Read) -> Parameter:
    """An object that `read` reads. It travels as JSON alone."""
    return Parameter(schema, read, _no_query, "pass a JSON object", {})


# -- inside --------------------------------------------------------------------------------------


def _no_query(found: bytes, name: str) -> Any:
    raise UsageError((Argument(name), " in a query"), "send it as JSON, by POST")


def _whole(found: Any) -> Any:
    """A float that is surely an integer, as an integer; all else as it is."""
    if type(found) is float and found.is_integer() and abs(found) <= _FLOAT_EXACT_MAX:
        return int(found)
    return found


def _decoded(found: bytes, name: str) -> str:
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        shown = base64.b64encode(found[:64]).decode()
        raise UsageError((Argument(name), f" is no text: base64 {shown}"), "pass UTF-8") from error
