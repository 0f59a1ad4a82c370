"""Task changes as journal records: the new state of each task, not the command that changed it.

    record  := | format u8 | recorded at u64 | entry ... |                    little-endian
    entry   := | tag u8 | body bytes u32 | body |     tag 1: task as it is now, 2: id of one deleted
    task    := | version u64 | available at u64 | created at u64 | changed at u64 | attempt u32 |
               | text ... |              id, queue, claimant, error, progress, value, in this order
    text    := | bytes u32 | data |

Replay sets and deletes tasks. It checks no version, limit or clock, so that a changed rule cannot
change the meaning of an old journal.

Invariants
1. One record is one atomic change.
2. A body may end early: missing fields have their defaults. A body may be longer: a later release
   added fields, which this one passes over.
3. Numbers are below 2**63, an attempt below 2**31, so that a later change can count on from them.
   Texts are UTF-8.
4. A reader passes over an unknown entry with a tag of 128 or above. It refuses a record with any
   other unknown entry, and a record of another format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from kvstore.errors import CorruptionError, FormatVersionError
from kvstore.tasks.task import Task

FORMAT = 1
TAG_TASK, TAG_DELETED = 1, 2
TAG_OPTIONAL_MIN = 128

RECORD_HEAD = struct.Struct("<BQ")
ENTRY_HEAD = struct.Struct("<BI")
_NUMBERS = struct.Struct("<QQQQI")
_TEXT = struct.Struct("<I")
_TEXT_COUNT = 6
_NUMBER_END, _ATTEMPT_END = 1 << 63, 1 << 31

WHERE = "the task journal"


def encode(recorded_at: int, tasks: Iterable[Task], deleted: Iterable[str] = ()) -> bytes:
    """One atomic change as a record."""
    parts = [RECORD_HEAD.pack(FORMAT, recorded_at)]
    for task in tasks:
        body = _encode_task(task)
        parts += ENTRY_HEAD.pack(TAG_TASK, len(body)), body
    for task_id in deleted:
        body = task_id.encode()
        parts += ENTRY_HEAD.pack(TAG_DELETED, len(body)), body
    return b"".join(parts)


def decode(payload: bytes) -> tuple[int, list[Task | str]]:
    """The time of the record, and for each task its new state, or its id if it was deleted.

    Raises `FormatVersionError` on a record of a later release, `CorruptionError` on a broken one.
    """
    if len(payload) < RECORD_HEAD.size:
        raise CorruptionError(WHERE, f"a record of {len(payload)} bytes")
    version, recorded_at = RECORD_HEAD.unpack_from(payload)
    if version != FORMAT:
        raise FormatVersionError(WHERE, found=version, supported=FORMAT)
    if recorded_at >= _NUMBER_END:
        raise CorruptionError(WHERE, f"a record of the time {recorded_at}")
    changes: list[Task | str] = []
    for tag, body in _entries(payload):
        if tag == TAG_TASK:
            changes.append(_decode_task(body))
        elif tag == TAG_DELETED:
            changes.append(_decode_text(body))
        elif tag < TAG_OPTIONAL_MIN:
            raise FormatVersionError(WHERE, found=f"entry {tag}", supported="entries 1 and 2")
    return recorded_at, changes


def _entries(payload: bytes) -> Iterator[tuple[int, bytes]]:
    at, end = RECORD_HEAD.size, len(payload)
    while at < end:
        if at + ENTRY_HEAD.size > end:
            raise CorruptionError(WHERE, "a record ends within an entry")
        tag, size = ENTRY_HEAD.unpack_from(payload, at)
        at += ENTRY_HEAD.size
        if at + size > end:
            raise CorruptionError(WHERE, "a record ends within an entry")
        yield tag, payload[at : at + size]
        at += size


def _encode_task(task: Task) -> bytes:
    texts = (
        task.id.encode(),
        task.queue.encode(),
        task.claimant.encode(),
        task.error.encode(),
        task.progress,
        task.value,
    )
    parts = [
        _NUMBERS.pack(
            task.version, task.available_at, task.created_at, task.changed_at, task.attempt
        )
    ]
    for text in texts:
        parts += _TEXT.pack(len(text)), text
    return b"".join(parts)


def _decode_task(body: bytes) -> Task:
    if len(body) < _NUMBERS.size:
        raise CorruptionError(WHERE, f"a task of {len(body)} bytes")
    version, available_at, created_at, changed_at, attempt = _NUMBERS.unpack_from(body)
    if max(version, available_at, created_at, changed_at) >= _NUMBER_END or attempt >= _ATTEMPT_END:
        raise CorruptionError(WHERE, "a task's number is beyond its bound")
    texts: list[bytes] = []
    at = _NUMBERS.size
    while len(texts) < _TEXT_COUNT and at + _TEXT.size <= len(body):
        (size,) = _TEXT.unpack_from(body, at)
        at += _TEXT.size + size
        texts.append(body[at - size : at])
        if at > len(body):
            raise CorruptionError(WHERE, "a task ends within a text")
    texts += [b""] * (_TEXT_COUNT - len(texts))
    task_id, queue, claimant, error, progress, value = texts
    return Task(
        id=_decode_text(task_id),
        version=version,
        queue=_decode_text(queue),
        available_at=available_at,
        attempt=attempt,
        claimant=_decode_text(claimant),
        value=value,
        progress=progress,
        error=_decode_text(error),
        created_at=created_at,
        changed_at=changed_at,
    )


def _decode_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptionError(WHERE, f"a text is not UTF-8: {error}") from error
