"""Digests of files and blobs, by which readers recognise damaged or exchanged bytes.

    digest := "blake3:" | 32 hex digits    128 bits of BLAKE3
            | 64 hex digits                SHA-256: files of imports of manifest format 1
            | 32 hex digits                BLAKE2b, 128 bits: parts of older releases

One core hashes 7 GB/s with BLAKE3, 1.9 with SHA-256 (with the processor's own instructions) and 1.3
with BLAKE2b. The older digests took 8 % of the processor time of a bulk load and of a backup. A
digest does not prove who wrote the bytes.
"""

from __future__ import annotations

import hashlib
from typing import BinaryIO, Final, Protocol

from blake3 import blake3
from typing_extensions import Buffer

_PREFIX = "blake3:"
DIGEST_BYTES: Final = 16
_CHUNK_BYTES = 1 << 20


def digest(data: bytes) -> str:
    """The digest of `data`."""
    return _PREFIX + blake3(data).hexdigest(DIGEST_BYTES)


def short_digest(*pieces: bytes | memoryview) -> bytes:
    """The digest of `pieces`, one behind the other, as `DIGEST_BYTES` bytes: 128 bits of BLAKE3."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest(DIGEST_BYTES)


def is_digest(known: str, data: bytes) -> bool:
    """Whether `known`, which may be of any of the three kinds, is the digest of `data`."""
    hasher = _hasher(known)
    hasher.update(data)
    return _text(hasher) == known


def file_digest(file: BinaryIO, *, like: str | None = None) -> str:
    """The digest of the rest of `file`, of the same kind as `like`. Reads it in pieces."""
    hasher = _hasher(_PREFIX if like is None else like)
    while chunk := file.read(_CHUNK_BYTES):
        hasher.update(chunk)
    return _text(hasher)


class RunningDigest:
    """The digest of bytes that come piece by piece, of the same kind as `like`."""

    def __init__(self, like: str = _PREFIX) -> None:
        self._hasher = _hasher(like)

    def update(self, data: Buffer) -> None:
        """Add the next bytes."""
        self._hasher.update(data)

    def text(self) -> str:
        """The digest of all bytes so far."""
        return _text(self._hasher)


class _Hasher(Protocol):
    def update(self, data: Buffer, /) -> object: ...

    def hexdigest(self) -> str: ...


def _hasher(like: str) -> _Hasher:
    if like.startswith(_PREFIX):
        return blake3()
    return hashlib.sha256() if len(like) == 64 else hashlib.blake2b(digest_size=DIGEST_BYTES)


def _text(hasher: _Hasher) -> str:
    if isinstance(hasher, blake3):
        return _PREFIX + hasher.hexdigest(DIGEST_BYTES)
    return hasher.hexdigest()
