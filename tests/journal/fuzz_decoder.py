"""Fuzzing the decoder by coverage: `python -m tests.journal.fuzz_decoder [atheris options]`.

Runs where atheris installs. `scan_anything` is the target that hypothesis also drives.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import FunctionType
from typing import BinaryIO, cast

from kvstore.errors import FormatVersionError
from kvstore.storage.journal import framing, recovery
from kvstore.storage.journal.framing import PAIR, Record, encode
from kvstore.storage.journal.recovery import Damage, FileScan


def scan_anything(data: bytes, *, live: bool) -> list[Record]:
    """Scan any bytes as a file, check what every scan promises, and return the records.

    The bytes must contain the encoding of each returned record. Every other byte must belong to the
    framing, to a damage or to the torn tail.
    """
    found = FileScan(cast(BinaryIO, io.BytesIO(data)), path="fuzzed", first=1, live=live)
    taken: list[Record] = []
    damaged = 0
    try:
        for item in found:
            if isinstance(item, Damage):
                assert damaged <= item.offset <= item.end <= len(data)
                damaged = item.end
                item.error()
            else:
                assert [r.ordinal for r in item] == list(
                    range(item[0].ordinal, item[0].ordinal + len(item))
                )
                taken += item
    except FormatVersionError:
        return taken
    assert found.size == len(data)
    for earlier, later in pairwise(taken):
        assert earlier.ordinal < later.ordinal
        assert earlier.incarnation <= later.incarnation
    for record in taken:
        body = encode(record.incarnation, record.ordinal, record.type, record.payload)
        assert body in data or PAIR in record.payload or len(body) > 255
    if found.torn is not None:
        assert live
        assert found.torn.offset + found.torn.size == len(data)
    if not live and not found.sealed:
        assert damaged == len(data)
    return taken


def decoder_functions() -> Iterator[FunctionType]:
    """The modules whose coverage steers the fuzzer: the decoder, and no library below."""
    for module in (framing, recovery):
        for thing in vars(module).values():
            members = vars(thing).values() if isinstance(thing, type) else [thing]
            yield from (
                member
                for member in members
                if isinstance(member, FunctionType) and member.__module__ == module.__name__
            )


def main() -> None:
    """Hand the target to atheris."""
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    for function in decoder_functions():
        atheris.instrument_func(function)

    def target(data: bytes) -> None:
        scan_anything(data[1:], live=data[:1] < b"\x80")

    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
