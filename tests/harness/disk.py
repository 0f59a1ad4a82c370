"""A disk in memory that keeps cached and durable bytes apart, and a process that dies on it.

Every mutating call is a step. The disk can be told to die before any step, or in the middle of a
write; from then on every call dies too, as nothing runs in a dead process. Afterwards it yields the
images that a new process might find. After a kill this is everything that was written. After a
power cut each sector and name that was not synced has any state that it had since the last sync, in
every combination.

A failed fsync may forget the bytes that were to be written, as Linux does: the cache keeps the new
bytes, the disk the old ones, and the next fsync knows of nothing to write (`drops_on_failed_sync`).
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import random
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeAlias

from kvstore.errors import LockedError
from kvstore.limits import JOURNAL_SECTOR_BYTES

_Write: TypeAlias = "tuple[int, bytes | None]"
"""Bytes written at an offset; None where the file was cut there."""

Names: TypeAlias = "dict[str, Inode]"

_COMBINATIONS_MAX = 300
"""A file with more combinations of unsynced sectors than these is cut this often at random."""


class ProcessDied(BaseException):
    """The process is gone: not an Exception, so that nothing can handle it."""


class Inode:
    """A file: `live` is what the cache holds, `durable` what the disk does."""

    def __init__(self, live: bytes = b"", durable: bytes = b"") -> None:
        self.live = live
        self.durable = durable
        self.unsynced: list[_Write] = []

    def write(self, at: int, data: bytes | None) -> None:
        """Write into the cache, or cut the file."""
        self.live = _written(self.live, at, data)
        self.unsynced.append((at, data))

    def sync(self, count: int) -> None:
        """Write to the disk the first `count` writes that the cache knows to be unsynced."""
        for at, data in self.unsynced[:count]:
            self.durable = _written(self.durable, at, data)
        self.unsynced = self.unsynced[count:]

    def cuts(self, sector: int, rng: random.Random) -> Iterator[bytes]:
        """The bytes that a power cut may leave: every combination of states of the sectors, at
        every length that the file had, or at any on the way there."""
        states = [self.durable]
        for at, data in self.unsynced:
            states.append(_written(states[-1], at, data))
        if len(states) == 1:
            yield self.durable
            return
        end = max(map(len, states))
        padded = [state + bytes(end - len(state)) for state in states]
        versions = [
            sorted({state[at : at + sector] for state in padded}) for at in range(0, end, sector)
        ]
        lengths = {len(state) for state in states} | set(range(0, end, sector))
        lengths = {size for size in lengths if size >= min(map(len, states))}
        count = 1
        for choices in versions:
            count *= len(choices)
        if count * len(lengths) <= _COMBINATIONS_MAX:
            for sectors in itertools.product(*versions):
                yield from {b"".join(sectors)[:size] for size in lengths}
            return
        for _ in range(_COMBINATIONS_MAX // 3):
            image = b"".join(rng.choice(choices) for choices in versions)
            yield image[: rng.choice([*sorted(lengths), rng.randint(min(lengths), end), end, end])]


class MemoryDisk:
    """`kvstore.storage.journal.names.Files` in memory."""

    def __init__(self, image: dict[str, bytes] | None = None, *, sector: int | None = None) -> None:
        self.inodes = {path: Inode(data, data) for path, data in (image or {}).items()}
        self.synced_names: Names = dict(self.inodes)
        self.unsynced_names: list[Callable[[Names], None]] = []
        self.sector = JOURNAL_SECTOR_BYTES if sector is None else sector
        self.notes: dict[str, list[bytes]] = {}
        """The contents that lock files had, the newest last."""
        self.locked: set[str] = set()
        self.steps: list[str] = []
        self.die_before: int | None = None
        self.die_after_bytes: int | None = None  # of the write at that step
        self.fail: Callable[[str], OSError | None] = lambda step: None
        self.drops_on_failed_sync = False
        self.short_writes = False

    # -- Files --------------------------------------------------------------------------------

    def make_directory(self, path: str) -> None:
        pass

    def names(self, path: str) -> list[str]:
        paths = [*self.inodes, *self.notes]
        return [os.path.basename(each) for each in paths if os.path.dirname(each) == path]

    def create(self, path: str) -> DiskOutput:
        self.step(f"create {os.path.basename(path)}")
        inode = self.inodes.get(path)
        if inode is None:
            inode = Inode()
            self._name(lambda names: names.__setitem__(path, inode))
        elif inode.live:
            inode.write(0, None)
        return DiskOutput(self, path)

    def append(self, path: str) -> DiskOutput:
        return DiskOutput(self, path)

    def read(self, path: str) -> BinaryIO:
        if path in self.notes:
            return io.BytesIO(self.notes[path][-1])
        if path not in self.inodes:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return io.BytesIO(self.inodes[path].live)

    def harden(self, path: str, *, size: int, start: int) -> None:
        inode, name = self.inodes[path], os.path.basename(path)
        self.step(f"truncate {name}")
        inode.write(size, None)
        self.step(f"rewrite {name}")
        inode.write(start, inode.live[start:])
        self.sync_inode(name, inode)

    def rename(self, source: str, target: str) -> None:
        self.step(f"rename {os.path.basename(source)}")
        inode = self.inodes.get(source)
        inside = [path for path in self.inodes if os.path.dirname(path) == source]
        if inode is None and not inside:
            raise FileNotFoundError(errno.ENOENT, "no such file", source)

        def rename(names: Names) -> None:
            names.pop(source, None)
            if inode is not None:
                names[target] = inode
            for path in inside:
                if path in names:  # a power cut may have undone its creation
                    names[target + path[len(source) :]] = names.pop(path)

        self._name(rename)

    def remove(self, path: str) -> None:
        self.step(f"remove {os.path.basename(path)}")
        self.notes.pop(path, None)

        def remove(names: Names) -> None:
            names.pop(path, None)

        self._name(remove)

    def sync_directory(self, path: str) -> None:
        self.step("sync directory")
        self.synced_names, self.unsynced_names = dict(self.inodes), []

    def lock(self, path: str) -> DiskLock:
        if path in self.locked:
            raise LockedError(path)
        return DiskLock(self, path)

    def sync_inode(self, name: str, inode: Inode) -> None:
        count = len(inode.unsynced)  # without the writes that come while the fsync runs
        try:
            self.step(f"sync {name}")
        except OSError:
            if self.drops_on_failed_sync:
                inode.unsynced = []
            raise
        inode.sync(count)

    def _name(self, change: Callable[[Names], None]) -> None:
        change(self.inodes)
        self.unsynced_names.append(change)

    # -- dying --------------------------------------------------------------------------------

    def step(self, name: str) -> None:
        if self.dead:
            raise ProcessDied
        error = self.fail(name)
        if error is not None:
            raise error
        self.steps.append(name)

    @property
    def dead(self) -> bool:
        return self.die_before is not None and len(self.steps) >= self.die_before

    def killed(self) -> MemoryDisk:
        """The disk that a new process finds after a kill: all of the cache, synced or not."""
        again = MemoryDisk(sector=self.sector)
        copies: dict[int, Inode] = {}
        for names in (self.inodes, self.synced_names):
            for inode in names.values():
                copy = copies[id(inode)] = Inode(inode.live, inode.durable)
                copy.unsynced = list(inode.unsynced)
        again.inodes = {path: copies[id(inode)] for path, inode in self.inodes.items()}
        again.synced_names = {path: copies[id(i)] for path, i in self.synced_names.items()}
        then = dict(again.inodes)

        def catch_up(names: Names) -> None:
            names.clear()
            names.update(then)

        again.unsynced_names = [catch_up] if self.unsynced_names else []
        again.notes = {path: list(notes) for path, notes in self.notes.items()}
        return again

    def power_cuts(self, rng: random.Random | None = None) -> Iterator[MemoryDisk]:
        """The disks that a new process may find after a power cut."""
        rng = rng or random.Random(len(self.steps))
        for kept in itertools.product((False, True), repeat=len(self.unsynced_names)):
            names = dict(self.synced_names)
            for change in itertools.compress(self.unsynced_names, kept):
                change(names)
            yield from self._cuts(names, rng)

    def _cuts(self, names: Names, rng: random.Random) -> Iterator[MemoryDisk]:
        base = {path: inode.durable for path, inode in names.items()}
        yield self._image(base, rng)
        for path, inode in names.items():
            for image in inode.cuts(self.sector, rng):
                if image != inode.durable:
                    yield self._image({**base, path: image}, rng)

    def _image(self, files: dict[str, bytes], rng: random.Random) -> MemoryDisk:
        disk = MemoryDisk(files, sector=self.sector)
        disk.notes = {path: [rng.choice(notes)] for path, notes in self.notes.items()}
        return disk


class DiskOutput:
    """A file open for writing."""

    def __init__(self, disk: MemoryDisk, path: str) -> None:
        self._disk = disk
        self._path = path
        self._inode = disk.inodes[path]
        self._is_closed = False

    def write(self, data: bytes, /) -> int:
        if self._is_closed:
            raise ValueError("write to a closed file")
        disk, inode = self._disk, self._inode
        if disk.die_after_bytes is not None and disk.die_before == len(disk.steps) + 1:
            inode.write(len(inode.live), data[: disk.die_after_bytes])
            disk.die_before = len(disk.steps)
        disk.step(f"write {self._name}")
        if disk.short_writes and len(data) > 1:
            data = data[: len(data) // 2]
        inode.write(len(inode.live), data)
        return len(data)

    def sync(self) -> None:
        self._disk.sync_inode(self._name, self._inode)

    def close(self) -> None:
        self._is_closed = True

    @property
    def _name(self) -> str:
        """The file's name now: it may have been renamed since it was opened."""
        named = (path for path, inode in self._disk.inodes.items() if inode is self._inode)
        return os.path.basename(next(named, self._path))


class DiskLock:
    """Held until closed."""

    def __init__(self, disk: MemoryDisk, path: str) -> None:
        self._disk = disk
        self._path = path
        disk.locked.add(path)

    def write(self, data: bytes, /) -> None:
        if self._disk.dead:
            raise ProcessDied
        self._disk.notes.setdefault(self._path, [b""]).append(data)

    def close(self) -> None:
        self._disk.locked.discard(self._path)


def _written(before: bytes, at: int, data: bytes | None) -> bytes:
    if data is None:
        return before[:at]
    padded = before + bytes(max(0, at - len(before)))
    return padded[:at] + data + padded[at + len(data) :]
