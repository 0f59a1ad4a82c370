"""The hundredth backup makes as many requests of its storage as the first backups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvstore
from kvstore.backup import Collection
from kvstore.backup.shard import MemoryBlob, MemoryConsensus, Storage
from kvstore.limits import ROLLUP_EVERY
from tests.harness.parts import parts_of


class Counted:
    """A storage that counts the requests it gets."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        if not callable(found):
            return found

        def request(*arguments: Any, **named: Any) -> Any:
            self.requests += 1
            return found(*arguments, **named)

        return request


def test_backups_of_one_row_ask_the_same_again_and_again(tmp_path: Path) -> None:
    blob, consensus = Counted(MemoryBlob()), Counted(MemoryConsensus())
    collection = Collection("counted", storage=Storage(blob, consensus))  # type: ignore[arg-type]
    asked = []
    with kvstore.open(tmp_path / "s", durability="async") as store:
        for number in range(5 * ROLLUP_EVERY):
            before = blob.requests + consensus.requests
            store.put(b"k", b"%d" % number)
            collection.backup(store)
            asked.append(blob.requests + consensus.requests - before)
        assert len(parts_of(store).holds.all()) == 1
    turns = [asked[at : at + ROLLUP_EVERY] for at in range(0, len(asked), ROLLUP_EVERY)]
    assert {sorted(turn)[ROLLUP_EVERY // 2] for turn in turns} == {min(asked)}
    assert max(map(sum, turns[1:])) <= 1.25 * min(map(sum, turns[1:]))
    for key in consensus.list_keys():
        assert len(consensus.scan(key, start=0, limit=len(asked))) <= 2 * ROLLUP_EVERY
    collection.expire(before=collection.upper - 1)
    collection.compact()
    assert len(list(blob.list())) < ROLLUP_EVERY
