"""The Unix socket on which the owner of a store listens, in the store's own directory.

    <store>/control/          mode 0700: only the user of the owner reaches the socket
    <store>/control/socket    accepts connections as long as the owner listens
    <store>/control/turn      accepts nothing, and ends once the owner of a shared store has let go
    <store>/control/readers-* sockets for the reader processes of the owner

Invariants
1. Only the process that has the store open to write makes and removes the socket, and it does both
   while it has the store's lock. So a socket that an owner finds is stale, and no owner removes the
   socket of another owner.
2. The socket gets its name once it accepts connections. A refused connection means that its owner
   is gone.
3. No umask makes the socket public: the mode of the directory decides, and `mkdir` never adds bits.

An address of a Unix socket has some 100 bytes. A longer path is reached through the descriptor of
its directory, by Linux's `/proc/self/fd`.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from kvstore.errors import (
    DeterminateError,
    KVStoreError,
    NotListeningError,
    UsageError,
    storage_error,
)
from kvstore.limits import CONTROL_BACKLOG

CONTROL_DIRECTORY: Final = "control"
SOCKET_NAME: Final = "socket"
TURN_NAME: Final = "turn"
HELPERS_PREFIX: Final = "readers-"
_ADDRESS_BYTES_MAX: Final = 100
"""Bytes of an address. The system has 108 on Linux and 104 on macOS, with the final zero."""

_DESCRIPTORS: Final = Path("/proc/self/fd")


def listen(store: Path, name: str = SOCKET_NAME) -> socket.socket:
    """A socket at its place in the directory `store`, which accepts connections.

    Another `name` is `TURN_NAME`, or begins with `HELPERS_PREFIX`: the owner tells it to its
    helpers. The caller has the store open to write. Raises `AccessDeniedError` where the directory
    takes no files, and `UsageError` where its file system has no sockets, or no way to a path of
    this length.
    """
    place = store / CONTROL_DIRECTORY
    listener = socket.socket(socket.AF_UNIX)
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        place.chmod(0o700)
        if name == SOCKET_NAME:
            _remove_stale(place)
        new = f"new-{secrets.token_hex(4)}"
        with short(place, new) as address:
            listener.bind(address)
        (place / new).chmod(0o600)
        listener.listen(CONTROL_BACKLOG)
        (place / new).rename(place / name)
    except OSError as error:
        listener.close()
        raise _no_socket(place, error) from error
    except BaseException:
        listener.close()
        raise
    return listener


def remove(store: Path, name: str = SOCKET_NAME) -> None:
    """Take the socket away. The caller still has the store open to write."""
    with suppress(OSError):  # the directory was removed, or takes no changes: then it is stale
        (store / CONTROL_DIRECTORY / name).unlink()


def dial(store: Path, timeout: float, name: str = SOCKET_NAME) -> socket.socket:
    """A connection to the owner of the store in the directory `store`.

    Raises `NotListeningError` if nobody listens, `AccessDeniedError` if the owner is of another
    user, `DeterminateError` if it does not accept the connection within `timeout` seconds.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        # A connection that is not blocking is refused at once where many wait to be accepted.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout))
        with short(store / CONTROL_DIRECTORY, name) as address:
            connection.connect(address)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(0))
    except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
        connection.close()
        raise NotListeningError(str(store)) from None
    except BlockingIOError as error:
        connection.close()
        cause = f"it accepted no connection within {timeout:g} s: was its process stopped?"
        raise DeterminateError(f"connecting to the owner of {store}", cause) from error
    except OSError as error:
        connection.close()
        raise storage_error(str(store / CONTROL_DIRECTORY), error) from error
    except BaseException:
        connection.close()
        raise
    connection.settimeout(timeout)
    return connection


@contextmanager
def short(place: Path, name: str) -> Iterator[bytes]:
    """An address of the socket `name` in the directory `place`, valid within the block."""
    address = os.fsencode(place / name)
    if len(address) <= _ADDRESS_BYTES_MAX:
        yield address
        return
    if not _DESCRIPTORS.is_dir():
        raise UsageError(
            f"the path of the socket in {place} has {len(address)} bytes, of at most "
            f"{_ADDRESS_BYTES_MAX}",
            "use a shorter path, for example by a symbolic link to the store's directory",
        )
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield os.fsencode(_DESCRIPTORS / str(descriptor) / name)
    finally:
        os.close(descriptor)


def _remove_stale(place: Path) -> None:
    """Remove the sockets of owners that were killed, and of their helpers."""
    for name in os.listdir(place):
        if name in (SOCKET_NAME, TURN_NAME) or name.startswith(("new-", HELPERS_PREFIX)):
            (place / name).unlink()


def _no_socket(place: Path, error: OSError) -> KVStoreError:
    told = storage_error(str(place), error)
    if isinstance(told, UsageError):
        return told
    return UsageError(
        f"no socket can be made in {place}: {error}",
        "keep the store on a local file system, or open it without control=True",
    )


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))
