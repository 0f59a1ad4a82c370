"""Digests of files and blobs, by which readers recognise damaged or exchanged bytes.

    digest := "blake3:" | 32 hex digits    128 bits of BLAKE3

One core hashes 7 GB/s with BLAKE3, 1.9 with SHA-256 (with the processor's own instructions) and 1.3
with BLAKE2b. A digest does not prove who wrote the bytes.
"""

from __future__ import annotations

from typing import BinaryIO, Final

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
    """Whether `known` is the digest of `data`."""
    return digest(data) == known


def file_digest(file: BinaryIO) -> str:
    """The digest of the rest of `file`. Reads it in pieces."""
    running = RunningDigest()
    while chunk := file.read(_CHUNK_BYTES):
        running.update(chunk)
    return running.text()


class RunningDigest:
    """The digest of bytes that come piece by piece."""

    def __init__(self) -> None:
        self._hasher = blake3()

    def update(self, data: Buffer) -> None:
        """Add the next bytes."""
        self._hasher.update(data)

    def text(self) -> str:
        """The digest of all bytes so far."""
        return _PREFIX + self._hasher.hexdigest(DIGEST_BYTES)
