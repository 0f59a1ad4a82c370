"""A path that cannot be opened as a store gets an error that names it, and is left as it was.

Damaged logs and sorted files are in `tests/engine`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvstore
from kvstore import bulk
from kvstore.backup import Collection, replicate
from kvstore.cli.main import app
from kvstore.engine import META
from kvstore.engine.memory_engine import MemoryEngine
from kvstore.engine.rocks import RocksEngine
from kvstore.errors import (
    ClosedError,
    CorruptionError,
    FormatVersionError,
    LockedError,
    NotAStoreError,
    PoisonedError,
    StorageError,
    UsageError,
)
from kvstore.mvcc.meta import FORMAT
from kvstore.opening import engine_at
from kvstore.storage.wrapped import Bandwidth
from kvstore.store import Store
from kvstore.timeline.durability import Durability

pytestmark = pytest.mark.usefixtures("each_engine")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    clock = kvstore.ManualClock(1_000_000)
    with kvstore.open(tmp_path / "store", durability="async", clock=clock) as store:
        store.put(b"k", b"v")
        yield store


def test_another_process_is_refused_while_the_store_is_open(store: Store) -> None:
    code = (
        "import os, sys, kvstore\n"
        "from kvstore.errors import LockedError\n"
        "try: kvstore.open(sys.argv[1], os.environ['EACH_ENGINE'])\n"
        "except LockedError as error: print(error.path, error.owner, sep='|')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(store.path)], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == f"{store.path}|another process"
    assert store.get(b"k") == b"v"
    with pytest.raises(LockedError) as refused:
        kvstore.open(str(store.path))
    assert refused.value.owner == "this process"
    store.put(b"still", b"here")


def test_a_store_is_refused_by_all_its_names_while_it_is_open(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB knows the stores of its own process by name only, and a file lock belongs to the
    process."""
    assert store.path is not None
    monkeypatch.chdir(store.path.parent)
    (tmp_path / "link").symlink_to(store.path)
    for name in (store.path.name, tmp_path / "link", f"{store.path}/.", f"./{store.path.name}"):
        with pytest.raises(LockedError) as refused:
            kvstore.open(name)
        assert refused.value.owner == "this process"


def test_a_store_that_was_renamed_while_it_is_open_is_refused(store: Store, tmp_path: Path) -> None:
    """Two databases of one process that write the same files would damage them."""
    assert store.path is not None
    store.path.rename(tmp_path / "moved")
    with pytest.raises(LockedError):
        kvstore.open(tmp_path / "moved")
    store.put(b"still", b"here")
    with pytest.raises(StorageError, match="moved away"):
        store.sync()
    store.close()
    with kvstore.open(tmp_path / "moved") as moved:
        assert moved.get(b"still") == b"here"


def test_a_store_stays_where_it_is_when_its_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    with kvstore.open("db") as store:
        staged = bulk.Import.create("in")
        monkeypatch.chdir(tmp_path / "away")
        with staged.writer() as writer:
            writer.put(b"a", b"1")
        staged.seal()
        store.put(b"b", b"2")
        store.upkeep.compact()  # this makes new files
        bulk.ingest(store, staged.staging)
    assert list((tmp_path / "away").iterdir()) == []
    with kvstore.open(tmp_path / "home" / "db") as store:
        assert list(store.scan()) == [(b"a", b"1"), (b"b", b"2")]


