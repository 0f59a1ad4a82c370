"""The format's bytes: files of each released version can be read for ever, and writers make the
same bytes.

Run this file as a program to write the golden files of a new version.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvstore.errors import FormatVersionError
from kvstore.storage.journal import Journal, Record, Sync, read
from kvstore.storage.journal.framing import TYPE_OPEN, encode
from tests.journal.folds import IDENTITY, Payloads

GOLDEN = Path(__file__).parent / "golden" / "v1"
ITEMS = [b"one", b"", b"\xfe\xfd", b"a\xfe\xfdb", bytes(range(256)) * 2, b"in the live file"]
FILES = ["0000000000000002-snapshot-final", "0000000000000003-journal-final"]
FILES += ["0000000000000006-journal"]


def write_golden(path: Path) -> None:
    with Journal.open(
        path, content="golden", identity=IDENTITY, file_records=3, sync=Sync.never()
    ) as journal:
        for number, item in enumerate(ITEMS[:2]):
            journal.append(item, number)
        journal.snapshot([(number, item) for number, item in enumerate(ITEMS[:2])])
        for number, item in enumerate(ITEMS[2:], 2):
            journal.append(item, number)


def test_todays_writer_gives_the_bytes_of_version_1(tmp_path: Path) -> None:
    write_golden(tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes(), name
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] == "0") == FILES


def test_files_of_version_1_are_read(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).write_bytes((GOLDEN / name).read_bytes())
    restored, applied = list[Record](), list[Record]()
    with Journal.open(
        tmp_path, restore=restored.append, apply=applied.append, content="golden"
    ) as journal:
        assert journal.incarnation == (IDENTITY << 32) + 2
    assert [record.payload for record in restored + applied] == ITEMS
    assert [record.type for record in restored + applied] == list(range(len(ITEMS)))
    assert [record.ordinal for record in applied] == [3, 4, 5, 6]
    assert list(read(tmp_path)) == applied


def test_a_records_bytes_are_as_the_table_says() -> None:
    assert encode(0x0102030400000001, 5, 7, b"hello").hex(" ") == (
        "fe fd 22 "  # pair, 34 bytes
        "fe 1a 46 29 d8 91 e1 ce "  # head check, checksum
        "01 00 00 00 04 03 02 01 05 00 00 00 00 00 00 00 07 05 00 00 00 "  # head
        "68 65 6c 6c 6f"
    )


def test_a_newer_format_is_refused_by_name_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "0000000000000001-journal"
    newer = encode((IDENTITY << 32) + 1, 1, TYPE_OPEN, b"\x02\x00\x00golden")
    path.write_bytes(newer)
    fold = Payloads()
    with pytest.raises(FormatVersionError) as caught:
        Journal.open(tmp_path, apply=fold.apply)
    assert (caught.value.path, caught.value.found, caught.value.supported) == (str(path), 2, 1)
    assert path.read_bytes() == newer


if __name__ == "__main__":
    write_golden(Path(sys.argv[1]))
