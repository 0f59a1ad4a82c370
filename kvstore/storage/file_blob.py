"""Blobs as local files, which any number of processes may share.

A put writes `.tmp-*` beside the target, fsyncs it, links it to its name (which fails where the name
is taken, unlike a rename) and fsyncs the folder. A crash leaves at most a `.tmp-*` file, which no
call lists and `sweep` removes.

A file of 64 KiB or more is written past the page cache, 1 MiB at a time. Nobody reads a part soon,
so pages of the page cache would be found, zeroed and written for nothing: an increment of 700 kB
takes 1.3 ms with its fsync, and 2.8 ms through the page cache. Other processes gain more. A file of
30 MB in the page cache goes to the disk at its fsync. A service that calls fsync on the same disk
then waits 10 to 17 ms for the whole file. Past the page cache the service waits for 1 MiB.

Direct writes need aligned memory. The process keeps one aligned buffer, because most of the cost
lies in fresh pages. A write goes through the page cache while another thread has the buffer, and
where the file system refuses direct writes.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock

from kvstore.journal import OS_FILES
from kvstore.storage.contract import BlobInfo, name_taken, require_name, restore_existing
from kvstore.storage.os_errors import not_done, translate_os_error
from kvstore.storage.patience import PATIENCE, Patience

_TEMPORARY = ".tmp-"
DIRECT: int = getattr(os, "O_DIRECT", 0)
_DIRECT_BYTES_MIN = 64 << 10
"""Smaller files are as quick through the page cache."""
_SLICE_BYTES = 1 << 20
"""Size of a direct write, and of the buffer. The process holds as much of it as it has used."""
_BLOCK_BYTES = 4096
"""The unit of direct writes, on every disk in use."""


class FileBlob:
    """Blobs as files under `root`; see the module."""

    def __init__(self, root: str | os.PathLike[str], *, patience: Patience = PATIENCE) -> None:
        self.root = Path(root)
        self.patience = patience
        self._made: set[str] = set()

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """See `Blob.put`. Costs one write and, if durable, two fsyncs (file, folder)."""
        path = f"{self.root}/{require_name(name)}"  # text: `Path` objects take 0.1 ms more
        folder = os.path.dirname(path)
        try:
            self._make_folder(folder)
        except OSError as error:
            raise not_done(f"put of {path}", error) from error
        try:
            temporary = f"{folder}/{_TEMPORARY}{secrets.token_hex(8)}"
            try:
                if durable:
                    write_synced(temporary, data)
                else:
                    Path(temporary).write_bytes(data)
                os.link(temporary, path)
            except FileNotFoundError:  # somebody removed the folder
                self._made.clear()
                raise
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
            if durable:
                OS_FILES.sync_directory(folder)
        except FileExistsError:
            if self.get(name) != data:
                raise name_taken(name) from None
            try:  # an earlier put may have failed before its fsync
                OS_FILES.sync_directory(folder)
            except OSError as error:
                raise translate_os_error(f"put of {path}", error) from error
        except OSError as error:
            raise translate_os_error(f"put of {path}", error) from error

    def put_file(self, name: str, path: Path) -> None:
        """See `TakesFiles.put_file`. Costs two fsyncs."""
        target = f"{self.root}/{require_name(name)}"
        folder = os.path.dirname(target)
        temporary = f"{folder}/{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            os.makedirs(folder, exist_ok=True)
            try:
                with path.open("rb") as source, open(temporary, "xb") as copy:
                    shutil.copyfileobj(source, copy, _SLICE_BYTES)
                    copy.flush()
                    os.fsync(copy.fileno())
                os.replace(temporary, target)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
            OS_FILES.sync_directory(folder)
        except OSError as error:
            raise translate_os_error(f"put of {target}", error) from error

    def get(self, name: str) -> bytes | None:
        """See `Blob.get`."""
        try:
            with OS_FILES.read(str(self.path(name))) as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise not_done(f"get of {name}", error) from error

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        """See `Blob.get_range`."""
        try:
            with OS_FILES.read(str(self.path(name))) as file:
                return os.pread(file.fileno(), length, start)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise not_done(f"get of {name}", error) from error

    def size(self, name: str) -> int | None:
        """See `Blob.size`."""
        try:
            return self.path(name).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise not_done(f"size of {name}", error) from error

    def delete(self, name: str) -> int | None:
        """See `Blob.delete`."""
        path = self.path(name)
        try:
            size = path.stat().st_size
            path.unlink()
            OS_FILES.sync_directory(str(path.parent))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise translate_os_error(f"delete of {path}", error) from error
        return size

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """See `Blob.list`. Walks the folder the prefix lies in."""
        folder = prefix.rpartition("/")[0]
        try:
            for name in sorted(_names(self.root, folder)):
                with suppress(FileNotFoundError):  # deleted since the walk
                    if name.startswith(prefix):
                        yield BlobInfo(name, (self.root / name).stat().st_size)
        except OSError as error:
            raise not_done(f"list of {self.root / folder}", error) from error

    def restore(self, name: str) -> None:
        """See `Blob.restore`: deleted files are not kept."""
        restore_existing(self, name)

    def sweep(self, *, before_ns: int) -> int:
        """Remove the files of crashed puts last written before `before_ns`; returns how many."""
        swept = 0
        try:
            for path in self.root.rglob(f"{_TEMPORARY}*"):
                with suppress(FileNotFoundError):  # its put has just ended
                    if path.stat().st_mtime_ns < before_ns:
                        path.unlink()
                        swept += 1
        except OSError as error:
            raise translate_os_error(f"sweep of {self.root}", error) from error
        return swept

    def path(self, name: str) -> Path:
        """The file of `name`, whether it is there or not."""
        return self.root / require_name(name)

    def _make_folder(self, folder: str) -> None:
        """Create `folder` durably: every new level's entry is synced in the level above."""
        if folder in self._made:
            return
        if not os.path.isdir(folder):
            above = os.path.dirname(folder) or "."
            if folder != above:
                self._make_folder(above)
            Path(folder).mkdir(exist_ok=True)
            OS_FILES.sync_directory(above)
        self._made.add(folder)