@pytest.mark.parametrize(("path", "problem"), [("d\0b", "zero byte"), ("", "empty")])
def test_a_path_that_names_nothing_is_refused(path: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        kvstore.open(path)


@pytest.mark.parametrize("path", ["~", "~/x", "~root/x", Path("~/x")], ids=str)
def test_a_tilde_is_refused_at_every_door(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | Path
) -> None:
    """Some doors made a directory of that name."""
    monkeypatch.chdir(tmp_path)
    before = sorted(each.name for each in tmp_path.iterdir())
    collection = Collection(tmp_path / "c")
    doors: list[Callable[[], object]] = [
        lambda: kvstore.open(path),
        lambda: kvstore.open_read_only(path),
        lambda: kvstore.follow(path),
        lambda: kvstore.connect(path),
        lambda: store.checkpoint(path),
        lambda: Collection(path).backup(store),
        lambda: Collection(f"file:///{path}").backup(store),
        lambda: collection.restore(path),
        lambda: bulk.Import.create(path),
        lambda: replicate(store, path),
    ]
    for door in doors:
        with pytest.raises(UsageError, match=r"begins with ~, which stands for a home only in"):
            door()
    assert sorted(each.name for each in tmp_path.iterdir()) == before
    for words in (["put", str(path), "k", "v", "--create"], ["backup", "run", "store", str(path)]):
        refused = CliRunner().invoke(app, words)
        assert refused.exit_code == 2, refused.output
    kvstore.open("./~").close()  # a directory of that name has another one


def test_the_directory_above_is_not_made_in_silence(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A mistyped path, or a disk that is not mounted, had a new store, and new backups."""
    gone = tmp_path / "gone" / "deep" / "x"
    collection = Collection(tmp_path / "c")
    collection.backup(store)
    refusing: list[Callable[[], object]] = [
        lambda: store.checkpoint(gone),
        lambda: collection.restore(gone),
        lambda: replicate(store, gone),
        lambda: bulk.seed(gone, [], key="k", value="v", at="t"),
        lambda: Collection(gone).backup(store),
        lambda: Collection(gone, bandwidth=Bandwidth(1 << 20)).backup(store),
    ]
    for door in refusing:
        with pytest.raises(UsageError, match=r"there is no directory .*deep; make it first"):
            door()
    assert not (tmp_path / "gone").exists()
    with caplog.at_level("WARNING", logger="kvstore.store"):
        kvstore.open(gone).close()
    told = [each.getMessage() for each in caplog.records]
    assert any("making a missing directory" in each and str(gone.parent) in each for each in told)


@pytest.mark.parametrize("how", ["removed", "moved away", "replaced"])
@pytest.mark.parametrize("durability", ["group", "sync", "async"])
def test_a_directory_that_goes_under_an_open_store_is_told_at_the_next_sync(
    tmp_path: Path, durability: Durability, how: str
) -> None:
    """Commits were acknowledged as durable, and nothing was left of them in their place."""
    with kvstore.open(tmp_path / "s", durability=durability) as store:
        store.put(b"k", b"v")
        store.sync()
        if how == "removed":
            shutil.rmtree(tmp_path / "s")
        else:
            (tmp_path / "s").rename(tmp_path / "moved")
        if how == "replaced":
            (tmp_path / "s").mkdir()
            (tmp_path / "s" / "DURABLE").touch()
        told = store.sync if durability == "async" else lambda: store.put(b"k", b"lost")
        words = "removed" if how == "removed" else "moved away"
        with pytest.raises(StorageError, match=f"{words} while the store was open"):
            told()
        with pytest.raises(PoisonedError, match=words):
            store.put(b"k", b"later")
    if how == "moved away":
        with kvstore.open(tmp_path / "moved") as moved:
            assert moved.get(b"k") in (b"v", b"lost")


def test_a_path_that_is_too_long_is_an_error_of_the_storage(tmp_path: Path) -> None:
    for opened in (kvstore.open, kvstore.open_read_only):
        with pytest.raises(StorageError, match="too long"):
            opened(tmp_path / ("d" * 300) / "db")


def test_a_path_that_cannot_be_resolved_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="surrogates"):
        kvstore.open("d\ud800b")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="No such file"):
        kvstore.open("db")


# -- things at the path --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"engine": "papyrus"}, "engine='papyrus'"),
        ({"durability": "maybe"}, "durability='maybe'"),
        ({"create": False}, "is not usable"),
    ],
)
def test_options_of_open_are_checked_before_anything_is_made(
    tmp_path: Path, options: dict[str, Any], names: str
) -> None:
    with pytest.raises(UsageError, match=names):
        kvstore.open(tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("inside", ["copy", "ingest/copy", "../link/copy"])
def test_a_checkpoint_inside_the_store_is_refused(
    store: Store, tmp_path: Path, inside: str
) -> None:
    """An opening removes old files of `ingest`, and a copy of the directory would hold the store
    twice."""
    assert store.path is not None
    (tmp_path / "link").symlink_to(store.path)
    (store.path / "ingest").mkdir(exist_ok=True)
    with pytest.raises(UsageError, match=r"inside the store; checkpoint into a path beside"):
        store.checkpoint(store.path / inside)
    assert not (store.path / inside).exists()


def test_a_path_that_is_no_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "draft.txt").write_text("dear")
    for path in (tmp_path / "letters", tmp_path / "letters" / "draft.txt"):
        with pytest.raises(NotAStoreError) as refused:
            kvstore.open(path)
        assert refused.value.path == str(path)
        assert refused.value.found
    assert [file.name for file in (tmp_path / "letters").iterdir()] == ["draft.txt"]
    (tmp_path / "broken").symlink_to(tmp_path / "letters" / "draft.txt")
    with pytest.raises(NotAStoreError):
        kvstore.open(tmp_path / "broken")


def rewrite_meta(path: Path, name: str, change: Callable[[dict[str, Any]], None] | None) -> None:
    engine = MemoryEngine(path) if engine_at(path) == "memory" else RocksEngine(path)
    stored = engine.get(META, name.encode())
    assert stored is not None
    record = json.loads(stored)
    if change is not None:
        change(record)
    batch = engine.batch()
    text = b"not json" if change is None else json.dumps(record).encode()
    batch.put(name.encode(), text, engine.families[META])
    engine.write(batch)
    engine.sync()
    engine.close()


@pytest.mark.parametrize("field", ["version", "v"])
def test_a_newer_format_is_refused_and_opens_again_with_its_own_release(
    tmp_path: Path, field: str
) -> None:
    path = tmp_path / "store"
    with kvstore.open(path) as store:
        store.put(b"k", b"v")
    rewrite_meta(path, FORMAT, lambda record: record.update({field: 99}))
    with pytest.raises(FormatVersionError) as refused:
        kvstore.open(path)
    assert refused.value.found == 99
    rewrite_meta(path, FORMAT, lambda record: record.update({field: 1}))
    with kvstore.open(path) as store:
        assert store.get(b"k") == b"v"


def test_a_damaged_record_is_corruption_that_names_it(tmp_path: Path) -> None:
    kvstore.open(tmp_path / "store").close()
    rewrite_meta(tmp_path / "store", FORMAT, None)
    with pytest.raises(CorruptionError) as found:
        kvstore.open(tmp_path / "store")
    assert FORMAT in found.value.where


def test_an_engine_of_the_callers_own_takes_no_path(tmp_path: Path) -> None:
    engine = MemoryEngine(None)
    with pytest.raises(UsageError, match="path=None"):
        kvstore.open(tmp_path / "store", engine)
    with pytest.raises(UsageError, match="or an Engine"):
        kvstore.open(None, 7)  # type: ignore[arg-type]
    with kvstore.open(None, engine) as store:
        store.put(b"k", b"v")
        assert store.get(b"k") == b"v"
    with pytest.raises(ClosedError):
        engine.get(META, FORMAT.encode())


def test_a_store_over_an_engine_of_the_callers_own_is_named_by_its_class(tmp_path: Path) -> None:
    class Shelf(RocksEngine):
        pass

    with kvstore.open(None, Shelf(tmp_path / "shelf")) as store:
        store.put(b"k", b"v")
    with pytest.raises(ClosedError, match="the store over Shelf"):
        store.put(b"k", b"w")
    with kvstore.open(None, Shelf(tmp_path / "shelf")) as again:
        assert again.get(b"k") == b"v"
