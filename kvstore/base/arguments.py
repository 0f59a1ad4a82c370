"""Checks of arguments: a wrong type or range raises `UsageError` before anything is done."""

from __future__ import annotations

import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any, Final, Generic, TypeVar, final

from typing_extensions import TypeIs

from kvstore.base.span import Span
from kvstore.base.timestamp import TimeLike, is_plain_number, length_of, plain_integer
from kvstore.errors import Argument, UsageError
from kvstore.limits import VALUE_BYTES_MAX

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Word = TypeVar("_Word", bound=str)


@dataclass(frozen=True, slots=True)
class ArgumentKind(Generic[_Value]):
    """What an argument may be. `COUNT.check("limit", limit)` returns the value of the argument
    `limit`, or raises `UsageError`, which has the argument's name and tells the `hint`."""

    read: Callable[[object], _Value | Refused]
    hint: str
    schema: Mapping[str, Any] = field(default_factory=dict)
    """The JSON Schema of the values, for kinds that the server declares too; else empty."""

    def check(self, name: str, given: object) -> _Value:
        """The value of the argument `name`. Raises `UsageError`."""
        found = self.read(given)
        if type(found) is Refused:
            argument = Argument.of(name, given) if found.shows_value else Argument(name)
            raise UsageError((argument, found.why), found.hint or self.hint)
        return found

    @property
    def or_none(self) -> ArgumentKind[_Value | None]:
        """The same, or None."""
        read = self.read
        return ArgumentKind(
            lambda given: None if given is None else read(given), f"{self.hint}, or None"
        )


@final
@dataclass(frozen=True, slots=True)
class Refused:
    """What a kind reads from a value that it does not take. The message is the argument with its
    value, or its name alone, and `why`."""

    why: str = ""
    hint: str = ""
    """What to pass, where the kind's hint does not say it."""
    shows_value: bool = True


REFUSED: Final = Refused()


def integer(least: int, most: int | None = None, *, hint: str = "") -> ArgumentKind[int]:
    """An integer from `least` to `most`, also one of numpy. A bool is none."""

    def read(given: object) -> int | Refused:
        found = plain_integer(given)
        if found is None or found < least or (most is not None and found > most):
            return REFUSED
        return found

    bounds = f"at least {least}" if most is None else f"{least} to {most}"
    schema = {"type": "integer", "minimum": least}
    return ArgumentKind(
        read, hint or f"pass {bounds}", schema if most is None else {**schema, "maximum": most}
    )


def word(*words: _Word, hint: str = "") -> ArgumentKind[_Word]:
    """One of the words."""
    known: dict[object, _Word] = {each: each for each in words}

    def read(given: object) -> _Word | Refused:
        return known.get(given, REFUSED) if isinstance(given, str) else REFUSED

    schema = {"type": "string", "enum": list(words)}
    return ArgumentKind(read, hint or f"pass one of {', '.join(words)}", schema)


def text(
    least: int = 0, most: int | None = None, *, pattern: str = "", hint: str = ""
) -> ArgumentKind[str]:
    """A text of `least` to `most` whole characters, that matches `pattern` from end to end."""
    schema: dict[str, Any] = {"type": "string"}
    if least:
        schema["minLength"] = least
    if most is not None:
        schema["maxLength"] = most
    if pattern:
        schema["pattern"] = f"^({pattern})$"
    match = re.compile(pattern).fullmatch if pattern else None

    def read(given: object) -> str | Refused:
        if not isinstance(given, str):
            return Refused(f" must be a text, not {type(given).__name__}", shows_value=False)
        if len(given) < least or (most is not None and len(given) > most):
            why = f" {given[:_TEXT_SHOWN_MAX]!r} has {len(given)} characters"
            return Refused(why, shows_value=False)
        if match is not None and match(given) is None:
            return Refused(f" {given[:_TEXT_SHOWN_MAX]!r}", shows_value=False)
        try:
            given.encode()
        except UnicodeEncodeError as error:
            return Refused(f" is no text: {error}", "pass whole characters", shows_value=False)
        return given

    bounds = "a text" if most is None else f"a text of {least} to {most} characters"
    return ArgumentKind(read, hint or f"pass {bounds}", schema)


_TEXT_SHOWN_MAX: Final = 100
"""The characters that a message shows of a text that may be a whole document."""


def seconds(most: float, *, above: float | None = None) -> ArgumentKind[float]:
    """A duration in seconds, from 0 to `most`, and above `above` if it is given."""
    hint = f"pass at most {most:g} seconds"
    if above is None:
        bound: dict[str, float] = {"minimum": 0}
    else:
        bound, hint = {"exclusiveMinimum": above}, f"{hint}, and more than {above:g}"

    def read(given: object) -> float | Refused:
        found = _read_seconds(given)
        if isinstance(found, Refused) or found > most or (above is not None and found <= above):
            return Refused(" seconds")
        return float(found)

    return ArgumentKind(read, hint, {"type": "number", **bound, "maximum": most})


