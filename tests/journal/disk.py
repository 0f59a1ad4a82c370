"""A disk in memory that keeps live and durable bytes apart, and a process that dies on it.

Every mutating call is a step. The disk can be told to die before any step, or in the middle of a
write; from then on every call dies too, as nothing runs in a dead process. Afterwards it yields
the images a new process might find: after a kill, what was written; after a power cut, what was
synced plus any part of the rest.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from typing import BinaryIO

from kvstore.errors import LockedError


class ProcessDied(BaseException):
    """The process is gone: not an Exception, so that nothing can handle it."""


class Inode:
    def __init__(self, live: bytes = b"", durable: bytes = b"") -> None:
        self.live = live
        self.durable = durable


class Disk:
    """`kvstore.journal.files.Files` in memory."""

    def __init__(self, image: dict[str, bytes] | None = None) -> None:
        self.inodes = {path: Inode(data, data) for path, data in (image or {}).items()}
        self.names_history = [dict(self.inodes)]  # since the last directory sync
        self.locked: set[str] = set()
        self.steps: list[str] = []
        self.die_before: int | None = None
        self.die_after_bytes: int | None = None  # of the write at that step
        self.fail: Callable[[str], OSError | None] = lambda step: None
        self.short_writes = False

    # -- Files --------------------------------------------------------------------------------

    def make_directory(self, path: str) -> None:
        pass

    def names(self, path: str) -> list[str]:
        return [os.path.basename(name) for name in self.inodes if os.path.dirname(name) == path]

    def create(self, path: str) -> DiskOutput:
        self.step(f"create {os.path.basename(path)}")
        self.inodes.setdefault(path, Inode()).live = b""
        self.names_history.append(dict(self.inodes))
        return DiskOutput(self, path)

    def append(self, path: str) -> DiskOutput:
        return DiskOutput(self, path)

    def read(self, path: str) -> BinaryIO:
        if path not in self.inodes:
            raise FileNotFoundError(path)
        return io.BytesIO(self.inodes[path].live)

    def truncate(self, path: str, size: int) -> None:
        self.step(f"truncate {os.path.basename(path)}")
        inode = self.inodes[path]
        inode.live = inode.durable = inode.live[:size]

    def rename(self, source: str, target: str) -> None:
        self.step(f"rename {os.path.basename(source)}")
        self.inodes[target] = self.inodes.pop(source)
        self.names_history.append(dict(self.inodes))

    def remove(self, path: str) -> None:
        self.step(f"remove {os.path.basename(path)}")
        del self.inodes[path]
        self.names_history.append(dict(self.inodes))

    def sync_directory(self, path: str) -> None:
        self.step("sync directory")
        self.names_history = [dict(self.inodes)]

    def lock(self, path: str) -> DiskLock:
        if path in self.locked:
            raise LockedError(path)
        return DiskLock(self, path)

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

    def killed(self) -> Disk:
        """What a new process finds after this one was killed: all that was written."""
        return Disk({path: inode.live for path, inode in self.inodes.items()})

    def power_cuts(self) -> Iterator[Disk]:
        """What it may find after a power cut: the synced bytes, and any more of the others."""
        for names in self.names_history:
            yield from self._cuts(names)

    def _cuts(self, names: dict[str, Inode]) -> Iterator[Disk]:
        unsynced = [path for path, inode in names.items() if inode.live != inode.durable]
        base = {path: inode.durable for path, inode in names.items()}
        yield Disk(base)
        for path in unsynced:
            live, durable = names[path].live, names[path].durable
            kept = len(durable) if live.startswith(durable) else 0
            for size in range(kept, len(live) + 1):
                yield Disk({**base, path: live[:size]})

    def holes(self) -> Iterator[Disk]:
        """What a reordering disk may leave: files at full length with zeros for what was lost."""
        for path, inode in self.inodes.items():
            kept = len(inode.durable)
            for start in range(kept, len(inode.live)):
                for end in (start + 1, start + 16, len(inode.live)):
                    hole = inode.live[:start] + bytes(len(inode.live[start:end]))
                    yield Disk(
                        {p: i.live for p, i in self.inodes.items()}
                        | {path: hole + inode.live[end:]}
                    )


class DiskOutput:
    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._name = os.path.basename(path)
        self._inode = disk.inodes[path]
        self._is_closed = False

    def write(self, data: bytes, /) -> int:
        if self._is_closed:
            raise ValueError("write to a closed file")
        disk = self._disk
        if disk.die_after_bytes is not None and disk.die_before == len(disk.steps) + 1:
            self._inode.live += data[: disk.die_after_bytes]
            disk.die_before = len(disk.steps)
        disk.step(f"write {self._name}")
        if disk.short_writes and len(data) > 1:
            data = data[: len(data) // 2]
        self._inode.live += data
        return len(data)

    def sync(self) -> None:
        self._disk.step(f"sync {self._name}")
        self._inode.durable = self._inode.live

    def close(self) -> None:
        self._is_closed = True


class DiskLock:
    """Held until closed."""

    def __init__(self, disk: Disk, path: str) -> None:
        self._disk = disk
        self._path = path
        disk.locked.add(path)

    def close(self) -> None:
        self._disk.locked.discard(self._path)