def _names(root: Path, folder: str) -> Iterator[str]:
    """Every file below `folder`, by its path from `root`, in no order."""
    with suppress(FileNotFoundError), os.scandir(root / folder) as entries:
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir():
                yield from _names(root, name)
            elif not entry.name.startswith(_TEMPORARY):
                yield name


def write_synced(path: str | Path, data: bytes) -> None:
    """Write `data` to the new file `path`, and return once it survives the machine.

    Its name may not survive: the caller fsyncs the folder. Raises `OSError`; a part of the file may
    be there then.
    """
    is_fit = bool(DIRECT) and len(data) >= _DIRECT_BYTES_MIN
    if not (is_fit and write_buffer.lock.acquire(blocking=False)):
        _write(path, iter([memoryview(data)]), len(data))
        return
    try:
        _write(path, write_buffer.slices(data), len(data), DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        with suppress(FileNotFoundError):
            os.unlink(path)
        _write(path, iter([memoryview(data)]), len(data))
    finally:
        write_buffer.lock.release()


class _Buffer:
    """Aligned memory, kept for the life of the process."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._memory: mmap.mmap | None = None

    def slices(self, data: bytes) -> Iterator[memoryview]:
        """Views of the buffer with one slice of `data` after the other, the last one padded to
        whole blocks. The caller has the lock."""
        if self._memory is None:
            # Private: a forked process would write into a shared mapping, which is the default.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._memory = mmap.mmap(-1, _SLICE_BYTES, flags=flags)
        for start in range(0, len(data), _SLICE_BYTES):
            filled = min(_SLICE_BYTES, len(data) - start)
            end = -(-filled // _BLOCK_BYTES) * _BLOCK_BYTES
            self._memory[:filled] = memoryview(data)[start : start + filled]
            self._memory[filled:end] = bytes(end - filled)
            yield memoryview(self._memory)[:end]


write_buffer = _Buffer()


def _write(path: str | Path, slices: Iterator[memoryview], size: int, direct: int = 0) -> None:
    """Write `slices` to a new file, and cut the file to `size` bytes.

    A direct write takes whole blocks, so the padding of the last block is cut off again. That is
    0.1 ms quicker than writing the last bytes through the page cache.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | direct, 0o666)
    try:
        for piece in slices:
            while piece:
                piece = piece[os.write(file, piece) :]
        if direct:
            os.ftruncate(file, size)
        os.fsync(file)
    finally:
        os.close(file)
