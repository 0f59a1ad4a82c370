"""The digest of a file that grows is that of the whole file, however it was followed."""

from __future__ import annotations

import hashlib
import random
import secrets
from pathlib import Path

import pytest

from bulk.digest import GrowingDigest, fsync_and_hash
from bulk.sst import SstFile


@pytest.mark.parametrize("seed", range(4))
def test_a_file_that_grows_is_hashed_whole(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bulk.digest._FOLLOW_FROM", 10)
    monkeypatch.setattr("bulk.digest._CHUNK", 1000)
    rng = random.Random(seed)
    path, whole = tmp_path / "file", hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        digest = GrowingDigest(path)
        for _ in range(300):
            piece = rng.randbytes(rng.randrange(3000))
            file.write(piece)
            whole.update(piece)
            digest.follow(file.tell())
    assert digest.finish() == whole.hexdigest() == fsync_and_hash(path)


def test_a_large_table_is_written_with_the_digest_of_its_bytes(tmp_path: Path) -> None:
    file = SstFile(tmp_path / "table.sst", compression="none")
    for first in range(0, 400, 10):
        keys = [b"%06d" % number for number in range(first, first + 10)]
        file.add(keys, [secrets.token_bytes(100_000) for _ in keys])
    written = file.finish()
    assert written is not None
    content = (tmp_path / "table.sst").read_bytes()
    assert len(content) == written.size_bytes > 40_000_000
    assert written.sha256 == hashlib.sha256(content).hexdigest()


def test_an_abandoned_table_is_gone_and_is_followed_no_more(tmp_path: Path) -> None:
    file = SstFile(tmp_path / "table.sst", compression="none")
    file.add([b"%d" % number for number in range(9)], [bytes(3 << 20)] * 9)
    file.abandon()
    file.abandon()
    assert list(tmp_path.iterdir()) == []
