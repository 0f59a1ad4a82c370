"""A continuous backup to a server that speaks S3 and fails in turn: nothing is lost or doubled, the
recovery point is true, and memory is bounded, also while the bucket is absent for a hundred
thousand changes. The process is killed, and the collection is thinned beside it.
`tests/backup/test_following.py` has the short form, without a server."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kvstore
from kvstore import backup
from kvstore.backup.overview import CollectionInfo
from tests.backup import children
from tests.backup.children import FollowerSays
from tests.backup.test_reader_requests import url
from tests.harness.proxy import Answer, Proxy, Request
from tests.harness.seeds import seeded
from tests.shard.conftest import s3_bucket, s3_options, s3_server

__all__ = ["s3_bucket", "s3_server", "url"]

WAIT_S = 300
"""Far more than any wait of the test takes: a bound for a machine that hangs."""

ROUNDS = 16
"""A process is killed after three seasons on average: more rounds would be more of the same."""
LONG_ABSENCES = {3, 9}
"""Rounds in which the bucket stays absent for `LONG_ABSENCE_CHANGES`."""
LONG_ABSENCE_CHANGES = 100_000
"""As many as a writer makes in minutes. They wait as history in the store, and cost no memory."""
MIB = 1 << 20
RESIDENT_MIB_MAX = 768
"""A store with small options takes 256 MiB. A window and two small merges at once take the rest:
Arrow gives memory back late."""


class Season(NamedTuple):
    """The answer that requests get, how many of them, and how long each waits first."""

    name: str
    answer: Answer = Answer.WHOLE
    rate: float = 0.0
    wait_s: float = 0.0


ABSENT = Season("absent", Answer.DROPPED, 1.0)
SEASONS = (
    Season("clear"),
    ABSENT,
    Season("500", Answer.FAILED, 0.3),
    Season("503", Answer.BUSY, 0.3),
    Season("lost", Answer.LOST, 0.3),
    Season("slow", wait_s=0.03),
)


class SeasonalProxy(Proxy):
    """A proxy whose requests fare as the season says."""

    def __init__(self, server: str, pick: random.Random) -> None:
        self._pick, self._closing = pick, threading.Event()
        self.season = SEASONS[0]
        super().__init__(server)
        self.weather = self._of_season

    def _of_season(self, _: Request) -> Answer:
        season = self.season
        self._closing.wait(season.wait_s)
        return season.answer if self._pick.random() < season.rate else Answer.WHOLE

    def close(self) -> None:
        """See `Proxy.close`."""
        self._closing.set()
        super().close()


class Child:
    """A process that writes and follows. After a kill another one continues."""

    def __init__(self, spawn: Any, *arguments: Any) -> None:
        self._spawn, self._arguments = spawn, arguments
        self.restart(0)

    def restart(self, seed: int) -> None:
        self._pipe, sender = self._spawn.Pipe(duplex=False)
        self._process = self._spawn.Process(
            target=children.follow_bucket, args=(*self._arguments, seed, sender)
        )
        self._process.start()
        sender.close()
        self.last = self.hear()

    def hear(self) -> FollowerSays:
        pipe: Connection = self._pipe
        assert pipe.poll(WAIT_S)
        self.last = pipe.recv()
        return self.last

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


@pytest.fixture
def proxy(s3_server: str) -> Iterator[SeasonalProxy]:
    with SeasonalProxy(s3_server, seeded("KVSTORE_BUCKET_SEED")) as made:
        yield made


@pytest.mark.soak
def test_a_follower_survives_a_bucket_that_fails_in_turn(
    spawn: Any, proxy: SeasonalProxy, s3_server: str, url: str, tmp_path: Path
) -> None:
    pick = seeded("KVSTORE_FOLLOWED_SEED")
    direct = s3_options(s3_server)
    seen = backup.Collection(url, options=direct)
    child = Child(spawn, url, s3_options(proxy.url), tmp_path / "store")
    sizes: list[int] = []

    def wait_until(is_done: Callable[[FollowerSays], bool]) -> None:
        while True:
            said = child.hear()
            reached = seen.upper
            assert reached >= said.upper
            # The hold has moved before the follower tells its window, so GC may be ahead of that.
            assert not reached or said.since <= reached
            if is_done(said):
                sizes.append(said.resident_bytes)
                return

    try:
        wait_until(lambda said: said.windows > 0)
        for number in range(ROUNDS):
            for season in pick.sample(SEASONS, len(SEASONS)):
                proxy.season, before = season, child.last
                if season is ABSENT:
                    changes = LONG_ABSENCE_CHANGES if number in LONG_ABSENCES else 0
                    wait_until(
                        lambda said, old=before, least=changes: (
                            said.failures > old.failures and said.changes - old.changes >= least
                        )
                    )
                    assert child.last.behind_seconds > 0
                else:
                    wait_until(lambda said, old=before: said.windows > old.windows + 1)
                if pick.random() < 0.3:
                    child.kill()
                    if season is ABSENT:  # no process can begin then
                        proxy.season = SEASONS[0]
                    child.restart(pick.randrange(1 << 30))
            proxy.season = SEASONS[0]
            wait_until(lambda said: said.windows > 0)
            seen.expire(keep_within=timedelta(seconds=pick.randrange(4)), hourly=1)
            assert len(seen.list()) <= 60
            shown: CollectionInfo = seen.show()
            line = f"round {number}: {len(seen.list())} batches, {shown.rows} rows, "
            sys.stderr.write(f"{line}{sizes[-1] // MIB} MiB resident\n")
    finally:
        child.kill()
    assert max(sizes) <= RESIDENT_MIB_MAX * MIB
    with kvstore.open(tmp_path / "store") as store:
        with seen.follow(store, every=timedelta(milliseconds=1)) as follower:
            assert follower.wait_until(store.put(b"last", b"1"), WAIT_S)
        seen.verify("contents", store)
        assert seen.drill("random").rows > 0
        assert len(store.holds.all()) == 1
        assert seen.scrub().is_sound
