"""A disk as a power cut may leave it, from a recording of what a process did to its files.

`recorder.c` records each call that changes a file or a name. A power cut comes at any point of the
recording, and loses any part of the unsynced changes before it:

* Bytes of a file are safe after an fsync of the file. If the disk keeps the order of later bytes, a
  beginning of them is there, with nothing, zeros or garbage behind it. If it does not, each sector
  has its content from before or after, and the file may have any length between.
* A name (made, renamed, linked or removed) is safe after an fsync of its directory. Each later
  change of a name is lost or kept, independently of others. A change that follows a lost change of
  the same name is lost too. A rename is atomic.

Nothing is assumed of the order in which the disk takes the bytes of several files, and names.
RocksDB's log needs the order within a file: see `kvstore.engine.logs`.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvstore.limits import JOURNAL_SECTOR_BYTES

_HEAD = struct.Struct("<cHHQQ")
_SOURCE = Path(__file__).with_name("recorder.c")


def compiler() -> str | None:
    """The C compiler; None where the machine has none, or names the recorded calls differently."""
    if sysconfig.get_platform().partition("-")[0] != "linux":
        return None
    return shutil.which(os.environ.get("CC", "cc"))


def build(directory: Path) -> Path:
    """Compile the recorder. A tenth of a second."""
    library = directory / "recorder.so"
    command = [str(compiler()), "-w", "-O1", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
    subprocess.run(command, check=True)
    return library


class Record(NamedTuple):
    """One call. `op` is c(reate), w(rite), t(runcate), s(ync), r(ename), l(ink), u(nlink), m(kdir).

    Paths are below the recorded directory, which is "".
    """

    op: str
    path: str
    second: str
    offset: int
    data: bytes


def records(trace: Path) -> Iterator[Record]:
    """The calls of a recording, in order."""
    whole = trace.read_bytes()
    at = 0
    while at < len(whole):
        op, length, other, offset, size = _HEAD.unpack_from(whole, at)
        at += _HEAD.size
        path, second = whole[at : at + length], whole[at + length : at + length + other]
        at += length + other
        yield Record(op.decode(), _normal(path), _normal(second), offset, whole[at : at + size])
        at += size


def _normal(path: bytes) -> str:
    found = os.path.normpath(path.decode()) if path else ""
    return "" if found == "." else found


@dataclass(eq=False)
class _File:
    changes: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Each change is some bytes at an offset. None cuts the file there."""
    synced: int = 0
    """The number of changes, from the first, that are safe."""

    def all(self) -> bytes:
        content = bytearray()
        for at, data in self.changes:
            _change(content, at, data)
        return bytes(content)

    def content(self, rng: random.Random, *, in_order: bool) -> bytes:
        content = bytearray()
        for at, data in self.changes[: self.synced]:
            _change(content, at, data)
        synced = bytes(content)
        unsynced = self.changes[self.synced :]
        kept = rng.randint(0, len(unsynced))
        for at, data in unsynced[:kept]:
            _change(content, at, data)
        if not in_order:
            return _mixed(synced, bytes(content), rng)
        if kept < len(unsynced):
            self._tear(content, *unsynced[kept], rng)
        return bytes(content)

    def _tear(self, content: bytearray, at: int, data: bytes | None, rng: random.Random) -> None:
        """Apply a part of one more change, with nothing, zeros or garbage behind it."""
        if data is None or at < len(content):
            return
        part = data[: rng.randint(0, len(data))]
        rest = len(data) - len(part)
        behind = rng.choice([b"", bytes(rest), rng.randbytes(rest)])
        _change(content, at, part + behind)


def _mixed(before: bytes, after: bytes, rng: random.Random) -> bytes:
    """Take each sector from one of the two contents, and cut the result at a length between
    theirs."""
    length = rng.randint(*sorted((len(before), len(after))))
    before, after = before.ljust(length, b"\0"), after.ljust(length, b"\0")
    mixed = bytearray()
    for at in range(0, length, JOURNAL_SECTOR_BYTES):
        mixed += rng.choice([before, after])[at : min(at + JOURNAL_SECTOR_BYTES, length)]
    return bytes(mixed)


