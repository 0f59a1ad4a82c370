"""Roots of pushes that are strange: long logs, foreign objects, files that go while they are
fetched, and stores that share a name."""

from __future__ import annotations

import itertools
import shutil
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvstore
from kvstore.backup import Collection
from kvstore.bulk.pushes import Pushes
from kvstore.bulk.pushes.pull import Puller
from kvstore.bulk.pushes.push_log import REVERT
from kvstore.errors import CorruptionError, ImportRefusedError, OutOfSpaceError, UsageError
from kvstore.storage import patience as patience_module
from kvstore.storage.address import open_blob
from kvstore.storage.contract import BlobInfo
from kvstore.storage.memory_storage import MemoryBlob
from kvstore.storage.patience import Patience
from tests.harness.bounds import bounds
from tests.harness.storage_faults import FaultRates, FaultyBlob, Weather
from tests.pushes.made import CountingBlob, drain, push
from tests.shard.conftest import s3_options, s3_server

__all__ = ["s3_server"]

WAIT_S = 60
"""Far more than any wait of a test takes: a bound for a machine that hangs."""


class Hooked(MemoryBlob):
    """A bucket in which something happens before a part of an import is read."""

    before: Callable[[], object] | None = None

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        if self.before is not None and ".sst" in name:
            happen, self.before = self.before, None
            happen()
        return super().get_range(name, start=start, length=length)


