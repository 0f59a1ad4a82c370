"""Digests: known values, older kinds that are still read, and files that differ."""

from __future__ import annotations

import hashlib
import io

import pytest

from kvstore.digest import digest, file_digest, is_digest

DATA = b"kvstore" * 300_000
"""A size that is read in several pieces."""

OLDER = {
    "SHA-256": hashlib.sha256(DATA).hexdigest(),
    "BLAKE2b": hashlib.blake2b(DATA, digest_size=16).hexdigest(),
}


def test_a_digest_is_what_others_compute() -> None:
    # The first input of BLAKE3's published test vectors, cut to 128 bits.
    assert digest(b"") == "blake3:af1349b9f5f9a1a6a0404dea36dcc949"


@pytest.mark.parametrize("known", [digest(DATA), *OLDER.values()], ids=["BLAKE3", *OLDER])
def test_each_kind_tells_its_bytes_from_others(known: str) -> None:
    assert is_digest(known, DATA)
    assert not is_digest(known, DATA[:-1] + b"?")
    assert file_digest(io.BytesIO(DATA), like=known) == known
    assert file_digest(io.BytesIO(DATA[1:]), like=known) != known


def test_a_file_has_the_digest_of_its_bytes() -> None:
    assert file_digest(io.BytesIO(DATA)) == digest(DATA)
