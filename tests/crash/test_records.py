"""Ctrl-C at each line of the functions that write records: stored bytes and memory change together.

Python delivers a signal behind a call, so between two lines, and seldom at one of a few. Here each
line has its turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvstore
from kvstore import bulk
from kvstore.errors import PoisonedError

pytestmark = pytest.mark.usefixtures("each_engine")

WRITERS = frozenset(
    (
        "_abort",
        "_forget",
        "_trim",
        "_write",
        "close_upto_now",
        "move_since",
        "prepare",
        "write_meta",
    )
)
"""The functions that write records and show them, in the modules of `HOMES`."""
HOMES = frozenset(("collect", "committer", "holds", "imports"))


def interrupted_at(number: int, call: Callable[[], object]) -> bool:
    """Whether the call reached so many lines of these functions: then it is interrupted at the last
    one. A line counts when it is first reached: leaving a block by `with` comes to its first line
    once more, where Python delivers no signal."""
    left, reached = number, dict[FrameType, int]()

    def at_line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if event == "line" and frame.f_lineno > reached.get(frame, 0):
            reached[frame] = frame.f_lineno
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return at_line

    def at_call(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        is_writer = code.co_name in WRITERS and Path(code.co_filename).stem in HOMES
        return at_line if is_writer else None

    sys.settrace(at_call)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


class Subject:
    """A store with history that GC removes, and an import that waits."""

    def __init__(self, place: Path) -> None:
        place.mkdir()
        self.place = place
        self.store = store = kvstore.open(place / "db", durability="async")
        for key in (b"a", b"b", b"c"):
            store.put(key, b"v")
        store.delete_range(b"b", b"c")
        store.clear_range(b"a", b"b", compact=False)
        self.waiting = bulk.Import.create(place / "waiting")
        with self.waiting.writer() as writer:
            writer.put(b"j", b"row")
        self.waiting.seal()


def hold(s: Subject) -> None:
    s.store.hold("h").release()


def abort(s: Subject) -> None:
    def call_off(step: str) -> None:
        if step == "link":
            raise InterruptedError

    with suppress(InterruptedError):
        bulk.ingest(s.store, s.waiting.staging, progress=call_off)
    s.store.imports.abort(s.waiting.import_id)


CALLS: dict[str, Callable[[Subject], object]] = {
    "ingest": lambda s: bulk.ingest(s.store, s.waiting.staging),
    "abort": abort,
    "hold": hold,
    "gc": lambda s: s.store.gc(before=s.store.upper - 1),
}


def facts(store: kvstore.Store) -> object:
    return store.imports.all(), store.holds.all(), store.since, list(store.scan())


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_between_a_record_and_its_showing_is_told_or_mended(
    tmp_path: Path, name: str
) -> None:
    number, is_interrupted = 0, True
    while is_interrupted:
        number += 1
        s = Subject(tmp_path / str(number))
        is_interrupted = interrupted_at(number, lambda s=s: CALLS[name](s))
        shown = None
        with suppress(PoisonedError):
            shown = facts(s.store)
        s.store.close()
        with kvstore.open(s.place / "db") as again:
            assert shown in (None, facts(again))
    assert number > 5
