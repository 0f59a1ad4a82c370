"""The knobs of RocksDB that a store offers reach it."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore.errors import UsageError


def test_options_reach_rocksdb(tmp_path: Path) -> None:
    options = kvstore.Options(
        cache_bytes=1 << 20, write_buffer_bytes=1 << 20, background_jobs=3, open_files=99
    )
    with kvstore.open(tmp_path / "s", options=options, durability="async") as store:
        for number in range(300):
            store.put(b"%d" % number, bytes(20_000))
        assert store.stats()["data_memtable_bytes"] <= 3 << 20  # caching all blocks would take 6 MB
        told = max((tmp_path / "s").glob("OPTIONS-*")).read_text()
        assert "max_open_files=99" in told
        assert "max_background_jobs=3" in told
        assert told.count("write_buffer_size=1048576") >= 4
    with kvstore.open(tmp_path / "s") as store:
        assert store.count() == 300
        assert "write_buffer_size=67108864" in max((tmp_path / "s").glob("OPTIONS-*")).read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        {"cache_bytes": -1},
        {"cache_bytes": 1.5},
        {"write_buffer_bytes": 0},
        {"background_jobs": 0},
        {"open_files": -1},
        {"open_files": 1 << 31},
    ],
)
def test_values_that_cannot_work_are_refused(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(UsageError, match=name):
        kvstore.Options(**wrong)


def test_options_of_another_engine_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rocksdb"):
        kvstore.open(tmp_path / "s", engine="memory", options=kvstore.Options())
    with pytest.raises(UsageError, match="pass Options"):
        kvstore.open(tmp_path / "s", options={"cache_bytes": 1})  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()
