"""The tree of errors equals the drawn one. Each error says what to do and carries its facts."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from kvstore import errors
from kvstore.errors import KVStoreError, printable

ERRORS: list[KVStoreError] = [
    errors.UsageError("limit is -1", "give zero or more"),
    errors.NotAStoreError("/d", "a file", "name a directory"),
    errors.FormatVersionError("/d", found=9, supported=1),
    errors.AccessDeniedError("put of /d/a", "Permission denied"),
    errors.NotCompiledError("CPython 3.12.1 on linux-x86_64", "cannot import blocks"),
    errors.ClosedError("store /d"),
    errors.ForkedError("the store at /d", owner=1, remedy="open it here"),
    errors.KeyOrderError("part 3", previous=b"b", key=b"a"),
    errors.ImportRefusedError("/s", "part-1.sst is missing", "build it again"),
    errors.KeyConflictError([b"k%d" % n for n in range(9)]),
    errors.RetryableError("the queue is full", "try again"),
    errors.ConflictError(read_at=1, written_at=2, where="key b'k'"),
    errors.PreconditionError(b"k", expected=b"1", found=None),
    errors.LockedError("/d"),
    errors.HistoryGoneError(as_of=3, since=5, span=(b"a", None)),
    errors.NotYetWrittenError(as_of=9, upper=7),
    errors.FencedError("feed 'f'"),
    errors.HoldLostError("backup", held=3, budget_seconds=60.0),
    errors.StorageError("/d: I/O error", "reopen it"),
    errors.OutOfSpaceError("/d"),
    errors.PoisonedError("store /d", "fsync: I/O error"),
    errors.CorruptionError("/d/part-1", "checksum differs"),
]


def _below(kind: type[KVStoreError], depth: int = 0) -> list[tuple[int, str]]:
    """The tree under `kind`, in order of definition."""
    below = [line for child in kind.__subclasses__() for line in _below(child, depth + 1)]
    return [(depth, kind.__name__), *below]


def test_the_tree_is_as_it_is_drawn() -> None:
    drawn = re.findall(r"^    ([| ]*[|`]-- )?(\w+Error)", errors.__doc__ or "", re.MULTILINE)
    ours = [
        (depth, name) for depth, name in _below(KVStoreError) if hasattr(errors, name)
    ]  # without the classes of other modules
    assert sorted((len(branch) // 4, name) for branch, name in drawn) == sorted(ours)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_message_says_what_happened_and_what_to_do(error: KVStoreError) -> None:
    assert str(error) == f"{error.what}; {error.remedy}"
    assert error.what
    assert error.remedy


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_crosses_processes_with_its_facts(error: KVStoreError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


def test_facts_are_fields() -> None:
    gone = errors.HistoryGoneError(as_of=3, since=5)
    assert (gone.as_of, gone.since, gone.span) == (3, 5, None)
    early = errors.NotYetWrittenError(as_of=9, upper=7)
    assert (early.as_of, early.upper) == (9, 7)
    lost = errors.HoldLostError("backup", held=3, budget_seconds=60.0)
    assert (lost.name, lost.held, lost.budget_seconds) == ("backup", 3, 60.0)


def test_wrong_calls_are_value_errors_too() -> None:
    with pytest.raises(ValueError, match="limit"):
        raise errors.UsageError("limit is -1")


def test_same_key_twice_reads_otherwise_than_a_smaller_one() -> None:
    assert "came twice" in str(errors.KeyOrderError("part 3", previous=b"a", key=b"a"))
    assert "came after b'b'" in str(errors.KeyOrderError("part 3", previous=b"b", key=b"a"))


def test_many_keys_in_the_way_are_not_all_spelled_out() -> None:
    error = errors.KeyConflictError([b"k%d" % n for n in range(1000)])
    assert str(error).count("b'k") == errors.KEYS_NAMED_MAX
    assert len(error.keys) == 1000


def test_key_is_printed_as_text_or_escapes_and_cut_when_long() -> None:
    assert printable(b"2013-01-31/UA") == "b'2013-01-31/UA'"
    assert printable(b"\x00\xff") == r"b'\x00\xff'"
    assert printable(b"k" * 65) == f"b'{'k' * 64}'... (65 bytes)"
