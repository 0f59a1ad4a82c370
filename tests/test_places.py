"""Nothing new is made inside a store, a collection or an import.

What tidies, moves or removes such a directory would take it along: `rm -r` of an old collection
took the store inside it, and a backup inside its source was gone with the source.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore import Span, bulk
from kvstore.backup import Collection, replicate
from kvstore.bulk.exports import export_rows
from kvstore.bulk.outside import export_table
from kvstore.errors import UsageError


class World:
    """A directory with a store, a collection and an import, and an open store beside them."""

    def __init__(self, root: Path, store: kvstore.Store) -> None:
        self.root, self.store = root, store
        self.collection = Collection(root / "collection")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("places")
    with kvstore.open(root / "memory", engine="memory") as memory:
        memory.put(b"k", b"v")
    staged = bulk.Import.create(root / "import")
    with staged.writer() as writer:
        writer.put(b"a", b"1")
    staged.seal()
    with kvstore.open(root / "store") as store:
        import pyarrow as pa

        store.put(b"k", b"v")
        store.table("t", pa.schema({"a": pa.int64()}), key="a").put({"a": 1})
        found = World(root, store)
        found.collection.backup(store)
        for name in ("memory", "import", "store", "collection"):
            (root / f"{name}-link").symlink_to(root / name)
        yield found


MAKERS: dict[str, Callable[[World, Path], object]] = {
    "store": lambda w, path: kvstore.open(path),
    "memory store": lambda w, path: kvstore.open(path, engine="memory"),
    "checkpoint": lambda w, path: w.store.checkpoint(path),
    "restore": lambda w, path: w.collection.restore(path),
    "collection": lambda w, path: Collection(path).backup(w.store),
    "replica": lambda w, path: replicate(w.store, path),
    "staging": lambda w, path: bulk.Import.create(path),
    "pushes": lambda w, path: bulk.Pushes(path).begin(1),
    "seed": lambda w, path: bulk.seed(path, [], at="at"),
    "export": lambda w, path: _exported(w, path.with_suffix(".csv")),
    "table": lambda w, path: export_table(w.store, "t", path.with_suffix(".parquet")),
    "publish": lambda w, path: w.collection.publish("t", path.with_suffix(".parquet"), "parquet"),
}


def _exported(world: World, path: Path) -> None:
    with world.store.snapshot() as snapshot:
        export_rows(world.store, snapshot, path, Span())


def _files(root: Path) -> set[str]:
    """The files of all that is not open."""
    found = {
        str(path)
        for name in ("memory", "import", "collection")
        for path in (root / name).rglob("*")
    }
    return found | {str(path) for path in (root / "store").iterdir() if path.is_dir()}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("inside", ["store", "memory", "collection", "import", "store-link"])
def test_nothing_is_made_inside_another_place(
    world: World, monkeypatch: pytest.MonkeyPatch, maker: str, inside: str
) -> None:
    before = _files(world.root)
    monkeypatch.chdir(world.root)
    target = world.root / inside / "new"
    for path in (
        target,
        Path(os.path.relpath(target)),
        world.root / inside / ".." / inside / "new",
    ):
        with pytest.raises(UsageError, match=r"(lies|is) inside the "):
            MAKERS[maker](world, path)
    assert _files(world.root) == before


def test_what_was_put_inside_by_hand_is_still_read(tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "s") as store:
        store.put(b"k", b"v")
        Collection(tmp_path / "c").backup(store)
    with kvstore.open(tmp_path / "inner") as store:
        store.put(b"k", b"inner")
    os.rename(tmp_path / "c", tmp_path / "s" / "c")
    os.rename(tmp_path / "inner", tmp_path / "s" / "inner")
    with kvstore.open(tmp_path / "s" / "inner") as store:
        assert store.get(b"k") == b"inner"
    assert Collection(tmp_path / "s" / "c").restore(tmp_path / "r")


@pytest.mark.parametrize("name", ["a", "a b", "ü", "~", "#?%23", "a\nb", "s3:x"])
def test_a_place_beside_is_taken_by_its_own_name(world: World, tmp_path: Path, name: str) -> None:
    """Each character of a path stands for itself."""
    path = tmp_path / name
    world.store.checkpoint(path)
    assert os.listdir(tmp_path) == [name]
    with kvstore.open_read_only(path) as copy:
        assert copy.get(b"k") == b"v"
