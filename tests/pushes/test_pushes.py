"""Pushes: each store takes each push once, in order, and takes it back."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from zlib import crc32

import pyarrow as pa
import pytest

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.bulk.pushes import Pushes
from kvstore.bulk.pushes.pull import Puller
from kvstore.bulk.pushes.push_log import EXPIRE
from kvstore.errors import (
    AccessDeniedError,
    BusyError,
    CorruptionError,
    FormatVersionError,
    ImportRefusedError,
    OutOfSpaceError,
    UsageError,
)
from kvstore.storage import address
from kvstore.storage.memory_storage import MemoryBlob
from tests.harness.bounds import bounds
from tests.pushes.made import CountingBlob, drain, push


def generation(number: int, rows: int = 30) -> dict[bytes, bytes]:
    return {b"%03d" % key: b"v%d" % number for key in range(number, rows + number)}


def test_stores_take_pushes_in_order_and_take_them_back(pushes: Pushes) -> None:
    with (
        kvstore.open(None, engine="memory") as one,
        kvstore.open(None, engine="memory") as two,
    ):
        pullers = [Puller(one, pushes, name="eu-1"), Puller(two, pushes, name="eu-2")]
        first = push(pushes, generation(0))
        drain(pullers[0])
        assert dict(one.scan()) == generation(0)
        second = push(pushes, generation(1))
        assert (first.number, second.number) == (1, 2)
        for puller in pullers:
            drain(puller)
        both = generation(0) | generation(1)
        assert dict(one.scan()) == dict(two.scan()) == both

        pushes.revert(2)
        pushes.revert(2)
        for puller in pullers:
            drain(puller)
        assert dict(one.scan()) == dict(two.scan()) == generation(0)
        found = pushes.status(2)
        assert found.push.state == "reverted"
        assert [(each.name, each.state) for each in found.stores] == [
            ("eu-1", "reverted"),
            ("eu-2", "reverted"),
        ]
        [record] = [r for r in one.imports.all() if r.reverted is not None]
        assert record.added is not None
        assert record.reverted is not None
        assert dict(one.scan(as_of=record.reverted - 1)) == both
        assert found.stores[0].at == record.reverted
        assert one.verify().problems == ()


def test_the_metrics_tell_how_many_pushes_are_pending(pushes: Pushes) -> None:
    with kvstore.open(None, engine="memory") as store:
        puller = Puller(store, pushes, name="s")

        def pending() -> float:
            puller.step()
            (count,) = store.metrics()["kvstore_pushes_pending"].values.values()
            return count

        assert store.metrics()["kvstore_pushes_pending"].values == {}
        assert pending() == 0
        for number in range(3):
            push(pushes, generation(number))
        assert [pending() for _ in range(4)] == [2, 1, 0, 0]


def test_the_log_tells_of_each_push(pushes: Pushes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvstore.pull")
    with kvstore.open(None, engine="memory") as store:
        lose(pushes, push(pushes, generation(0)).job)
        push(pushes, generation(1))
        pushes.revert(2)
        pushes.revert(1)  # of a push that the store refused: nothing happens
        drain(Puller(store, pushes, name="s"))
    told = [(record.levelname, vars(record)["event"]) for record in caplog.records]
    assert told == [("WARNING", "push refused"), ("INFO", "push added"), ("INFO", "push reverted")]
    assert "nothing is there" in vars(caplog.records[0])["facts"]["error"]


def test_the_log_tells_of_a_push_that_is_added_later(
    pushes: Pushes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvstore.pull")
    push(pushes, generation(0))
    with kvstore.open(tmp_path / "store") as store:
        with bounds(FETCH_SPARE_BYTES=1 << 60):
            drain(Puller(store, pushes, name="s"))
        drain(Puller(store, pushes, name="s"))
    assert [vars(record)["event"] for record in caplog.records] == ["push refused", "push added"]


def test_a_position_is_hidden_and_changes_are_those_of_the_rows(pushes: Pushes) -> None:
    with kvstore.open(None, engine="memory") as store:
        push(pushes, {b"a": b"1"})
        drain(Puller(store, pushes, name="s"))
        assert list(store.scan()) == [(b"a", b"1")]
        assert [change.key for change in store.changes(0, None)] == [b"a"]
        assert store.count() == 1


def test_each_key_goes_to_the_store_of_its_shard(pushes: Pushes) -> None:
    rows = generation(0, 200)
    push(pushes, rows, shards=3)
    found: list[dict[bytes, bytes]] = []
    for shard in range(3):
        with kvstore.open(None, engine="memory") as store:
            drain(Puller(store, pushes, name=f"s{shard}", shard=shard))
            found.append(dict(store.scan()))
            assert all(crc32(key) % 3 == shard for key in found[-1])
    assert {key: value for each in found for key, value in each.items()} == rows
    assert sum(map(len, found)) == len(rows)


def alter(pushes: Pushes, job: str) -> None:
    blob = pushes.bucket(job, 0).blob
    name = next(each.name for each in blob.list() if each.name.startswith("part-"))
    data = blob.get(name)
    assert data is not None
    blob.delete(name)
    blob.put(name, data[:-1] + bytes([data[-1] ^ 1]))


def lose(pushes: Pushes, job: str) -> None:
    pushes.bucket(job, 0).remove()


def swap(pushes: Pushes, job: str) -> None:
    pushes.bucket(job, 0).remove()
    made = bulk.Import.begin_at(pushes.bucket(job, 0), 77, None)
    with made.writer() as writer:
        writer.put(b"foreign", b"row")
    made.seal()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [(alter, "was altered"), (lose, "nothing is there"), (swap, "than was pushed")],
)
def test_a_push_that_is_not_as_it_was_sealed_is_refused_and_blocks_nothing(
    pushes: Pushes, harm: Callable[[Pushes, str], None], reason: str
) -> None:
    harm(pushes, push(pushes, generation(0)).job)
    push(pushes, {b"next": b"one"})
    with kvstore.open(None, engine="memory") as store:
        puller = Puller(store, pushes, name="s")
        drain(puller)
        assert dict(store.scan()) == {b"next": b"one"}
        [told] = pushes.status(1).stores
        assert told.state == "refused"
        assert reason in told.error
        assert len(store.imports.all()) == 1
        with pytest.raises(ImportRefusedError, match=reason):
            pushes.wait(1, ["s"], timeout=1)
        assert pushes.wait(2, ["s"], timeout=1).stores[0].state == "added"


def test_another_number_of_shards_is_refused(pushes: Pushes) -> None:
    push(pushes, {b"a": b"1"}, shards=2)
    push(pushes, {b"a": b"2"})
    shard = bulk.shard_of(b"a", 2)
    with kvstore.open(None, engine="memory") as store:
        drain(Puller(store, pushes, name="s", shard=shard))
        assert store.get(b"a") == b"1"
    assert "1 shards, and this store takes" in pushes.status(2).stores[0].error


def state(pushes: Pushes, number: int) -> str:
    return pushes.status(number).stores[0].state


def test_a_push_that_a_full_disk_refused_is_added_later_but_never_after_a_later_one(
    pushes: Pushes, tmp_path: Path
) -> None:
    with kvstore.open(tmp_path / "store") as store:
        puller = Puller(store, pushes, name="s")

        def refuse(number: int) -> None:
            assert push(pushes, {b"a": b"%d" % number}).number == number
            with bounds(FETCH_SPARE_BYTES=1 << 60):
                assert puller.step()
                upper = store.upper
                assert not puller.step()  # tried again, and still refused: no commit, no report
            assert store.upper == upper
            assert "OutOfSpaceError" in pushes.status(number).stores[0].error

        refuse(1)
        puller = Puller(store, pushes, name="s")  # another process remembers it
        assert puller.step()
        assert (store.get(b"a"), state(pushes, 1)) == (b"1", "added")

        refuse(2)
        push(pushes, {b"b": b"3"})
        drain(puller)
        assert (store.get(b"a"), store.get(b"b")) == (b"1", b"3")
        assert (state(pushes, 2), state(pushes, 3)) == ("refused", "added")

        refuse(4)
        pushes.revert(4)
        drain(puller)
        assert (store.get(b"a"), state(pushes, 4)) == (b"1", "refused")

        refuse(5)
        assert [each.number for each in pushes.expire(keep=0)] == [1, 2, 3, 4, 5]
        drain(puller)
        assert "its files were expired" in pushes.status(5).stores[0].error


class Closable(MemoryBlob):
    """A bucket that may refuse to give the files of imports."""

    is_closed = False

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        if self.is_closed and name.startswith("imports/"):
            raise AccessDeniedError(name, "no permission")
        return super().get_range(name, start=start, length=length)


def test_a_push_without_permission_waits_and_its_status_tells_why() -> None:
    blob = Closable()
    pushes = Pushes.over(blob, "closable")
    push(pushes, {b"a": b"1"})
    with kvstore.open(None, engine="memory") as store:
        puller = Puller(store, pushes, name="s")
        blob.is_closed = True
        for _ in range(2):
            with pytest.raises(AccessDeniedError):
                puller.step()
            [told] = pushes.status(1).stores
            assert told.state == "waiting"
            assert "AccessDeniedError" in told.error
        blob.is_closed = False
        drain(puller)
        assert (store.get(b"a"), state(pushes, 1)) == (b"1", "added")


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (b'{"format": 9, "kind": "push"}', "FormatVersionError: .*has format version 9"),
        (b"junk", "CorruptionError: .*is damaged"),
    ],
)
def test_an_event_that_cannot_be_read_is_told_in_the_status_and_changes_nothing(
    event: bytes, told: str
) -> None:
    blob = MemoryBlob()
    pushes = Pushes.over(blob, "later")
    push(pushes, {b"a": b"1"})
    name = "log/00000000000000000002.json"
    blob.put(name, event)
    with kvstore.open(None, engine="memory") as store:
        puller = Puller(store, pushes, name="s")
        assert puller.step()
        upper = store.upper
        for _ in range(2):
            with pytest.raises((CorruptionError, FormatVersionError)):
                puller.step()
        [status] = pushes.statuses.of_push(2)
        assert status.state == "waiting"
        assert re.match(told, status.error)
        assert store.upper == upper
        blob.delete(name)
        push(pushes, {b"a": b"2"})
        drain(puller)
        assert store.get(b"a") == b"2"
        [status] = pushes.status(2).stores
        assert (status.state, status.error) == ("added", "")


def test_a_push_that_was_expired_is_told_and_the_next_one_taken(pushes: Pushes) -> None:
    for number in range(3):
        push(pushes, generation(number))
    assert [each.number for each in pushes.expire(keep=1)] == [1, 2]
    assert pushes.expire(keep=timedelta(days=1)) == []
    with kvstore.open(None, engine="memory") as store:
        drain(Puller(store, pushes, name="late"))
        assert dict(store.scan()) == generation(2)
    assert "expired" in pushes.status(1).stores[0].error
    assert [each.state for each in pushes.list()] == ["expired", "expired", "sealed"]


def test_the_newest_pushes_and_those_that_expire_are_found_without_the_older_log() -> None:
    blob = CountingBlob()
    pushes = Pushes.over(blob, "counted")
    for _ in range(60):
        push(pushes, {b"a": b"1"})
    assert [each.number for each in pushes.expire(keep=2)] == [*range(1, 59)]
    pushes.revert(60)
    blob.reads = 0
    told = [(each.number, each.state) for each in pushes.list(last=3)]
    assert told == [(58, "expired"), (59, "sealed"), (60, "reverted")]
    assert [each.number for each in pushes.expire(keep=1)] == [59]
    assert blob.reads < 250, "the 58 pushes that were expired before are not read"
    assert [each.number for each in pushes.list(last=100)] == [*range(1, 61)]
    assert pushes.list(last=0) == []
    with pytest.raises(UsageError, match="last"):
        pushes.list(last=-1)


def test_a_call_that_makes_no_sense_is_refused_and_does_nothing(pushes: Pushes) -> None:
    made = push(pushes, {b"a": b"1"})
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: pushes.expire(keep=timedelta(days=-1)), "from 0 on"),
        (lambda: pushes.expire(keep=-1), "keep=-1"),
        (lambda: pushes.wait(1, "eu-1"), "names='eu-1'"),
        (lambda: pushes.wait(1, ["eu-1"], until="taken"), "until='taken'"),  # type: ignore[arg-type]
        (lambda: pushes.begin(table="trips"), "table='trips'"),  # type: ignore[arg-type]
        (lambda: Pushes(None), "url"),  # type: ignore[arg-type]
    ]
    for call, told in wrong:
        with pytest.raises(UsageError, match=told):
            call()
    with pytest.raises(BusyError, match=r"push 1 is not added on eu-2 after 0 s; look at"):
        pushes.wait(1, ["eu-2"], timeout=0)
    assert [each.state for each in pushes.list()] == ["sealed"]
    assert pushes.bucket(made.job, 0).is_sealed()


def test_files_that_a_killed_expiry_left_go_with_a_later_one(pushes: Pushes) -> None:
    first, second = (push(pushes, {b"a": b"%d" % number}) for number in range(2))
    fields = {"kind": EXPIRE, "push": 1, "job": "b" * 32, "at": 0}
    pushes.log.append(lambda _: fields)  # and then the process was killed
    with bounds(ORPHAN_S=0.0):
        assert pushes.expire(keep=1) == []
    assert not pushes.bucket(first.job, 0).is_sealed()
    assert pushes.bucket(second.job, 0).is_sealed()


@pytest.mark.parametrize("ending", ["revert", "expire", "mend"])
def test_a_store_that_is_asked_to_waits_for_a_push_that_it_refuses(
    tmp_path: Path, pushes: Pushes, ending: str
) -> None:
    with kvstore.open(tmp_path / "store") as store:
        puller = Puller(store, pushes, name="s", on_refusal="wait")
        push(pushes, {b"a": b"1"})
        drain(puller)
        push(pushes, {b"a": b"2"})
        push(pushes, {b"b": b"3"})
        upper = store.upper
        with bounds(FETCH_SPARE_BYTES=1 << 60):
            for _ in range(2):
                with pytest.raises(OutOfSpaceError):
                    puller.step()
            assert store.upper == upper
            told = [pushes.status(number).stores[0] for number in (2, 3)]
            assert [each.state for each in told] == ["waiting", "waiting"]
            assert "OutOfSpaceError" in told[0].error
            if ending == "revert":
                pushes.revert(2)
                assert puller.step()
            if ending == "expire":
                pushes.expire(keep=1)
                assert puller.step()
        drain(puller)
        expected = b"2" if ending == "mend" else b"1"
        assert dict(store.scan()) == {b"a": expected, b"b": b"3"}
        wanted = "added" if ending == "mend" else "refused"
        assert [state(pushes, number) for number in (2, 3)] == [wanted, "added"]
        with pytest.raises(UsageError, match="on_refusal='stop'"):
            bulk.pull(store, pushes.where, name="s", on_refusal="stop")  # type: ignore[arg-type]


def test_a_push_that_was_not_sealed_is_no_push(pushes: Pushes) -> None:
    with pushes.begin() as building, building.writer() as writer:
        writer.put(b"a", b"1")
    assert pushes.list() == []
    assert [*address.open_blob(pushes.where).list("imports/")] == []
    with pytest.raises(UsageError, match="no push 1"):
        pushes.revert(1)


def test_two_jobs_at_once_take_two_numbers(pushes: Pushes) -> None:
    numbers: list[int] = []
    ready = threading.Barrier(4)

    def job(number: int) -> None:
        with pushes.begin() as building:
            with building.writer() as writer:
                writer.put(b"%d" % number, b"v")
            ready.wait()
            numbers.append(building.seal().number)

    threads = [threading.Thread(target=job, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [1, 2, 3, 4]
    with kvstore.open(None, engine="memory") as store:
        drain(Puller(store, pushes, name="s"))
        assert store.count() == 4


def test_a_store_that_is_put_back_takes_what_it_lacks_and_nothing_twice(
    pushes: Pushes, tmp_path: Path
) -> None:
    push(pushes, {b"a": b"1", b"b": b"1"})
    with kvstore.open(tmp_path / "store") as store:
        puller = Puller(store, pushes, name="s")
        drain(puller)
        store.put(b"a", b"live")
        Collection(tmp_path / "backups").backup(store)
        added = pushes.status(1).stores[0].at
        push(pushes, {b"b": b"2"})
        drain(puller)
        newest = dict(store.scan())
    Collection(tmp_path / "backups").restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored") as store:
        assert dict(store.scan()) == {b"a": b"live", b"b": b"1"}
        drain(Puller(store, pushes, name="s"))
        assert dict(store.scan()) == newest == {b"a": b"live", b"b": b"2"}
    assert pushes.status(1).stores[0].at == added is not None


def test_a_worker_waits_is_waited_for_and_ends(pushes: Pushes, tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        with bulk.pull(store, pushes.place.url, name="eu-1", every=0.01) as puller:
            with pytest.raises(BusyError):
                pushes.wait(push(pushes, {b"a": b"1"}).number, ["eu-9"], timeout=0)
            puller.wait(1, timeout=60)
            found = pushes.wait(1, ["eu-1"], timeout=60)
            assert set(found.stores[0].seconds) == {"fetch", "check", "add", "other"}
        before = threading.active_count()
        puller.close()
        assert threading.active_count() <= before
        assert store.get(b"a") == b"1"


def test_a_push_that_does_not_pass_the_gate_of_its_taker_is_refused(pushes: Pushes) -> None:
    with kvstore.open(None, engine="memory") as store:
        puller = Puller(store, pushes, name="eu-1", check={"rows": {"least_of_baseline": 0.9}})
        push(pushes, generation(0))
        push(pushes, generation(0, rows=20))
        push(pushes, generation(1))
        drain(puller)
        states = [pushes.status(number).stores[0] for number in (1, 2, 3)]
        assert [each.state for each in states] == ["added", "refused", "added"]
        assert "rows is 20, and must be at least 27" in states[1].error
        assert dict(store.scan()) == generation(0) | generation(1)


def test_a_check_that_raises_refuses_its_push_and_the_next_one_comes(pushes: Pushes) -> None:
    def check(staged: pa.RecordBatchReader, _: pa.RecordBatchReader) -> None:
        if b"v1" in staged.read_all()["value"].to_pylist():
            raise ZeroDivisionError("by one")

    with kvstore.open(None, engine="memory") as store:
        puller = Puller(store, pushes, name="eu-1", check={"functions": {"odd": check}})
        for number in range(3):
            push(pushes, generation(number))
        drain(puller)
        states = [pushes.status(number).stores[0] for number in (1, 2, 3)]
        assert [each.state for each in states] == ["added", "refused", "added"]
        assert "odd is ZeroDivisionError: by one" in states[1].error