def _change(content: bytearray, at: int, data: bytes | None) -> None:
    if data is None:
        del content[at:]
        content.extend(bytes(at - len(content)))
        return
    content.extend(bytes(max(at - len(content), 0)))
    content[at : at + len(data)] = data


@dataclass(eq=False)
class _Directory:
    names: dict[str, _Node] = field(default_factory=dict)


_Node = _File | _Directory


@dataclass(eq=False)
class _Renaming:
    """One change of names: for each directory the name and its new file, None where the name is
    removed."""

    parts: list[tuple[_Directory, str, _Node | None]]
    is_synced: bool = False


class RecordedDisk:
    """Takes the calls of a recording, one after the other. `in_order`: see above."""

    def __init__(self, *, in_order: bool) -> None:
        self._in_order = in_order
        self._root = _Directory()
        self._changes: list[_Renaming] = []

    def take(self, record: Record) -> None:
        """Make one more call."""
        if record.op in "swt":
            node = self._find(record.path)
            if record.op == "s" and node is not None:
                self._sync(node)
            elif isinstance(node, _File):
                node.changes.append((record.offset, record.data if record.op == "w" else None))
        elif record.op == "r":
            node = self._find(record.path)
            self._rename((record.path, None), (record.second, node))
        elif record.op == "l":
            self._rename((record.second, self._find(record.path)))
        else:
            made = {"c": _File, "m": _Directory, "u": lambda: None}[record.op]()
            self._rename((record.path, made))

    def files(self) -> dict[str, bytes]:
        """All files as the process sees them; they equal the real files if the recording is
        complete."""
        found: dict[str, bytes] = {}
        inside: list[tuple[str, _Node]] = [("", self._root)]
        while inside:
            path, node = inside.pop()
            if isinstance(node, _Directory):
                inside += [(os.path.join(path, name), each) for name, each in node.names.items()]
            else:
                found[path] = node.all()
        return found

    def cut(self, target: Path, rng: random.Random) -> None:
        """Write the files behind a power cut after the last call to `target`, which must not
        exist."""
        loss = rng.choice([0.0, 0.2, 0.5, 1.0])
        names: dict[tuple[_Directory, str], _Node | None] = {}
        lost: set[tuple[_Directory, str]] = set()
        for change in self._changes:
            places = {(directory, name) for directory, name, _ in change.parts}
            if not change.is_synced and (places & lost or rng.random() < loss):
                lost |= places
            else:
                names |= {(directory, name): node for directory, name, node in change.parts}
        left: dict[_Directory, dict[str, _Node]] = {}
        for (directory, name), node in names.items():
            if node is not None:
                left.setdefault(directory, {})[name] = node
        files = dict.fromkeys(node for node in names.values() if isinstance(node, _File))
        contents = {file: file.content(rng, in_order=self._in_order) for file in files}
        _write(self._root, target, left, contents)

    def _find(self, path: str) -> _Node | None:
        """The file at the path. None: that file was removed, and is still open."""
        node: _Node | None = self._root
        for name in filter(None, path.split("/")):
            assert isinstance(node, _Directory)
            node = node.names.get(name)
        return node

    def _rename(self, *changes: tuple[str, _Node | None]) -> None:
        parts = []
        for path, node in changes:
            parent, _, name = path.rpartition("/")
            directory = self._find(parent)
            assert isinstance(directory, _Directory)
            parts.append((directory, name, node))
            directory.names.pop(name, None)
            if node is not None:
                directory.names[name] = node
        self._changes.append(_Renaming(parts))

    def _sync(self, node: _Node) -> None:
        if isinstance(node, _File):
            node.synced = len(node.changes)
            return
        for change in self._changes:
            if any(directory is node for directory, _, _ in change.parts):
                change.is_synced = True


def _write(
    directory: _Directory,
    target: Path,
    left: dict[_Directory, dict[str, _Node]],
    contents: dict[_File, bytes],
) -> None:
    target.mkdir()
    for name, node in sorted(left.get(directory, {}).items()):
        if isinstance(node, _Directory):
            _write(node, target / name, left, contents)
        else:
            (target / name).write_bytes(contents[node])
