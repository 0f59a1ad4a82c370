"""The files that a store has fetched for a push: they stay while the push may still be added, and
no longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest

import bulk
import kvstore
from bulk.pushes import Pushes
from bulk.pushes.pull import Puller
from kvstore import Store, unique
from kvstore.errors import AccessDeniedError, CorruptionError, ImportRefusedError, NotUniqueError
from kvstore.storage.memory import MemoryBlob
from kvstore.tables import Table
from kvstore.testing.bounds import bounds
from tests.pushes.made import drain, push

SCHEMA = pa.schema([("id", pa.int64()), ("mail", pa.string())])


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