def printable(hint: str, *, but: str = "") -> ArgumentKind[str]:
    """A text of printable characters, one at the least, and none that is in `but`."""

    def read(given: object) -> str | Refused:
        if not isinstance(given, str) or not given or not given.isprintable():
            return REFUSED
        return given if set(but).isdisjoint(given) else REFUSED

    return ArgumentKind(read, hint)


def instance(*kinds: type[_Value], hint: str) -> ArgumentKind[_Value]:
    """An object of one of the classes."""
    return ArgumentKind(lambda given: given if isinstance(given, kinds) else REFUSED, hint)


def function(hint: str) -> ArgumentKind[Callable[..., Any]]:
    """Something that can be called."""
    return ArgumentKind(lambda given: given if callable(given) else REFUSED, hint)


def _read_integer(given: object) -> int | Refused:
    found = plain_integer(given)
    return REFUSED if found is None else found


def _read_flag(given: object) -> bool | Refused:
    return given if given is True or given is False else REFUSED


def _read_seconds(given: object) -> float | Refused:
    if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        return REFUSED
    return given


def _read_wait(given: object) -> float | Refused:
    if isinstance(given, bool) or not isinstance(given, int | float):
        return REFUSED
    seconds = float(min(max(given, 0.0), threading.TIMEOUT_MAX))
    return REFUSED if math.isnan(seconds) else seconds


def _read_age(given: object) -> timedelta | Refused:
    if isinstance(given, timedelta):
        return given if given >= timedelta(0) else REFUSED
    if is_plain_number(given) or plain_integer(given) is not None or isinstance(given, float):
        return Refused(" has no unit", f"write '{given}s', or pass timedelta(seconds={given})")
    length = length_of(given) if isinstance(given, str) else None
    if length is None:
        return REFUSED
    try:
        return timedelta(microseconds=length // 1000)
    except OverflowError:
        return Refused(" is older than time", "write a shorter age: 3650d")


def _read_span(given: object) -> Span | Refused:
    if given is None:
        return Span()
    return given if isinstance(given, Span) else REFUSED


def _read_columns(given: object) -> tuple[str, ...] | Refused:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        return REFUSED
    return tuple(given)


INTEGER: Final = ArgumentKind(_read_integer, "pass an integer")
COUNT: Final = integer(1)
NUMBER: Final = integer(0)
LIMIT: Final = ArgumentKind(integer(0, sys.maxsize).or_none.read, "pass a count, or None for all")
FLAG: Final = ArgumentKind(_read_flag, "pass True or False", {"type": "boolean"})
"""A text such as "no" would count as True."""
SECONDS: Final = ArgumentKind(_read_seconds, "pass seconds")
WAIT: Final = ArgumentKind(_read_wait, "pass seconds").or_none
"""The seconds of a wait, None for no bound. A negative number becomes 0, and a number above the
longest wait of the system becomes that wait."""
AGE: Final = ArgumentKind(
    _read_age,
    "write a number from 0 on and us, ms, s, m, h, d or w, or the word of it: 90s, 30d, 2 weeks; "
    "or pass timedelta(days=30)",
)
"""A length of time: the one reader of ages of all doors."""
SPAN: Final = ArgumentKind(_read_span, "pass Span(start, end)")
"""None is every key."""
COLUMN: Final = instance(str, hint="pass the name of a column")
COLUMNS: Final = ArgumentKind(_read_columns, "pass a list of names").or_none
"""Names of columns, None for all. A text would be its letters."""


def require_value(value: object, *, name: str = "value") -> bytes:
    """`value` as bytes, if it can be stored: a buffer is copied."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise UsageError(
            (Argument(name), f" must be bytes, not {type(value).__name__}"),
            "encode it; None: use delete",
        )
    size = value.nbytes if isinstance(value, memoryview) else len(value)
    if size > VALUE_BYTES_MAX:
        raise UsageError(
            (Argument(name), f" has {size} bytes, at most {VALUE_BYTES_MAX} are stored"),
            "split it over several keys",
        )
    return bytes(value)


def key_list(keys: Iterable[_Key]) -> list[_Key]:
    """`keys` as a list. The type of each key is checked elsewhere."""
    try:
        return list(keys)
    except TypeError as error:
        raise UsageError(
            (Argument("keys"), f" must be many, not {type(keys).__name__}"), "pass a list"
        ) from error


def is_many(as_of: TimeLike | Sequence[TimeLike] | None) -> TypeIs[Sequence[TimeLike]]:
    """Whether `as_of` is a time for each key, rather than one time."""
    if as_of is None or isinstance(as_of, _ONE_TIME):
        return False
    return hasattr(as_of, "__len__")


_ONE_TIME: Final = (int, str, bytes, date)
"""A tuple, because a call that writes `int | str` makes the union anew."""
