"""Behaviour as plain text: a script of commands with their expected answers.

    # a comment
    put k v
    get k                 a block is some commands, a line of four dashes, and their output,
    ----                  up to an empty line
    v

Every block runs on every engine. `pytest tests/scripts --rewrite` writes the output into the script
instead of comparing it: review the difference as you would review code.

Words are text; `\\x00` escapes stand for other bytes and `""` for the empty key. In scripts of a
store the clock stands still, and begins at 10: commits take 10, 11, 12 and so on. In scripts whose
first command is `versions`, writes name their own time: `put k@5 v`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.base.span import Span
from kvstore.engine import Engine
from kvstore.errors import KVStoreError
from kvstore.mvcc import RangeTombstone, WriteSet
from tests.harness.timed import TimedVersions

OpenEngine = Callable[[Path], Engine]
OpenStore = Callable[[Path, kvstore.ManualClock], kvstore.Store]

FACTS = ["key", "keys", "as_of", "since", "upper", "name", "problem"]
FACTS += ["expected", "found", "span", "holder", "where", "read_at", "written_at"]
"""Fields of errors that scripts show, because they do not depend on the machine."""


class Script:
    """One script being run in a directory of its own."""

    def __init__(self, place: Path, open_engine: OpenEngine, open_store: OpenStore) -> None:
        self.place = place
        self.open_engine, self.open_store = open_engine, open_store
        self.clock = kvstore.ManualClock(10)
        self.store: Any = None
        self.engine: Any = None
        self.versions: Any = None
        self.imports: dict[str, bulk.Import] = {}
        self.kept: dict[str, Any] = {}
        self.restored = 0

    def run(self, text: str) -> str:
        """The script with the answers that were given."""
        try:
            return "".join(self._answered(block) for block in blocks(text))
        finally:
            if self.store is not None:
                self.store.close()
            if self.engine is not None:
                self.engine.close()

    def _answered(self, block: str) -> str:
        commands, dashes, _ = block.partition("\n----\n")
        if not dashes:
            return block
        lines = [line for line in commands.split("\n") if line and not line.startswith("#")]
        answers = [answer for line in lines for answer in self._execute(line)]
        return "\n".join([commands, "----", *answers]) + "\n\n"

    def _execute(self, line: str) -> Iterator[str]:
        lexer = shlex.shlex(line, posix=True)
        lexer.escape, lexer.whitespace_split, lexer.commenters = "", True, ""
        name, *words = lexer
        if name == "versions":
            self.engine = self.open_engine(self.place / "engine")
            self.versions = TimedVersions(self.engine)
            return
        if self.versions is None and self.store is None:
            self.store = self.open_store(self.place / "store", self.clock)
        prefix = "at_" if self.versions is not None else "do_"
        flags = dict(word.split("=", 1) for word in words if "=" in word)
        arguments = [raw(word) for word in words if "=" not in word]
        try:
            yield from getattr(self, prefix + name)(*arguments, **flags)
        except KVStoreError as error:
            yield error_line(error)

    # -- a store: writing -------------------------------------------------------------------

    def do_put(self, key: bytes, value: bytes) -> Iterator[str]:
        yield f"@{self.store.put(key, value):d}"

    def do_del(self, key: bytes) -> Iterator[str]:
        yield f"@{self.store.delete(key):d}"

    def do_del_range(self, start: bytes, end: bytes, idempotent: str = "") -> Iterator[str]:
        at = self.store.delete_range(start, end, idempotent=idempotent == "true")
        yield "nothing to delete" if at is None else f"@{at:d}"

    def do_batch(self, *words: bytes) -> Iterator[str]:
        """`batch put k v ; del k ; del_range a b`"""
        with self.store.batch() as batch:
            for op, *arguments in split(words):
                getattr(batch, VERBS[op])(*arguments)
        yield "nothing written" if batch.timestamp is None else f"@{batch.timestamp:d}"

    # -- a store: time ----------------------------------------------------------------------

    def do_advance(self, ns: bytes) -> Iterator[str]:
        self.clock.advance(int(ns))
        return iter(())

    def do_reopen(self) -> Iterator[str]:
        self.store.close()
        self.store = self.open_store(self.place / "store", self.clock)
        yield frontiers(self.store)

    def do_frontiers(self) -> Iterator[str]:
        yield frontiers(self.store)

    # -- a store: reading -------------------------------------------------------------------

    def do_get(self, key: bytes, as_of: str | None = None) -> Iterator[str]:
        yield shown(self.store.get(key, time(as_of)))

    def do_scan(self, as_of: str | None = None, **how: str) -> Iterator[str]:
        limit = int(how.pop("limit")) if "limit" in how else None
        reverse = how.pop("reverse", "") == "true"
        bounds = {name: raw(word) for name, word in how.items()}
        rows = self.store.scan(**bounds, as_of=time(as_of), reverse=reverse, limit=limit)
        return listed(f"{text(key)} = {text(value)}" for key, value in rows)

    def do_history(self, key: bytes) -> Iterator[str]:
        return listed(f"@{v.timestamp:d} {shown(v.value)}" for v in self.store.history(key))

    def do_changes(self, since: str, upto: str | None = None, **how: str) -> Iterator[str]:
        bounds = {name: raw(how.pop(name)) for name in ("start", "end", "prefix") if name in how}
        found = self.store.changes(time(since), time(upto), **bounds, **how)
        return listed(map(change_line, found))

    def do_snapshot(self, name: bytes, as_of: str | None = None) -> Iterator[str]:
        """`snapshot name` opens a snapshot or, if it is open, reads it."""
        key = text(name)
        if key not in self.kept:
            self.kept[key] = self.store.snapshot(time(as_of))
        rows = self.kept[key].scan()
        return listed(f"{text(k)} = {text(v)}" for k, v in rows)

    # -- a store: imports and backups ---------------------------------------------------------

    def do_build(self, name: bytes, *words: bytes) -> Iterator[str]:
        """`build name put k v ; del k`: stages and seals an import, without the store."""
        made = bulk.Import.create(self.place / text(name), import_id=len(self.imports) + 1)
        with made.writer() as writer:
            for op, *arguments in split(words):
                getattr(writer, VERBS[op])(*arguments)
        made.seal()
        self.imports[text(name)] = made
        return iter(())

    def do_import(self, name: bytes, on_conflict: Any = "overwrite") -> Iterator[str]:
        staging = self.imports[text(name)].staging
        yield f"@{bulk.ingest(self.store, staging, on_conflict=on_conflict):d}"

    def do_revert(self, name: bytes) -> Iterator[str]:
        yield f"@{self.store.revert_import(self.imports[text(name)].import_id):d}"

    def do_backup(self) -> Iterator[str]:
        info = Collection(self.place / "backups").backup(self.store)
        yield f"[{info.lower:d}, {info.upper:d}) rows={info.rows}"

    def do_restore(self, as_of: str | None = None, history: str = "true") -> Iterator[str]:
        """Restores into a new store and shows its changes, or its state."""
        self.restored += 1
        path = self.place / f"restored-{self.restored}"
        Collection(self.place / "backups").restore(
            path, as_of=time(as_of), history=history == "true"
        )
        with kvstore.open(path, clock=self.clock) as restored:
            revisions: Any = "all" if history == "true" else "latest"
            yield from listed(map(change_line, restored.changes(0, revisions=revisions)))

    # -- a store: conditions and transactions -------------------------------------------------

    def do_put_if(
        self, key: bytes, value: bytes, expected: str = "", unchanged_since: str | None = None
    ) -> Iterator[str]:
        """`expected=nothing` means absent; without `expected` only the time counts."""
        yield f"@{self.store.put_if(key, value, **condition(expected, unchanged_since)):d}"

    def do_del_if(
        self, key: bytes, expected: str = "", unchanged_since: str | None = None
    ) -> Iterator[str]:
        yield f"@{self.store.delete_if(key, **condition(expected, unchanged_since)):d}"

    def do_pop(self, key: bytes) -> Iterator[str]:
        yield shown(self.store.pop(key))

    def do_txn(self, name: bytes, *words: bytes) -> Iterator[str]:
        """`txn t get k ; put k v ; scan a z ; commit`: begins or continues the transaction t."""
        txn = self.kept.setdefault(text(name), None) or self.store.transaction()
        self.kept[text(name)] = txn
        for op, *arguments in split(words):
            if op == "get":
                yield shown(txn.get(*arguments))
            elif op == "scan":
                yield from listed(f"{text(k)} = {text(v)}" for k, v in txn.scan(*arguments))
            elif op == "commit":
                at = txn.commit()
                yield "nothing to write" if at is None else f"@{at:d}"
            else:
                getattr(txn, VERBS[op])(*arguments)

    # -- a store: history that goes -----------------------------------------------------------

    def do_gc(self, before: str) -> Iterator[str]:
        done = self.store.gc(before=int(before))
        held = " held back" if done.held_back else ""
        yield f"since={done.since:d} versions={done.versions} ranges={done.range_tombstones}{held}"
        yield from (f"lost hold {hold.name}" for hold in done.lost_holds)

    def do_clear(self, start: bytes, end: bytes) -> Iterator[str]:
        yield f"@{self.store.clear_range(start, end):d}"

    def do_revert_range(self, start: bytes, end: bytes, to: str) -> Iterator[str]:
        at = self.store.revert_range(start, end, to=int(to))
        yield "nothing to revert" if at is None else f"@{at:d}"

    def do_hold(
        self, name: bytes, at: str | None = None, max_age_ns: str | None = None
    ) -> Iterator[str]:
        age = None if max_age_ns is None else timedelta(microseconds=int(max_age_ns) / 1000)
        self.kept[text(name)] = self.store.hold(text(name), at=time(at), max_age=age)
        yield f"{text(name)} at {self.kept[text(name)].timestamp:d}"

    def do_move(self, name: bytes, to: bytes) -> Iterator[str]:
        self.kept[text(name)].move(int(to))
        yield f"{text(name)} at {self.kept[text(name)].timestamp:d}"

    def do_release(self, name: bytes) -> Iterator[str]:
        self.kept.pop(text(name)).release()
        return iter(())

    def do_close(self, name: bytes) -> Iterator[str]:
        self.kept.pop(text(name)).close()
        return iter(())

    def do_verify(self) -> Iterator[str]:
        found = self.store.verify()
        yield f"keys={found.keys} versions={found.versions} ranges={found.range_tombstones}"
        yield from map(str, found.problems)

    # -- explicit timestamps ------------------------------------------------------------------

    def at_put(self, key_at: bytes, value: bytes) -> Iterator[str]:
        key, at = stamped(key_at)
        self.versions.put(key, value, at=at)
        return iter(())

    def at_del(self, key_at: bytes) -> Iterator[str]:
        key, at = stamped(key_at)
        self.versions.delete(key, at=at)
        return iter(())

    def at_del_range(self, start: bytes, end_at: bytes) -> Iterator[str]:
        end, at = stamped(end_at)
        self.versions.delete_range(start, end, at=at)
        return iter(())

    def at_batch(self, *words: bytes, at: str) -> Iterator[str]:
        writes = WriteSet()
        for op, *arguments in split(words):
            getattr(writes, VERBS[op])(*arguments)
        self.versions.apply(writes, at=int(at))
        return iter(())

    def at_get(self, key: bytes, as_of: str) -> Iterator[str]:
        yield shown(self.versions.get(key, int(as_of)))

    def at_scan(
        self, as_of: str, start: str = "", end: str | None = None, reverse: str = ""
    ) -> Iterator[str]:
        span = Span(raw(start), None if end is None else raw(end))
        chunks = self.versions.scan(span, int(as_of), reverse=reverse == "true")
        pairs = (pair for chunk in chunks for pair in zip(*chunk, strict=True))
        return listed(f"{text(key)} = {text(value)}" for key, value in pairs)

    def at_history(self, key: bytes) -> Iterator[str]:
        return listed(f"@{v.timestamp:d} {shown(v.value)}" for v in self.versions.history(key))

    def at_diff(
        self,
        since: str,
        upto: str,
        revisions: str = "all",
        start: str = "",
        end: str | None = None,
    ) -> Iterator[str]:
        span = Span(raw(start), None if end is None else raw(end))
        latest = revisions == "latest"
        for found in self.versions.diff(span, since=int(since), upto=int(upto), latest=latest):
            if isinstance(found, RangeTombstone):
                yield f"@{found.timestamp:d} delete_range [{text(found.start)}, {text(found.end)})"
            else:
                yield f"@{found.timestamp:d} {text(found.key)} {shown(found.value)}"

    def at_ranges(self) -> Iterator[str]:
        """The fragments, with the stack over each."""
        pieces = self.versions.view.fragments.pieces(Span())
        return listed(f"[{text(a)}, {text(b)}) {list(stack)}" for a, b, stack in pieces)

    def at_reopen(self) -> Iterator[str]:
        self.versions = TimedVersions(self.engine)
        return iter(())


VERBS = {"put": "put", "del": "delete", "del_range": "delete_range"}


def blocks(script: str) -> list[str]:
    """The script cut after each answer."""
    found, current, answering = [], [], False
    for line in script.split("\n"):
        current.append(line)
        answering = answering or line == "----"
        if answering and not line:
            found.append("\n".join(current) + "\n")
            current, answering = [], False
    rest = "\n".join(current)
    return [*found, rest + "\n\n" if answering else rest]


def split(words: tuple[bytes, ...]) -> list[list[Any]]:
    """Words between semicolons: the operations of a batch."""
    operations: list[list[Any]] = [[]]
    for word in words:
        if word == b";":
            operations.append([])
        else:
            operations[-1].append(word)
    return [[text(op), *arguments] for op, *arguments in operations]


def raw(word: str) -> bytes:
    return word.encode("latin-1").decode("unicode_escape").encode("latin-1")


def text(key: bytes) -> str:
    return repr(key)[2:-1] if key else '""'


def shown(value: bytes | None) -> str:
    return "nothing" if value is None else text(value)


def condition(expected: str, unchanged_since: str | None) -> dict[str, Any]:
    """The condition of a conditional write."""
    given: dict[str, Any] = {"unchanged_since": time(unchanged_since)}
    if expected:
        given["expected"] = None if expected == "nothing" else raw(expected)
    return given


def time(word: str | None) -> int | None:
    return None if word is None else int(word)


def stamped(word: bytes) -> tuple[bytes, int]:
    key, _, at = word.rpartition(b"@")
    return key, int(at)


def listed(lines: Any) -> Iterator[str]:
    empty = True
    for line in lines:
        empty = False
        yield line
    if empty:
        yield "(nothing)"


def change_line(change: Any) -> str:
    what = f"@{change.timestamp:d} {change.op} {text(change.key)}"
    if change.end_key is not None:
        return f"@{change.timestamp:d} {change.op} [{text(change.key)}, {text(change.end_key)})"
    return what if change.value is None else f"{what} = {text(change.value)}"


def frontiers(store: Any) -> str:
    return f"since={store.since:d} upper={store.upper:d}"


def error_line(error: KVStoreError) -> str:
    """Class and facts of an error, by which a caller can decide."""
    facts = {name: getattr(error, name) for name in FACTS if hasattr(error, name)}
    if "holder" in facts:  # in brackets stand the process and the times of its claim
        facts["holder"] = facts["holder"].partition(" (")[0]
    told = (f"{name}={fact_text(fact)}" for name, fact in facts.items())
    return " ".join([f"error {type(error).__name__}", *told])


def fact_text(fact: Any) -> str:
    if isinstance(fact, bytes):
        return text(fact)
    if isinstance(fact, tuple):
        return ",".join(map(fact_text, fact))
    if fact is None:
        return "nothing"
    return f"{fact:d}" if isinstance(fact, int) else str(fact)
