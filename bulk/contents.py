"""Checks that staged files have the rows that the manifest names.

    metadata  bounds, number of rows, import id at both ends, no deletes of any kind. A file tells
              them without a pass: 0.1 to 0.3 ms. Always checked.
    rows      each row: its form, its import id, ascending keys. A pass, 0.7 us a row.
    crossing  parts whose spans cross share no key. A pass over these parts, 0.3 us a row.

Adding an import reads rows only if it is asked to be thorough. Only then does it refuse a
forged file that has rows of another import between two rows of its own. `Store.verify` finds
such rows too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

from bulk.part import Part
from kvstore.codec.keys import TAIL_BYTES, TOMBSTONE, VALUE, check_data_key, encode_reference
from kvstore.codec.ordered import frame, unframe
from kvstore.engine.loose import LooseFiles
from kvstore.engine.sorted_file import Figures, figures_of
from kvstore.errors import CorruptionError, KeyOrderError
from kvstore.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from kvstore.mvcc.expiry import require_record


def require_told(part: Part, path: str, import_id: int) -> None:
    """Raise `CorruptionError` unless the metadata of a file fits its part."""
    problem = _untrue(part, figures_of(path), encode_reference(import_id))
    if problem is not None:
        raise CorruptionError(part.name, problem)


@contextmanager
def damage_of(part: Part) -> Iterator[None]:
    """Have a `CorruptionError` of the block name the part, and not the path by which it is read."""
    try:
        yield
    except CorruptionError as error:
        raise CorruptionError(part.name, error.problem) from error


def require_rows(part: Part, path: str, import_id: int) -> None:
    """Raise `CorruptionError` unless each row of a part belongs to the import. Reads all rows."""
    reference = encode_reference(import_id)
    previous, rows = b"", 0
    with LooseFiles([path]) as loose:
        for keys, values in loose.rows():
            for key, value in zip(keys, values, strict=True):
                check_data_key(key)
                stem = key[:-TAIL_BYTES]
                if key[-TAIL_BYTES:-1] != reference:
                    raise CorruptionError(part.name, f"a row of {key[-TAIL_BYTES:-1].hex()}")
                if stem <= previous:
                    raise CorruptionError(part.name, f"key {unframe(stem)[:64]!r} comes twice")
                if len(unframe(stem)) > KEY_BYTES_MAX or len(value) > VALUE_BYTES_MAX:
                    raise CorruptionError(part.name, "a key or value that no store takes")
                if value and key[-1:] == TOMBSTONE:
                    raise CorruptionError(part.name, "a tombstone with a value")
                require_record(unframe(stem), value)
                previous = stem
            rows += len(keys)
    if rows != part.rows:
        raise CorruptionError(part.name, f"{rows} rows, not {part.rows}")


def require_disjoint(directory: Path, parts: Sequence[Part]) -> None:
    """Raise `KeyOrderError` if two of `parts`, which ascend by key, have a key in common.

    Reads only the parts whose spans cross.
    """
    for group in crossing(parts):
        if not _differ(directory, group):
            raise _shared(directory, group)


def depth(parts: Sequence[Part]) -> int:
    """The largest number of parts whose spans contain one common key."""
    ends = [(part.smallest, False) for part in parts] + [(part.largest, True) for part in parts]
    return max(accumulate(-1 if is_end else 1 for _, is_end in sorted(ends)), default=0)


def _untrue(part: Part, file: Figures, reference: bytes) -> str | None:
    """The first difference between the manifest and the file, None if they agree."""
    for end, key, found in (
        ("first", part.smallest, file.first),
        ("last", part.largest, file.last),
    ):
        if found[-1:] not in (TOMBSTONE, VALUE):
            return f"its {end} entry is no row: {found[-64:].hex()}"
        if found[-TAIL_BYTES:-1] != reference:
            return f"its {end} row is of another import: {found[-TAIL_BYTES:-1].hex()}"
        if found[:-TAIL_BYTES] != frame(key):
            return f"its {end} key is not the one that was sealed"
    if file.entries != part.rows:
        return f"it has {file.entries} rows, {part.rows} were sealed"
    return None


def crossing(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Groups of two or more parts. A part crosses another part of its group, and none outside
    it."""
    group: list[Part] = []
    end = b""
    for part in parts:
        if group and part.smallest > end:
            if len(group) > 1:
                yield group
            group = []
        end = max(end, part.largest) if group else part.largest
        group.append(part)
    if len(group) > 1:
        yield group


def _differ(directory: Path, group: Sequence[Part]) -> bool:
    """Whether no key is in two parts. RocksDB merges equal entries into one, and shows a put and a
    delete of one key as neighbours."""
    keys, previous = 0, b""
    with LooseFiles([directory / part.name for part in group]) as loose:
        for entries, _ in loose.rows():
            stems = [previous, *(entry[:-1] for entry in entries)]
            keys += sum(map(bytes.__ne__, stems, stems[1:]))
            previous = stems[-1]
    return keys == sum(part.rows for part in group)


def _shared(directory: Path, group: Sequence[Part]) -> KeyOrderError:
    """The error, with a key that two parts of the group share. Costs a few passes over them."""
    distinct, shared = 1, len(group)
    while shared - distinct > 1:  # `distinct` parts share no key, `shared` parts do
        middle = (distinct + shared) // 2
        if _differ(directory, group[:middle]):
            distinct = middle
        else:
            shared = middle
    late = group[shared - 1]
    where = f"part {late.name} and others of {directory}"
    others = [directory / part.name for part in group[: shared - 1]]
    with LooseFiles(others) as before, LooseFiles([directory / late.name]) as loose:
        for entries, _ in loose.rows():
            for entry in entries:
                if any(before.get(entry[:-1] + kind) is not None for kind in (TOMBSTONE, VALUE)):
                    key = unframe(entry[:-TAIL_BYTES])
                    return KeyOrderError(where, previous=key, key=key)
    raise CorruptionError(where, "their rows are not as many as their writers counted")