class Foreign(MemoryBlob):
    """A bucket whose other users put what they like."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: dict[str, bytes] = {}

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        found = [each for each in self.foreign if each.startswith(prefix)]
        yield from sorted([*super().list(prefix), *(BlobInfo(each, 4) for each in found)])

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        return self.foreign.get(name) or super().get_range(name, start=start, length=length)


@pytest.mark.parametrize("tells_position", [True, False], ids=["new-event", "old-event"])
def test_a_push_that_the_place_of_a_store_has_forgotten_is_reverted_too(
    pushes: Pushes, tells_position: bool
) -> None:
    with bounds(PUSHES_TOLD=3), kvstore.open(None, engine="memory") as store:
        puller = Puller(store, pushes, name="s")
        store.put(b"0", b"live")
        for number in range(5):
            push(pushes, {b"%d" % number: b"pushed"})
        drain(puller)
        if tells_position:
            pushes.revert(1)
        else:
            fields = {"kind": REVERT, "push": 1, "job": "b" * 32, "at": 0}
            pushes.log.append(lambda _: fields)
        drain(puller)
        assert store.get(b"0") == b"live"
        pushes.wait(1, ["s"], until="reverted", timeout=60)
        for number in range(5, 7):
            push(pushes, {b"%d" % number: b"pushed"})
        drain(puller)
        states = [puller.status["pushes"].get(str(n), {}).get("state") for n in range(1, 8)]
        assert states == ["reverted", None, None, None, "added", "added", "added"]


def test_a_store_that_cannot_find_a_forgotten_push_tells_it(pushes: Pushes, tmp_path: Path) -> None:
    with bounds(PUSHES_TOLD=2):
        with kvstore.open(tmp_path / "store") as store:
            for number in range(3):
                push(pushes, {b"%d" % number: b"pushed"})
            drain(Puller(store, pushes, name="s"))
            Collection(tmp_path / "backups").backup(store)
        Collection(tmp_path / "backups").restore(tmp_path / "restored")
        with kvstore.open(tmp_path / "restored") as store:
            pushes.revert(1)
            drain(Puller(store, pushes, name="s"))
            with pytest.raises(ImportRefusedError, match="has no record of this push"):
                pushes.wait(1, ["s"], until="reverted", timeout=60)
            assert store.count() == 3


def test_a_store_that_was_away_reads_each_event_once() -> None:
    blob = CountingBlob()
    pushes = Pushes.over(blob, "long")
    for _ in range(40):
        push(pushes, {b"a": b"1"})
    pushes.expire(keep=1)
    blob.reads = 0
    with kvstore.open(None, engine="memory") as store:
        drain(Puller(store, pushes, name="s"))
        assert store.get(b"a") == b"1"
    assert blob.reads < 40 * 8


def test_a_store_that_waits_for_room_reads_new_events_alone(tmp_path: Path) -> None:
    blob = CountingBlob()
    pushes = Pushes.over(blob, "waited")
    for _ in range(40):
        push(pushes, {b"a": b"1"})
    with kvstore.open(tmp_path / "store") as store:
        puller = Puller(store, pushes, name="s", on_refusal="wait")
        with bounds(FETCH_SPARE_BYTES=1 << 60):
            for most in (200, 10):
                blob.reads = 0
                with pytest.raises(OutOfSpaceError):
                    puller.step()
                assert blob.reads < most
            pushes.revert(1)
            assert puller.step()
        assert puller.status["pushes"]["1"]["state"] == "refused"


def test_a_store_that_waits_passes_reverted_pushes_and_reads_each_event_once() -> None:
    blob = CountingBlob()
    pushes = Pushes.over(blob, "reverted")
    with kvstore.open(None, engine="memory") as store:
        puller = Puller(store, pushes, name="s", on_refusal="wait")
        push(pushes, {b"a": b"1"})
        drain(puller)
        for _ in range(40):
            push(pushes, {b"a": b"2"}, shards=2)  # a store with one shard refuses them
        for number in range(2, 42):
            pushes.revert(number)
        push(pushes, {b"b": b"3"})
        blob.reads = 0
        drain(puller)
        assert dict(store.scan()) == {b"a": b"1", b"b": b"3"}
        assert {told["state"] for told in puller.status["pushes"].values()} == {"added", "refused"}
    assert blob.reads < 40 * 14


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (b"junk", "is damaged: not JSON"),
        (b'{"format": 9}', "has format version 9"),
        (b'{"format": 1, "shard": 0, "pushes": 7}', "'pushes'"),
        (b'{"format": 1, "shard": 0, "pushes": {"1": {"state": "added", "at": -1}}}', "'at'"),
    ],
)
def test_a_status_that_cannot_be_read_hides_no_other(report: bytes, told: str) -> None:
    blob = Foreign()
    pushes = Pushes.over(blob, "foreign")
    push(pushes, {b"a": b"1"})
    blob.put(f"status/x/{1:020d}.json", report)
    for name in ("status/x/\u00b2.json", "status/x y/1.json", "status/1.json"):
        blob.foreign[name] = b"junk"
    with kvstore.open(None, engine="memory") as store:
        drain(Puller(store, pushes, name="s"))
        found = pushes.wait(1, ["s"], timeout=60).stores
        assert [(each.name, each.state, each.shard) for each in found] == [
            ("s", "added", 0),
            ("x", "unknown", -1),
        ]
        assert told in found[1].error
        drain(Puller(store, pushes, name="x"))
        assert [each.state for each in pushes.status(1).stores] == ["added", "added"]


def test_foreign_objects_below_a_root_stop_no_expiry() -> None:
    blob = Foreign()
    pushes = Pushes.over(blob, "foreign")
    push(pushes, {b"a": b"1"})
    job = "a" * 32
    foreign = [f"imports/{job}/0000/begun.json", f"imports/{job}/\u00b2/begun.json"]
    foreign += ["imports/x/0/begun.json", f"imports/{job}/begun.json"]
    blob.foreign.update(dict.fromkeys(foreign, b"junk"))
    with bounds(ORPHAN_S=0.0):
        assert [each.number for each in pushes.expire(keep=0)] == [1]
    assert {each.name for each in blob.list("imports/")} == {*foreign}


def test_two_stores_with_one_name_are_told_of_it_and_the_newest_report_counts() -> None:
    blob = MemoryBlob()
    pushes = Pushes.over(blob, "shared")
    with (
        kvstore.open(None, engine="memory") as one,
        kvstore.open(None, engine="memory") as two,
    ):
        pullers = [Puller(store, pushes, name="s") for store in (one, two)]
        drain(pullers[0])
        for number in range(1, 4):  # the first one reports thrice, and the second one reads it all
            push(pushes, {b"%d" % number: b"v"})
        for puller, last in zip(pullers, (3, 3), strict=True):
            drain(puller)
            assert pushes.status(last).stores[0].state == "added"
        push(pushes, {b"4": b"v"})
        drain(pullers[0])
        assert dict(one.scan()) == dict(two.scan()) | {b"4": b"v"}
        assert [each.state for each in pushes.status(4).stores] == ["added"]
        told = pullers[0].status["pull_last_error"]
        assert f"store {two.store_id} reports as 's' too" in told
        assert len([*blob.list("status/")]) <= 2


def test_a_store_that_opens_again_is_not_told_of_itself(pushes: Pushes, tmp_path: Path) -> None:
    for number in range(3):
        with kvstore.open(tmp_path / "store") as store:
            push(pushes, {b"a": b"%d" % number})
            puller = Puller(store, pushes, name="s")
            drain(puller)
            assert puller.status["pull_failures"] == 0


def test_files_that_expire_while_they_are_fetched_are_told_and_removed(tmp_path: Path) -> None:
    blob = Hooked()
    pushes = Pushes.over(blob, "expiring")
    push(pushes, {b"a": b"1"})
    push(pushes, {b"b": b"1"})
    with kvstore.open(tmp_path / "store") as store:
        blob.before = lambda: pushes.expire(keep=1)
        drain(Puller(store, pushes, name="s"))
        assert dict(store.scan()) == {b"b": b"1"}
        assert "its files were expired" in pushes.status(1).stores[0].error
        assert [*(tmp_path / "store" / "ingest").iterdir()] == []


def test_the_first_bytes_of_a_push_that_is_refused_later_are_removed(tmp_path: Path) -> None:
    blob = Hooked()
    pushes = Pushes.over(blob, "killed")

    def die() -> None:
        raise KeyboardInterrupt

    push(pushes, {b"%03d" % number: b"v" * 100 for number in range(300)})
    with kvstore.open(tmp_path / "store") as store:
        blob.before = die
        with pytest.raises(KeyboardInterrupt), bounds(OBJECT_PIECES_AT_ONCE=1):
            Puller(store, pushes, name="s").step()
        assert [*(tmp_path / "store" / "ingest").iterdir()] != []
        pushes.expire(keep=0)
        drain(Puller(store, pushes, name="s"))
        assert [*(tmp_path / "store" / "ingest").iterdir()] == []
        assert store.count() == 0


def test_a_push_that_is_reverted_while_it_is_fetched_is_taken_and_taken_back() -> None:
    blob = Hooked()
    pushes = Pushes.over(blob, "reverted")
    with kvstore.open(None, engine="memory") as store:
        store.put(b"a", b"live")
        push(pushes, {b"a": b"1"})
        blob.before = lambda: pushes.revert(1)
        drain(Puller(store, pushes, name="s"))
        assert store.get(b"a") == b"live"
        [told] = pushes.status(1).stores
        assert told.state == "reverted"
        assert told.at is not None
        assert store.get(b"a", told.at - 1) == b"1"


def test_an_event_that_no_store_could_read_is_not_written(pushes: Pushes) -> None:
    cleared = [(b"%03d" % number, b"%03d0" % number) for number in range(200)]
    with pushes.begin_changes(cleared=cleared) as building, bounds(JSON_BYTES_MAX=3000):
        with building.writer() as writer:
            writer.put(b"a", b"1")
        with pytest.raises(UsageError, match=r"cannot be written: .* bytes of JSON"):
            building.seal()
    assert pushes.list() == []


def test_a_path_names_a_root_in_the_directory_in_which_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.chdir(first)
    pushes = Pushes("pushes")
    with kvstore.open(None, engine="memory") as store:
        puller = Puller(store, Pushes("pushes"), name="s")
        monkeypatch.chdir(second)
        push(pushes, {b"a": b"1"})
        drain(puller)
        assert store.get(b"a") == b"1"
        assert Pushes(pushes.place.url).list() == pushes.list()
    assert [*second.iterdir()] == []


@pytest.mark.soak
def test_all_pages_of_a_list_of_an_object_store_are_read(s3_server: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(f"{s3_server}/paged", method="PUT")):
        pass
    options = s3_options(s3_server)
    pushes = Pushes("s3://paged/root", options=options)
    push(pushes, {b"a": b"1"})
    with kvstore.open(None, engine="memory") as store:
        drain(Puller(store, pushes, name="s0"))
        [told] = pushes.status(1).stores
        assert told.state == "added"
        blob = open_blob("s3://paged/root", **options)
        name = next(each.name for each in blob.list("status/"))
        data = blob.get(name)
        assert data is not None
        with ThreadPoolExecutor(8) as pool:
            names = [f"status/s{number}/{1:020d}.json" for number in range(1, 1100)]
            [*pool.map(lambda each: blob.put(each, data), names)]
        assert len(pushes.status(1).stores) == 1100
        with pushes.begin() as building:
            for number in range(1100):
                with building.writer() as writer:
                    writer.put(b"%04d" % number, b"part")
            building.seal()
        drain(Puller(store, pushes, name="s0"))
        assert pushes.status(2).stores[0].state == "added"
        assert store.get(b"1099") == b"part"
        assert [each.number for each in pushes.expire(keep=0)] == [1, 2]
        assert [*blob.list("imports/")] == []


def test_closing_a_puller_ends_its_pause_between_two_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause of a storage that nobody has given another one: here it lasts for days."""
    for name in ("_PAUSE_S_MIN", "_PAUSE_S_MAX"):
        monkeypatch.setattr(patience_module, name, 1e6)
    pauses, closed = threading.Event(), threading.Event()
    days = itertools.count(step=10_000_000)
    patience = Patience(1e12, tell=lambda _: pauses.set(), monotonic=days.__next__)
    absent = Weather(1, FaultRates(refused=1.0))
    pushes = Pushes.over(FaultyBlob(MemoryBlob(patience=patience), absent), "absent")
    with kvstore.open(tmp_path / "store") as store:
        puller = Puller(store, pushes, name="s")
        puller.start()
        assert pauses.wait(WAIT_S)

        def close() -> None:
            puller.close()
            closed.set()

        threading.Thread(target=close, daemon=True).start()
        assert closed.wait(WAIT_S)


