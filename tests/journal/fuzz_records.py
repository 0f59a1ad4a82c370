"""Fuzzing the contents of records by coverage: `python -m tests.journal.fuzz_records [options]`.

Runs where atheris installs. Both targets are also driven by hypothesis.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvstore.engine.memory_engine import MemoryState
from kvstore.errors import CorruptionError, FormatVersionError
from kvstore.storage.journal import Record
from kvstore.tasks import TaskState


def fold_anything(records: Sequence[tuple[int, bytes]], *, snapshot: int = 0) -> MemoryState | None:
    """Take any records into a memory engine's state. The first `snapshot` records come from a
    snapshot.

    The state keeps its invariants, and its own records restore it. Returns None if it refuses.
    """
    state = MemoryState()
    try:
        for number, (kind, payload) in enumerate(records, 1):
            take = state.restore if number <= snapshot else state.apply
            take(Record(number, kind, payload, 1))
    except CorruptionError:
        return None
    again = MemoryState()
    for kind, payload in state.records():
        again.restore(Record(1, kind, payload, 1))
    for edition, copy in zip(state.families, again.families, strict=True):
        edition.check()
        assert [c.keys for c in edition.chunks if c.keys] or not len(edition)
        assert len(edition) == len(copy)
    return state


def queue_anything(payloads: Sequence[bytes]) -> TaskState | None:
    """Take any records into a task queue; None if it refuses."""
    state = TaskState()
    try:
        for number, payload in enumerate(payloads, 1):
            state.apply(Record(number, 0, payload, 1))
    except (CorruptionError, FormatVersionError):
        return None
    state.assert_invariants()
    again = TaskState()
    for kind, payload in state.records():
        again.apply(Record(1, kind, payload, 1))
    assert again.tasks == state.tasks
    assert again.recorded_at == state.recorded_at
    return state


def main() -> None:
    """Hand both targets to atheris."""
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    atheris.instrument_all()

    def target(data: bytes) -> None:
        if data[:1] < b"\x80":
            fold_anything([(data[0] % 7 if data else 0, data[1:])], snapshot=len(data) % 2)
        else:
            queue_anything([data[1:]])

    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
