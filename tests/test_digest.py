"""Digests: known values, and files that differ."""

from __future__ import annotations

import io

from kvstore.base.digest import digest, file_digest, is_digest

DATA = b"kvstore" * 300_000
"""A size that is read in several pieces."""


def test_a_digest_is_what_others_compute() -> None:
    # The first input of BLAKE3's published test vectors, cut to 128 bits.
    assert digest(b"") == "blake3:af1349b9f5f9a1a6a0404dea36dcc949"


def test_a_digest_tells_its_bytes_from_others() -> None:
    known = digest(DATA)
    assert is_digest(known, DATA)
    assert not is_digest(known, DATA[:-1] + b"?")
    assert file_digest(io.BytesIO(DATA)) == known
    assert file_digest(io.BytesIO(DATA[1:])) != known
