"""The files that a store has fetched for a push: they stay while the push may still be added, and
no longer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest

import kvstore
from kvstore import Store, bulk, unique
from kvstore.bulk.pushes import Pushes
from kvstore.bulk.pushes.pull import Puller
from kvstore.errors import AccessDeniedError, CorruptionError, ImportRefusedError, NotUniqueError
from kvstore.storage.memory_storage import MemoryBlob
from kvstore.tables import Table
from tests.harness.bounds import bounds
from tests.pushes.made import drain, push

SCHEMA = pa.schema([("id", pa.int64()), ("mail", pa.string())])
WAIT_S = 60
"""Far more than any wait of a test takes: a bound for a machine that hangs."""


class Watched(MemoryBlob):
    """A bucket that counts the bytes of parts that were read, and calls `on_part` before."""

    read = 0
    on_part: Callable[[], object] = staticmethod(lambda: None)

    def get_range(self, name: str, *, start: int, length: int) -> bytes | None:
        if "part-" in name:
            self.on_part()
        found = super().get_range(name, start=start, length=length)
        self.read += len(found or b"") * ("part-" in name)
        return found


@pytest.fixture
def blob() -> Watched:
    return Watched()


@pytest.fixture
def pushes(blob: Watched) -> Pushes:
    return Pushes.over(blob, "watched")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with kvstore.open(tmp_path / "store") as opened:
        yield opened


def came(store: Store) -> list[Path]:
    assert store.path is not None
    return sorted((store.path / "ingest").glob("*"))


def mails_of(store: Store) -> Table:
    return store.table("mails", SCHEMA, "id", indexes={"mail": unique("mail")})


def push_conflict(pushes: Pushes, store: Store) -> bulk.Push:
    """Push a row whose value in a unique index another row of `store` has."""
    mails = mails_of(store)
    mails.put({"id": 1, "mail": "ada"})
    with pushes.begin(table=mails) as building:
        building.add(pa.table({"id": [2], "mail": ["ada"]}, SCHEMA))
        return building.seal()


@pytest.mark.parametrize("ending", ["mend", "revert", "expire", "pass"])
def test_a_push_that_waits_is_fetched_once(
    pushes: Pushes, blob: Watched, store: Store, ending: str
) -> None:
    size = push_conflict(pushes, store).size_bytes
    puller = Puller(store, pushes, name="s", on_refusal="wait")
    for _ in range(3):
        with pytest.raises(NotUniqueError):
            puller.step()
    again = Puller(store, pushes, name="s", on_refusal="wait")  # another process
    with pytest.raises(NotUniqueError):
        again.step()
    assert blob.read == size
    assert [left.suffix for left in came(store)] == [".fetched"]
    if ending == "mend":
        mails_of(store).delete(1)
    elif ending == "revert":
        pushes.revert(1)
    elif ending == "expire":
        pushes.expire(keep=0)
    else:
        again = Puller(store, pushes, name="s")
    drain(again)
    assert blob.read == size
    assert came(store) == []
    wanted = "added" if ending == "mend" else "refused"
    assert pushes.status(1).stores[0].state == wanted


def test_a_fetched_file_that_is_damaged_is_fetched_again(
    pushes: Pushes, blob: Watched, store: Store
) -> None:
    size = push_conflict(pushes, store).size_bytes
    puller = Puller(store, pushes, name="s", on_refusal="wait")
    with pytest.raises(NotUniqueError):
        puller.step()
    assert store.path is not None
    [part] = store.path.glob("ingest/*.fetched/part-*")
    data = part.read_bytes()
    part.write_bytes(bytes(len(data)))
    with pytest.raises((ImportRefusedError, CorruptionError)):
        puller.step()
    mails_of(store).delete(1)
    drain(puller)
    assert blob.read == 2 * size
    assert pushes.status(1).stores[0].state == "added"


@pytest.mark.parametrize("ending", ["overtaken", "refused both", "reverted", "room"])
def test_files_of_one_push_at_most_stay_on_the_disk(
    pushes: Pushes, blob: Watched, store: Store, ending: str
) -> None:
    store.put(b"old", b"1")

    def send(number: int) -> None:
        push(pushes, {b"%d" % number: b"v"}, mode="replace", prefix=b"")

    def refuse(number: int) -> list[str]:
        """Others fill the disk while a push is fetched: its deletes do not fit."""
        with ExitStack() as full:
            blob.on_part = lambda: full.enter_context(bounds(FETCH_SPARE_BYTES=1 << 60))
            send(number)
            assert puller.step()
        blob.on_part = lambda: None
        return [each.suffix for each in came(store)]

    puller = Puller(store, pushes, name="s")
    assert refuse(1) == ["", ".fetched"]
    if ending == "refused both":
        assert refuse(2) == []  # the second one has had all room
    elif ending == "overtaken":
        send(2)
    elif ending == "reverted":
        pushes.revert(1)
    drain(Puller(store, pushes, name="s"))
    assert came(store) == []
    expected = {"overtaken": b"2", "room": b"1", "refused both": b"2", "reverted": b"old"}
    assert [*store.keys()] == [expected[ending]]


def test_a_fetch_that_is_refused_access_continues_later(
    pushes: Pushes, blob: Watched, store: Store
) -> None:
    made = push(pushes, {b"%03d" % number: b"v" * 100 for number in range(300)})
    reads: list[None] = []

    def close() -> None:
        reads.append(None)
        if len(reads) == 3:
            raise AccessDeniedError("the bucket", "no permission")

    blob.on_part = close
    puller = Puller(store, pushes, name="s")
    with bounds(OBJECT_PIECE_BYTES=500, OBJECT_PIECES_AT_ONCE=1):
        with pytest.raises(AccessDeniedError):
            puller.step()
        drain(puller)
    assert store.count() == 300
    assert blob.read == made.size_bytes


class Stopped(Exception):  # noqa: N818  # a signal of the test
    """A caller has ended its import."""


def test_the_sweep_spares_imports_that_a_caller_has_begun(store: Store) -> None:
    """An import that a thread has, and one that waits for another call, keep their files."""
    pushes = Pushes(f"memory://begun-{store.store_id}/root")
    puller = Puller(store, pushes, name="s")
    fetched, begun, held = (push_conflict(pushes, store) for _ in range(3))
    drain(puller)
    assert came(store) == []
    mails_of(store).delete(1)
    is_held, may_go_on = threading.Event(), threading.Event()
    fetches: list[bulk.Push] = []

    def add(made: bulk.Push, at: str, then: Callable[[], object]) -> None:
        def tell(step: str) -> None:
            fetches.extend([made] * step.startswith("fetch"))
            if step.startswith(at):
                then()

        bulk.ingest(store, f"{pushes.where}/imports/{made.job}/0000", progress=tell)

    def stop() -> None:
        raise Stopped

    def hold() -> None:
        is_held.set()
        assert may_go_on.wait(WAIT_S)

    for made, at in ((fetched, "fetch"), (begun, "link")):
        with pytest.raises(Stopped):
            add(made, at, stop)
    with ThreadPoolExecutor(1) as thread:
        adding = thread.submit(add, held, "check", hold)
        try:
            assert is_held.wait(WAIT_S)
            everything = came(store)
            push(pushes, {b"next": b"1"})
            drain(puller)
            left = came(store)
        finally:
            may_go_on.set()
        adding.result()
    gone, *spared = (f"{made.imports[0].import_id:016x}" for made in (fetched, begun, held))
    assert {path.stem for path in everything} == {gone, *spared}
    assert left == [path for path in everything if path.stem != gone]
    fetches.clear()
    add(begun, "nowhere", stop)
    assert fetches == [begun]  # told once: there was no piece to fetch
    assert came(store) == []
    assert mails_of(store).get(2) is not None


def test_a_sweep_is_one_list_of_the_directory_however_many_pushes_were_taken(
    pushes: Pushes, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    puller = Puller(store, pushes, name="s")
    for number in range(10):
        push(pushes, {b"%d" % number: b"v"})
    drain(puller)
    assert store.path is not None
    place, looks = str(store.path / "ingest"), list[str]()

    def watched(name: str) -> Callable[..., object]:
        real = getattr(os, name)

        def look(path: object = ".", *rest: object, **options: object) -> object:
            if str(path).startswith(place):
                looks.append(f"{name}{str(path).removeprefix(place)}")
            return real(path, *rest, **options)

        return look

    for name in ("stat", "listdir", "scandir"):
        monkeypatch.setattr(os, name, watched(name))
    assert not puller.step()
    assert [look for look in looks if look != "stat"] == ["listdir"]
