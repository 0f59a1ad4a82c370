"""A push that replaces is the new whole of a span, and keeps newer writes where it is told to."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import bulk
from kvstore.backup import Collection
from kvstore.bulk.pushes import Pushes
from kvstore.bulk.pushes.pull import Puller
from kvstore.bulk.pushes.pushes import import_id_of
from kvstore.errors import CorruptionError, FormatVersionError, HistoryGoneError, UsageError
from kvstore.storage.memory_storage import MemoryBlob
from kvstore.store import Store
from tests.harness.bounds import bounds
from tests.pushes.made import build_time, drain, push


def rows(value: bytes, start: int, end: int) -> dict[bytes, bytes]:
    return {b"a/%02d" % number: value for number in range(start, end)}


OTHER = {b"a": b"below", b"b": b"above"}


@pytest.fixture(params=["memory", "rocksdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    path = None if request.param == "memory" else tmp_path / "store"
    with kvstore.open(path, engine=request.param) as opened:
        opened.put_many({**OTHER, **rows(b"old", 0, 20)})
        yield opened


def test_keys_that_the_push_lacks_disappear_at_its_stamp_and_come_back_with_its_revert(
    pushes: Pushes, store: Store
) -> None:
    puller = Puller(store, pushes, name="s")
    before = dict(store.scan())
    made = push(pushes, rows(b"new", 10, 30), mode="replace", prefix=b"a/")
    assert (made.mode, pushes.list()[0].mode) == ("replace", "replace")
    drain(puller)
    at = pushes.status(1).stores[0].at
    assert at is not None
    assert dict(store.scan()) == {**OTHER, **rows(b"new", 10, 30)}
    assert dict(store.scan(as_of=at)) == dict(store.scan())
    assert dict(store.scan(as_of=at - 1)) == before
    changes = [(change.op, change.key) for change in store.changes(at - 1, at)]
    [record] = store.imports.all()
    assert store.imports.keys_of(record) == [key for _, key in changes]
    gone = [("delete", key) for key in rows(b"", 0, 10)]
    assert changes == gone + [("put", key) for key in rows(b"", 10, 30)]
    events = store.events(at - 1, at)
    assert [(event.timestamp, event.key) for event in events] == [(at, key) for _, key in changes]
    store.put(b"a/00", b"live")
    pushes.revert(1)
    drain(puller)
    assert dict(store.scan()) == {**before, b"a/00": b"live"}
    store.gc(keep=timedelta(0))
    assert dict(store.scan()) == {**before, b"a/00": b"live"}


def test_what_a_killed_puller_left_is_in_nobodys_way(pushes: Pushes, tmp_path: Path) -> None:
    """It was killed while it wrote the deletes of a push."""
    with kvstore.open(tmp_path / "store") as store:
        store.put_many({**OTHER, **rows(b"old", 0, 20)})
        made = push(pushes, rows(b"new", 10, 30), mode="replace", prefix=b"a/")
        left = tmp_path / "store" / "ingest" / f"{import_id_of(made.job, 0):016x}"
        left.mkdir(parents=True)
        (left / "deleted.sst.tmp").write_bytes(b"half of it")
        drain(Puller(store, pushes, name="s"))
        assert dict(store.scan()) == {**OTHER, **rows(b"new", 10, 30)}
        assert not left.exists()


def test_writes_after_the_build_stay_and_no_reader_sees_an_older_value(
    pushes: Pushes, store: Store
) -> None:
    built_at = build_time(store)
    store.put(b"a/11", b"live")
    store.delete(b"a/12")
    store.put(b"a/13", b"live", expires=timedelta(days=1))
    store.put(b"a/99", b"fresh")
    store.delete_range(b"a/14", b"a/17")
    store.put(b"a/15", b"back")
    before = dict(store.scan())
    with pushes.begin(mode="replace", prefix=b"a/", keep_newer=True, built_at=built_at) as building:
        with building.writer() as writer:
            for key, value in rows(b"new", 10, 30).items():
                writer.put(key, value, expires=time.time_ns() + 10**12)
        building.seal()
    puller = Puller(store, pushes, name="s")
    drain(puller)
    kept = {b"a/11": b"live", b"a/13": b"live", b"a/15": b"back", b"a/99": b"fresh"}
    gone = {b"a/12", b"a/14", b"a/16"}
    wanted = {**OTHER, **rows(b"new", 10, 30), **kept}
    wanted = {key: value for key, value in wanted.items() if key not in gone}
    assert dict(store.scan()) == wanted
    at = pushes.status(1).stores[0].at
    assert at is not None
    assert dict(store.scan(as_of=at)) == wanted
    assert not {change.key for change in store.changes(at - 1, at)} & {*kept, *gone}
    left = store.ttl(b"a/13")
    assert left is not None
    assert left > timedelta(hours=1)
    assert store.ttl(b"a/11") is None
    pushes.revert(1)
    drain(puller)
    assert dict(store.scan()) == before


def test_a_reader_beside_the_writer_sees_all_of_a_push_or_nothing(
    pushes: Pushes, tmp_path: Path
) -> None:
    with kvstore.open(tmp_path / "store") as store:
        store.put_many({**OTHER, **rows(b"old", 0, 20)})
        with kvstore.follow(tmp_path / "store") as reader:
            built_at = build_time(store)
            store.put(b"a/15", b"live")
            kept = {"keep_newer": True, "built_at": built_at}
            push(pushes, rows(b"new", 10, 30), mode="replace", prefix=b"a/", **kept)
            puller = Puller(store, pushes, name="s")
            for _ in range(2):
                before = dict(store.scan())
                drain(puller)
                store.sync()
                reader.refresh()
                assert dict(reader.scan()) == dict(store.scan()) != before
                at = next(each.at for each in pushes.status(1).stores)
                assert at is not None
                assert dict(reader.scan(as_of=at - 1)) == before
                pushes.revert(1)


def test_a_row_of_an_older_push_is_no_newer_write(pushes: Pushes, store: Store) -> None:
    built_at = build_time(store)
    puller = Puller(store, pushes, name="s")
    store.put(b"a/05", b"live")
    store.put(b"a/06", b"live")
    push(pushes, rows(b"first", 0, 6))
    drain(puller)
    store.put(b"a/07", b"live")
    push(pushes, rows(b"second", 0, 7), keep_newer=True, built_at=built_at)
    drain(puller)
    assert store.get(b"a/05") == b"second"  # the first push had covered the live write
    assert store.get(b"a/06") == b"live"

    pushes.revert(2)
    pushes.revert(1)
    drain(puller)
    push(pushes, rows(b"third", 0, 8), keep_newer=True, built_at=built_at)
    drain(puller)
    live = dict.fromkeys([b"a/05", b"a/06", b"a/07"], b"live")
    assert dict(store.scan(prefix=b"a/0")) == {
        **rows(b"old", 0, 10),
        **rows(b"third", 0, 5),
        **live,
    }


def test_writes_between_the_pass_and_the_commit_are_seen(
    pushes: Pushes, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_at = build_time(store)
    link = store.imports.link

    def write_first(files: Any) -> None:
        store.put(b"a/03", b"late")
        store.put(b"a/12", b"late")
        store.put(b"a/77", b"late")
        store.delete_range(b"a/13", b"a/15")
        link(files)

    monkeypatch.setattr(store.imports, "link", write_first)
    push(pushes, rows(b"new", 10, 30), mode="replace", prefix=b"a/")
    drain(Puller(store, pushes, name="s"))
    assert dict(store.scan(prefix=b"a/")) == rows(b"new", 10, 30)
    kept: dict[str, Any] = {"keep_newer": True, "built_at": built_at}
    push(pushes, rows(b"newer", 10, 30), mode="replace", prefix=b"a/", **kept)
    drain(Puller(store, pushes, name="s"))
    late = dict.fromkeys([b"a/03", b"a/12", b"a/77"], b"late")
    wanted = {**rows(b"newer", 10, 30), **late}
    del wanted[b"a/13"], wanted[b"a/14"]
    assert dict(store.scan(prefix=b"a/")) == wanted


def _expire(store: Store) -> None:
    store.put(b"a/03", b"live", expires=kvstore.Timestamp(store.now() + 10**6))
    while store.get(b"a/03") is not None:
        pass


DELETES: dict[str, Callable[[Store], object]] = {
    "key": lambda store: store.delete(b"a/03"),
    "range": lambda store: store.delete_range(b"a/02", b"a/04"),
    "expiry": _expire,
    "transaction": lambda store: store.transact(lambda txn: txn.delete(b"a/03")),
}


@pytest.mark.parametrize("is_restored", [False, True], ids=["here", "restored"])
@pytest.mark.parametrize("by", DELETES)
def test_a_key_that_a_service_deleted_under_a_replace_stays_deleted(
    pushes: Pushes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, is_restored: bool
) -> None:
    """The pass of the replace finds the key alive, and its commit comes after the delete: the push
    leaves a delete over the dead key. It is no write to the key, whatever was reverted since."""
    older = {b"a/02": b"live", b"a/03": b"live", b"a/04": b"live"}
    with kvstore.open(tmp_path / "store") as store:
        store.put_many(older)
        built_at = build_time(store)
        link = store.imports.link

        def delete_first(files: Any) -> None:
            DELETES[by](store)
            link(files)

        puller = Puller(store, pushes, name="s")
        with monkeypatch.context() as patched:
            patched.setattr(store.imports, "link", delete_first)
            push(pushes, {b"a/09": b"1"}, mode="replace", prefix=b"a/")
            drain(puller)
        push(pushes, {b"a/03": b"2"})
        pushes.revert(2)
        push(pushes, {}, mode="replace", prefix=b"a/")
        drain(puller)
        assert dict(store.scan()) == {}
        Collection(tmp_path / "backups").backup(store)
        if is_restored:
            Collection(tmp_path / "backups").restore(tmp_path / "restored")
    with kvstore.open(tmp_path / ("restored" if is_restored else "store")) as store:
        newer = dict.fromkeys(older, b"4")
        push(pushes, newer, keep_newer=True, built_at=built_at)
        puller = Puller(store, pushes, name="s")
        drain(puller)
        del newer[b"a/03"]
        if by == "range":
            del newer[b"a/02"]
        assert dict(store.scan()) == newer
        pushes.revert(1)
        drain(puller)
        push(pushes, older, mode="replace", prefix=b"a/", keep_newer=True, built_at=built_at)
        drain(puller)
        assert dict(store.scan()) == dict.fromkeys(newer, b"live")


def test_an_empty_push_empties_the_span_and_each_shard_its_own(pushes: Pushes) -> None:
    every = rows(b"v", 0, 40)
    for shard in range(2):
        with kvstore.open(None, engine="memory") as store:
            puller = Puller(store, pushes, name=f"s{shard}", shard=shard)
            if not shard:
                push(pushes, every, shards=2)
                push(pushes, rows(b"w", 0, 3), shards=2, mode="replace", prefix=b"")
                push(pushes, {}, shards=2, mode="replace", prefix=b"a/")
                pushes.revert(3)
            while puller.status["log"] < 2:
                puller.step()
            own = [key for key in rows(b"w", 0, 3) if bulk.shard_of(key, 2) == shard]
            assert list(store.keys()) == own
            puller.step()
            assert list(store.keys()) == []
            drain(puller)
            assert list(store.keys()) == own


def test_a_store_that_was_restored_keeps_newer_writes(pushes: Pushes, tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "store") as store:
        store.put_many(rows(b"old", 0, 20))
        built_at = build_time(store)
        store.put(b"a/03", b"live")
        push(pushes, {b"a/04": b"first"})
        drain(Puller(store, pushes, name="s"))
        Collection(tmp_path / "backups").backup(store)
    Collection(tmp_path / "backups").restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored") as store:
        kept = {"keep_newer": True, "built_at": built_at}
        push(pushes, rows(b"new", 0, 6), mode="replace", prefix=b"a/", **kept)
        drain(Puller(store, pushes, name="s"))
        assert dict(store.scan()) == {**rows(b"new", 0, 6), b"a/03": b"live"}


def test_a_restored_store_takes_back_the_pushes_that_its_backup_has(
    pushes: Pushes, tmp_path: Path
) -> None:
    with kvstore.open(tmp_path / "store") as store:
        store.put_many(rows(b"old", 0, 6))
        puller = Puller(store, pushes, name="s")
        push(pushes, rows(b"first", 0, 4))
        push(pushes, rows(b"second", 2, 5), mode="replace", prefix=b"a/")
        drain(puller)
        store.put(b"a/03", b"live")
        before = dict(store.scan())
        Collection(tmp_path / "backups").backup(store)
        pushes.revert(2)
        pushes.revert(1)
        drain(puller)
        assert dict(store.scan()) == {**rows(b"old", 0, 6), b"a/03": b"live"}
    Collection(tmp_path / "backups").restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored") as store:
        puller = Puller(store, pushes, name="restored")
        push(pushes, {b"a/00": b"third", b"a/09": b"third"})
        assert puller.step()  # the revert of push 2
        first = {**rows(b"old", 4, 6), **rows(b"first", 0, 4), b"a/03": b"live"}
        assert dict(store.scan()) == first
        assert puller.step()  # the revert of push 1
        assert dict(store.scan()) == {**rows(b"old", 0, 6), b"a/03": b"live"}
        drain(puller)
        pushes.revert(3)  # its record is here, and push 1, which lies below, is gone for good
        drain(puller)
        assert dict(store.scan()) == {**rows(b"old", 0, 6), b"a/03": b"live"}
        stores = [pushes.status(number).stores for number in (2, 1)]
        ats = [each.at for found in stores for each in found if each.name == "restored"]
        assert [dict(store.scan(as_of=at)) for at in ats] == [first, dict(store.scan())]
        assert ats[0] is not None
        assert dict(store.scan(as_of=ats[0] - 1)) == before
        assert store.verify().problems == ()


def test_a_revert_of_a_push_whose_history_a_restored_store_lacks_is_refused(
    pushes: Pushes, tmp_path: Path
) -> None:
    with kvstore.open(tmp_path / "store") as store:
        store.put_many(rows(b"old", 0, 6))
        push(pushes, rows(b"first", 0, 4))
        drain(Puller(store, pushes, name="s"))
        store.gc(keep=timedelta(0))
        Collection(tmp_path / "backups").backup(store)
    pushes.revert(1)
    Collection(tmp_path / "backups").restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored") as store:
        drain(Puller(store, pushes, name="s"))
        assert dict(store.scan()) == {**rows(b"old", 0, 6), **rows(b"first", 0, 4)}
    [told] = pushes.status(1).stores
    assert told.state == "added"
    assert "revert refused: HistoryGoneError" in told.error


@pytest.mark.parametrize("is_lost", [False, True], ids=["kept", "lost"])
def test_a_restored_store_takes_a_push_back_over_reverts_whose_history_is_gone(
    pushes: Pushes, tmp_path: Path, is_lost: bool
) -> None:
    """GC takes the live value below the first revert, and the row of that revert has the value. It
    has another one if the row is of a push that was reverted later: then nothing tells the value.
    """

    def take_back(puller: Puller, number: int) -> str:
        pushes.revert(number)
        drain(puller)
        return str(puller.status["pushes"][str(number)]["error"])

    with kvstore.open(tmp_path / "store") as store:
        store.put(b"k", b"live")
        Collection(tmp_path / "backups").backup(store)
        push(pushes, {b"k": b"1"})
        push(pushes, {b"k": b"2"})
        drain(Puller(store, pushes, name="s"))
        Collection(tmp_path / "backups").backup(store)
    Collection(tmp_path / "backups").restore(tmp_path / "restored")
    with kvstore.open(tmp_path / "restored") as store:
        puller = Puller(store, pushes, name="s")
        if not is_lost:
            assert take_back(puller, 1) == ""
        assert take_back(puller, 2) == ""
        since = store.upper - 1
        push(pushes, {}, prefix=b"", mode="replace")
        drain(puller)
        if is_lost:
            assert take_back(puller, 1) == ""
        store.gc(before=since)
        assert store.get(b"k") is None
        error = take_back(puller, 3)
        if is_lost:
            assert error.startswith("revert refused: HistoryGoneError: history at ")
            assert store.get(b"k") is None
        else:
            assert [error, store.get(b"k")] == ["", b"live"]


def test_a_restored_store_refuses_a_revert_where_it_has_forgotten_a_later_one(
    pushes: Pushes, tmp_path: Path
) -> None:
    """Push 2 is reverted below push 3, and forgotten: its row would look like a live write."""
    with bounds(PUSHES_TOLD=3):
        with kvstore.open(tmp_path / "store") as store:
            for key in (b"other", b"k", b"k"):
                push(pushes, {key: b"pushed"})
            Collection(tmp_path / "backups").backup(store)
            drain(Puller(store, pushes, name="s"))
            Collection(tmp_path / "backups").backup(store)
        Collection(tmp_path / "backups").restore(tmp_path / "restored")
        with kvstore.open(tmp_path / "restored") as store:
            puller = Puller(store, pushes, name="s")
            pushes.revert(2)
            for key in (b"y", b"z"):
                push(pushes, {key: b"pushed"})
            for number in (1, 3):
                pushes.revert(number)
            drain(puller)
            told = puller.status["pushes"]
            assert sorted(told) == ["1", "3", "4", "5"]
            assert [told["1"]["state"], told["3"]["state"]] == ["refused", "added"]
            assert "3 pushes were added or reverted since" in told["3"]["error"]
            assert store.get(b"k") == b"pushed"


def test_a_push_whose_history_is_gone_is_refused(pushes: Pushes, store: Store) -> None:
    built_at = build_time(store)
    store.delete(b"a/03")
    store.gc(keep=timedelta(0))
    push(pushes, rows(b"new", 0, 6), keep_newer=True, built_at=built_at)
    before = dict(store.scan())
    drain(Puller(store, pushes, name="s"))
    assert dict(store.scan()) == before
    [told] = pushes.status(1).stores
    assert told.state == "refused"
    assert HistoryGoneError.__name__ in told.error


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ({"mode": "swap"}, "mode='swap'"),
        ({"mode": "replace"}, "with prefix=None"),
        ({"prefix": b"a"}, "mode='add' with prefix"),
        ({"keep_newer": True}, "with built_at=None"),
        ({"built_at": 5}, "keep_newer=False"),
        ({"keep_newer": True, "built_at": time.time_ns() + 10**15}, "in the future"),
        ({"mode": "replace", "prefix": b"\xff" * 9}, "cannot replace keys"),
    ],
)
def test_a_mode_that_makes_no_sense_is_refused(
    pushes: Pushes, mode: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        pushes.begin(**mode)


def test_rows_outside_of_the_span_are_refused(pushes: Pushes) -> None:
    with pytest.raises(UsageError, match="outside of the span"):
        push(pushes, {b"a/1": b"v", b"b/1": b"v"}, mode="replace", prefix=b"a/")
    assert pushes.list() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": "merge"},
        {"mode": "add"},
        {"spans": []},
        {"spans": [["61"]]},
        {"spans": [["62", "61"]]},
        {"spans": [["61", None]]},
        {"spans": [[(b"\xff" * 9 + b"\0p").hex(), None]]},
        {"built_at": "noon"},
        {"mode": "change", "spans": []},
        {"feed": ["61", 1]},
        {"feed": {"position": "6", "batch": 1}},
        {"feed": {"position": "61", "batch": -1}},
    ],
)
def test_an_event_with_a_mode_that_no_job_writes_is_damage(fields: dict[str, Any]) -> None:
    blob = MemoryBlob()
    pushes = Pushes.over(blob, "hostile")
    push(pushes, {b"a/1": b"v"}, mode="replace", prefix=b"a/")
    name = f"log/{1:020d}.json"
    event = json.loads(blob.get(name) or b"")
    assert event["format"] == 1
    blob.delete(name)
    blob.put(name, json.dumps({**event, **fields}).encode())
    with pytest.raises(CorruptionError, match=r"log/0*1\.json"):
        pushes.list()
    blob.delete(name)
    blob.put(name, json.dumps({**event, "format": 2}).encode())
    with pytest.raises(FormatVersionError, match=r"log/0*1\.json"):
        pushes.list()
