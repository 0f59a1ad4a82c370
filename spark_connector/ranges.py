"""The keys that the options of a read name: one range, or several in the option `ranges`.

    prefix                        the keys that begin with it
    startKey, endKey              startKey <= key < endKey
    ranges                        JSON: a list of prefixes, and of pairs of a start and an end
    keyEncoding                   how each of these texts tells bytes: text, hex or base64

Spark passes no OR to a Python source, so `ranges` is the way to read several ranges at once.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from typing import Final

from kvstore.errors import UsageError
from kvstore.span import Span, merge_spans

RANGES_MAX: Final = 1_000
"""Ranges of one read. They are in the plan of the query, and each costs a seek."""

_BOUNDS: Final = {"startkey": "startKey", "endkey": "endKey", "prefix": "prefix"}
_PYTHON_BYTES: Final = re.compile(r"(bytearray\()?b(['\"]).*\2\)?", re.DOTALL)
"""The text that Spark makes of bytes in `option("prefix", b"a")`: a prefix that no key has."""

_DECODERS: Final[Mapping[str, Callable[[str], bytes]]] = {
    "text": str.encode,
    "hex": bytes.fromhex,
    "base64": lambda text: base64.b64decode(text, validate=True),
}


def spans_of(given: Mapping[str, str]) -> tuple[Span, ...]:
    """The spans that the options name, under their lower-case names: disjoint, and in order.

    Raises `UsageError` for a key that is not in its encoding, and for two ways at once.
    """
    encoding = given.get("keyencoding", "text")
    decode = _DECODERS.get(encoding.lower())
    if decode is None:
        raise UsageError(f"keyEncoding={encoding!r}", f"pass one of {', '.join(_DECODERS)}")

    def key(name: str, text: str) -> bytes:
        if _PYTHON_BYTES.fullmatch(text):
            raise UsageError(
                f"{name}={text} is bytes, and options are text",
                'pass its hex(), and the option keyEncoding "hex"',
            )
        try:
            return decode(text)
        except (ValueError, binascii.Error) as error:
            raise UsageError(
                f"{name}={text!r} is not {encoding}: {error}", "correct the text"
            ) from None

    bounds = [key(text, given[name]) if name in given else None for name, text in _BOUNDS.items()]
    ranges = given.get("ranges")
    if ranges is None:
        if "keyencoding" in given and bounds == [None] * len(bounds):
            raise UsageError("keyEncoding is given without a key", "remove it")
        return (Span.of(*bounds),)
    if bounds != [None] * len(bounds):
        raise UsageError("ranges is given with prefix, startKey or endKey", "pass ranges alone")
    return tuple(merge_spans(_span(each, key) for each in _listed(ranges)))


def _listed(text: str) -> list[object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, list) and 0 < len(found) <= RANGES_MAX:
        return found
    raise UsageError(
        f"ranges={text[:40]!r}",
        f'pass JSON, a list of 1 to {RANGES_MAX} prefixes or pairs: ["a", ["b", "c"]]',
    )


def _span(each: object, key: Callable[[str, str], bytes]) -> Span:
    match each:
        case str(prefix):
            return Span.of_prefix(key("ranges", prefix))
        case [str(start), None]:
            return Span(key("ranges", start))
        case [str(start), str(end)]:
            return Span(key("ranges", start), key("ranges", end))
    raise UsageError(
        f"a range {str(each)[:40]!r}", "pass a prefix, or a pair of a start and an end (or null)"
    )