@pytest.mark.parametrize("later", [0, 1, 2])
def test_a_log_that_was_put_back_from_an_older_copy_is_told(tmp_path: Path, later: int) -> None:
    place = tmp_path / "pushes"
    push(Pushes(str(place)), {b"a": b"1"})
    with kvstore.open(tmp_path / "store") as store:
        drain(Puller(store, Pushes(str(place)), name="eu"))
        shutil.copytree(place, tmp_path / "older")
        push(Pushes(str(place)), {b"b": b"2"})
        drain(Puller(store, Pushes(str(place)), name="eu"))
        shutil.copytree(place, tmp_path / "newest")
        shutil.rmtree(place)
        (tmp_path / "older").rename(place)
        for number in range(2, 2 + later):
            assert push(Pushes(str(place)), {b"c%d" % number: b"3"}).number == number
        puller = Puller(store, Pushes(str(place)), name="eu")
        for _ in range(2):
            with pytest.raises(CorruptionError, match="push 2, which this store has added"):
                puller.step()
        for number in range(1, 2 + later):
            (told,) = Pushes(str(place)).status(number).stores
            assert told.state == "waiting"
            assert "older copy" in told.error
        shutil.rmtree(place)
        (tmp_path / "newest").rename(place)
        drain(puller)
        assert dict(store.scan()) == {b"a": b"1", b"b": b"2"}
        (told,) = Pushes(str(place)).status(2).stores
        assert (told.state, told.error) == ("added", "")


def test_a_push_that_was_added_after_later_events_is_known_in_the_log(tmp_path: Path) -> None:
    pushes = Pushes(str(tmp_path / "pushes"))
    reverted = push(pushes, {b"a": b"1"})
    push(pushes, {b"b": b"2"})
    with kvstore.open(tmp_path / "store") as store:
        with bounds(FETCH_SPARE_BYTES=1 << 60):
            pushes.revert(reverted.number)
            drain(Puller(store, pushes, name="eu"))
        assert dict(store.scan()) == {}
        for _ in range(2):
            drain(Puller(store, pushes, name="eu"))
        assert dict(store.scan()) == {b"b": b"2"}
        push(pushes, {b"c": b"3"})
        drain(Puller(store, pushes, name="eu"))
        assert dict(store.scan()) == {b"b": b"2", b"c": b"3"}
