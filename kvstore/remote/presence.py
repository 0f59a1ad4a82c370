"""Who has a shared store open: its owner, and the guests beside it.

    <store>/control/owner            the owner's process, since when, how many take-overs: JSON
    <store>/control/turn             a socket that ends with the owner's turn: guests wait at it
    <store>/control/guest-<pid>-*    one for each guest, locked by flock as long as it lives

Invariants
1. The kernel's lock on `<store>/LOCK` alone decides who owns. These files are for people, and for
   keepers, which end with the last guest.
2. A guest that was killed is not counted: the kernel has let its lock go. Whoever counts removes
   its file.
3. Nobody looks at the lock itself: a process that opens and closes `LOCK` gives up the lock of an
   owner in the same process. So errors name the owner that wrote itself down.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.base.forks import own, undivided
from kvstore.errors import KVStoreError, LockedError, UsageError, storage_errors
from kvstore.remote import control_socket
from kvstore.remote.control_socket import CONTROL_DIRECTORY, TURN_NAME

_RECORD: Final = "owner"
_GUEST: Final = "guest-"
_MOUNTS: Final = Path("/proc/self/mountinfo")

NETWORK: Final = frozenset(
    {"nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "afs", "ceph"}
    | {"lustre", "gpfs", "beegfs", "glusterfs", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs"}
)
"""File systems that other machines reach. A socket and a lock of the kernel concern one machine
alone."""


class Owning(NamedTuple):
    """The owner of a shared store, as it wrote down: its process, when it became the owner
    (nanoseconds since 1970), and how often one of several processes has taken the store over."""

    pid: int
    since_ns: int
    takeovers: int

    @property
    def is_there(self) -> bool:
        """Whether the process lives. Another process may have got its number."""
        try:
            os.kill(self.pid, 0)
        except PermissionError:
            return True
        except OSError:
            return False
        return self.pid > 0


def read_owner(store: Path) -> Owning | None:
    """The owner as it wrote itself down; None if none did, or the record is damaged. A process that
    was killed left its record: see `Owning.is_there`."""
    try:
        found = json.loads((store / CONTROL_DIRECTORY / _RECORD).read_bytes())
        return Owning(int(found["pid"]), int(found["since_ns"]), int(found["takeovers"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None


def note_owner(store: Path, *, is_takeover: bool) -> Owning:
    """Write down this process as the owner. Its caller has the store open to write. A record that
    cannot be written is left out: nothing depends on it."""
    before = read_owner(store)
    takeovers = (before.takeovers if before else 0) + is_takeover
    noted = Owning(os.getpid(), time.time_ns(), takeovers)
    place = store / CONTROL_DIRECTORY
    new = place / f"new-{secrets.token_hex(4)}"
    with suppress(OSError):
        try:
            new.write_text(json.dumps(noted._asdict()), encoding="utf-8")
            new.rename(place / _RECORD)
        except OSError:
            new.unlink(missing_ok=True)
    return noted


class Turn:
    """The turn of a process that opens a shared store, and owns it from then on: a lock on the
    store's directory.

    RocksDB's own lock decides. But RocksDB moves its log aside before it asks for the lock, so two
    processes that open at once hinder each other, and each try leaves a log behind. A guest
    therefore tries when it has the turn.
    """

    def __init__(self, store: Path) -> None:
        """Take the turn. Raises `LockedError` where another process has it."""
        with undivided(), storage_errors(str(store)):
            self._descriptor = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._descriptor)
                raise LockedError(str(store)) from error
            self._store = store
            self._end: socket.socket | None = None
            own(self, f"the turn to own {store}")

    def announce(self) -> None:
        """Let guests wait for the end of the turn. The caller has the store open, and listens."""
        with undivided():
            self._end = control_socket.listen(self._store, TURN_NAME)

    def fork_let_go(self) -> None:
        """Close the copies in a forked child: lock and socket are the parent's."""
        os.close(self._descriptor)
        if self._end is not None:
            os.close(self._end.detach())

    def close(self) -> None:
        """Give the turn back, and wake the guests that wait for it. Repeatable."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            if self._end is not None:
                self._end.close()


def wait_for_turn(store: Path, seconds: float) -> None:
    """Return when the turn of the owner has ended, by its close or its death, or after `seconds`.
    Sleeps where no owner has announced a turn."""
    try:
        end = control_socket.dial(store, seconds, TURN_NAME)
    except KVStoreError:
        time.sleep(seconds)
        return
    with end, suppress(OSError):
        end.recv(1)  # nobody sends: the socket ends, or time is over


class Presence:
    """Tells that this process is a guest, until it is closed or the process ends."""

    def __init__(self, store: Path) -> None:
        self._path = store / CONTROL_DIRECTORY / f"{_GUEST}{os.getpid()}-{secrets.token_hex(4)}"
        with undivided(), storage_errors(str(self._path)):
            self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            own(self, f"the place of a guest at {store}")

    def fork_let_go(self) -> None:
        """Close the copy in a forked child: the lock is the parent's."""
        os.close(self._descriptor)

    def close(self) -> None:
        """Tell it no more. Repeatable."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                self._path.unlink()
            os.close(descriptor)


def guests(store: Path) -> list[int]:
    """The processes of the guests that live, one for each handle. Costs some 10 us each."""
    place = store / CONTROL_DIRECTORY
    try:
        names = sorted(name for name in os.listdir(place) if name.startswith(_GUEST))
    except OSError:
        return []
    return [int(name.split("-")[1]) for name in names if _lives(place / name)]


def _lives(place: Path) -> bool:
    try:
        descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        # Its owner may have made it just now, and not locked it yet.
        if time.time() - os.fstat(descriptor).st_mtime > 1:
            place.unlink(missing_ok=True)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def sharing(store: Path) -> dict[str, Any]:
    """Who shares the store, as figures of `Store.stats`."""
    owner = read_owner(store)
    if owner is None or not owner.is_there:
        found: dict[str, Any] = {"owner_pid": None, "role_age_s": None}
    else:
        age_s = max(time.time_ns() - owner.since_ns, 0) / 1e9
        found = {"owner_pid": owner.pid, "role_age_s": round(age_s, 3)}
    return {
        **found,
        "takeovers": 0 if owner is None else owner.takeovers,
        "guests": len(guests(store)),
    }


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[:1] in (["T"], ["t"])


def require_local(store: Path, mounts: Path = _MOUNTS) -> None:
    """Raise `UsageError` for a store on a file system of the network."""
    kind = _file_system(store, mounts)
    if kind in NETWORK:
        raise UsageError(
            f"{store} is on {kind}, a file system of the network: processes share a store on one "
            "machine alone",
            "keep the store on a local disk; for other machines, serve it (kvstore serve) and "
            "connect by its URL, or follow a replica there",
        )


def _file_system(store: Path, mounts: Path) -> str:
    """The name of the file system that a path is on; empty where the system does not tell."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    place, best, kind = Path(os.path.realpath(store)), -1, ""
    for line in lines:
        words, _, rest = line.partition(" - ")
        fields = words.split(" ")
        if len(fields) < 5 or not rest:
            continue
        mounted = Path(fields[4].replace("\\040", " ").replace("\\011", "\t"))
        depth = len(mounted.parts)
        if depth >= best and (mounted == place or mounted in place.parents):
            best, kind = depth, rest.split(" ")[0]
    return kind
