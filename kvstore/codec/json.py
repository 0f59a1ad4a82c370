"""One strict reader of JSON objects for every record and manifest. Damaged or hostile bytes raise
`CorruptionError`, never an error of the parser or of the code that takes the fields.

    object := a JSON object in UTF-8, no name twice, no NaN or infinity

Invariants
1. Size and depth are checked before parsing. The size bounds the memory, which is some twenty times
   as large; the depth bounds the parser's recursion.
2. A field is returned with the type that the caller asked for, or not at all.

The callers check formats, versions and checksums.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any, NoReturn, TypeVar

from kvstore.errors import CorruptionError
from kvstore.limits import JSON_BYTES_MAX, JSON_DEPTH_MAX

_DEPTH_BLOCK_BYTES = 1 << 20
_KIND_NAMES = {int: "an integer", str: "a text", bool: "true or false", float: "a number"}
_INT64_MAX = (1 << 63) - 1

T = TypeVar("T")


class JsonObject(dict[str, Any]):
    """A JSON object that was read. `where` names it in errors.

    It compares and writes like a plain `dict`. The methods return a field of a given type, and
    raise `CorruptionError` if the field is missing or has another type.
    """

    __slots__ = ("where",)

    def __init__(self, fields: dict[str, Any], *, where: str) -> None:
        super().__init__(fields)
        self.where = where

    def damaged(self, problem: str) -> CorruptionError:
        """The error to raise if the object breaks a rule of its format."""
        return CorruptionError(self.where, problem)

    def field(self, name: str, kind: type[T]) -> T:
        """The field `name`, of exactly the type `kind`: a boolean is no integer."""
        if name not in self:
            raise self.damaged(f"field {name!r} is missing")
        found = self[name]
        if type(found) is not kind:
            self._refuse(name, found, _KIND_NAMES.get(kind, f"a {kind.__name__}"))
        return found

    def optional(self, name: str, kind: type[T]) -> T | None:
        """The same as `field`, but None where the field is null or missing."""
        return None if self.get(name) is None else self.field(name, kind)

    def integer(self, name: str, *, least: int = 0, most: int = _INT64_MAX) -> int:
        """The integer `name`, from `least` to `most`."""
        found = self.field(name, int)
        if not least <= found <= most:
            self._refuse(name, found, f"from {least} to {most}")
        return found

    def optional_integer(self, name: str, *, least: int = 0, most: int = _INT64_MAX) -> int | None:
        """The same as `integer`, but None where the field is null or missing."""
        return None if self.get(name) is None else self.integer(name, least=least, most=most)

    def text(self, name: str) -> str:
        """The text `name`. A lone surrogate, which UTF-8 cannot hold, is refused."""
        found = self.field(name, str)
        if not _is_unicode(found):
            self._refuse(name, found, "a text of whole characters")
        return found

    def hexed(self, name: str) -> bytes:
        """The bytes of the field `name`, hexadecimal as `bytes.hex` writes it."""
        return self.unhexed(self.field(name, str), name=name)

    def inner(self, name: str) -> JsonObject:
        """The object `name`."""
        return JsonObject(self.field(name, dict), where=f"{self.where}: {name}")

    def objects(self, name: str) -> list[JsonObject]:
        """The list `name` of objects."""
        found = self.field(name, list)
        if not all(type(item) is dict for item in found):
            self._refuse(name, found, "a list of objects")
        return [
            JsonObject(item, where=f"{self.where}: {name}[{place}]")
            for place, item in enumerate(found)
        ]

    def items_of(self, name: str, kind: type[T]) -> list[T]:
        """The list `name`, each item of exactly the type `kind`."""
        found = self.field(name, list)
        if not all(type(item) is kind for item in found):
            self._refuse(name, found, f"a list, each item {_KIND_NAMES.get(kind, kind.__name__)}")
        return found

    def unhexed(self, text: object, *, name: str) -> bytes:
        """The bytes of a hexadecimal text that was taken from the field `name`."""
        try:
            found = bytes.fromhex(text)  # type: ignore[arg-type]  # the error is caught
        except (TypeError, ValueError):
            self._refuse(name, text, "hexadecimal")
        if found.hex() != text:  # spaces and capitals would be second texts of the same bytes
            self._refuse(name, text, "hexadecimal, as it is written here")
        return found

    def _refuse(self, name: str, found: object, wanted: str) -> NoReturn:
        raise self.damaged(f"field {name!r} holds {_printed(found)}, not {wanted}")


def read_object(
    data: bytes | bytearray | memoryview,
    *,
    where: str,
    bytes_max: int | None = None,
    depth_max: int | None = None,
) -> JsonObject:
    """Read the JSON object at `where`. O(bytes).

    Raises `CorruptionError` for everything else: more than `bytes_max` bytes, brackets nested
    deeper than `depth_max`, a name that comes twice in an object, NaN, infinity, another text
    encoding."""
    bytes_max = JSON_BYTES_MAX if bytes_max is None else bytes_max
    depth_max = JSON_DEPTH_MAX if depth_max is None else depth_max
    if len(data) > bytes_max:
        raise CorruptionError(where, f"{len(data)} bytes of JSON, at most {bytes_max} are read")
    data = bytes(data)
    if data.count(b"[") + data.count(b"{") > depth_max and _is_deeper(data, depth_max):
        raise CorruptionError(where, f"JSON nested deeper than {depth_max}")
    try:
        found = json.loads(
            data.decode(),
            object_pairs_hook=_distinct,
            parse_constant=_refused,
            parse_float=_finite,
        )
    except ValueError as error:
        raise CorruptionError(where, f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CorruptionError(where, f"{_printed(found)} is not a JSON object")
    return JsonObject(found, where=where)


def _is_deeper(data: bytes, depth_max: int) -> bool:
    """Whether brackets outside strings are nested deeper than `depth_max`.

    The parser recurses for each bracket, and its caller's stack limits the recursion. Costs about
    as much as parsing. Works block by block, so that memory does not grow with `data`.
    """
    import numpy as np  # late: commands import this module, and few read large records

    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # quotes that are left bound strings
    steps = np.zeros(256, np.int8)
    steps[[*b"[{"]], steps[[*b"]}"]] = 1, -1
    depth, quotes = 0, 0
    for at in range(0, len(plain), _DEPTH_BLOCK_BYTES):
        block = np.frombuffer(plain, np.uint8)[at : at + _DEPTH_BLOCK_BYTES]
        seen = quotes + np.cumsum(block == ord('"'), dtype=np.int64)
        depths = depth + np.cumsum(np.where(seen & 1, np.int8(0), steps[block]), dtype=np.int64)
        if int(depths.max()) > depth_max:
            return True
        depth, quotes = int(depths[-1]), int(seen[-1])
    return False


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the name {_printed(name)} comes twice")
            seen.add(name)
    return found


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is beyond a double")
    return number


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printed(found: object) -> str:
    """A value for a message: at most 60 characters, and no control characters of terminals."""
    if isinstance(found, dict | list):
        return f"a {type(found).__name__} of {len(found)}"
    text = ascii(found[:60]) if isinstance(found, str) else repr(found)
    return text if len(text) <= 60 else f"{text[:60]}..."


# --------------------------------------------------------------------------------------------------
# Bytes in JSON: text where they are UTF-8, else {"base64": "..."}.


def bytes_json(raw: bytes) -> str | dict[str, str]:
    """Bytes as JSON, without loss."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(raw).decode()}
