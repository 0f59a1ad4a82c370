"""Collections and pushes refuse arguments of wrong types with an error of the tree, and show no
secret in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import backup, bulk
from kvstore.errors import UsageError

Case = Callable[[kvstore.Store, Path], Any]


def collected(store: kvstore.Store, place: Path) -> backup.Collection:
    found = backup.Collection(place / "collection")
    found.backup(store)
    return found


def pushed(place: Path) -> bulk.Pushes:
    found = bulk.Pushes(place / "pushes")
    with found.begin() as building:
        with building.writer() as writer:
            writer.put(b"k", b"v")
        building.seal()
    return found


WRONG: dict[str, Case] = {
    "url none": lambda s, p: backup.Collection(None),  # type: ignore[arg-type]
    "url number": lambda s, p: backup.Collection(5),  # type: ignore[arg-type]
    "url bytes": lambda s, p: backup.Collection(b"c"),  # type: ignore[arg-type]
    "url of no text": lambda s, p: backup.Collection("\ud800"),
    "passphrase number": lambda s, p: backup.Collection(p, 5),  # type: ignore[arg-type]
    "passphrase bytes": lambda s, p: backup.Collection(p, b"x"),  # type: ignore[arg-type]
    "key_file number": lambda s, p: backup.Collection(p, key_file=5),  # type: ignore[arg-type]
    "key_file of no text": lambda s, p: backup.Collection(p, key_file="\ud800"),
    "options": lambda s, p: backup.Collection(p, options=5),  # type: ignore[arg-type]
    "options without texts": lambda s, p: backup.Collection(p, options={b"region": "eu"}),  # type: ignore[dict-item]
    "bandwidth": lambda s, p: backup.Collection(p, bandwidth=5),  # type: ignore[arg-type]
    "cleared ranges": lambda s, p: bulk.Pushes(p / "w").begin_changes(cleared=["x"]),  # type: ignore[list-item]
    "follow every": lambda s, p: collected(s, p).follow(s, every=None),  # type: ignore[arg-type]
    "restore history": lambda s, p: collected(s, p).restore(p / "r", history=b"no"),  # type: ignore[arg-type]
    "staging options": lambda s, p: bulk.Import.create("memory://wrong", options=5),  # type: ignore[arg-type]
    "pushes options": lambda s, p: bulk.Pushes("memory://wrong", options=5),  # type: ignore[arg-type]
    "push number text": lambda s, p: pushed(p).status("1"),  # type: ignore[arg-type]
    "push number none": lambda s, p: pushed(p).revert(None),  # type: ignore[arg-type]
    "push names": lambda s, p: pushed(p).wait(1, None),  # type: ignore[arg-type]
    "pull into nothing": lambda s, p: bulk.pull(None, p, name="a"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", WRONG)
def test_an_argument_of_a_wrong_type_is_refused(case: str, tmp_path: Path) -> None:
    with kvstore.open(None, engine="memory") as store, pytest.raises(UsageError):
        WRONG[case](store, tmp_path)


def test_the_error_shows_no_passphrase(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be a text, not bytes") as raised:
        backup.Collection(tmp_path, b"secret")  # type: ignore[arg-type]
    assert "secret" not in str(raised.value)


def test_a_bound_of_an_import_is_a_number(tmp_path: Path) -> None:
    staged = bulk.Import.create(tmp_path / "staged")
    with staged.writer() as writer:
        writer.put(b"k", b"v")
    staged.seal()
    with kvstore.open(tmp_path / "store") as store:
        with pytest.raises(UsageError, match="max_bytes='1 GB'"):
            bulk.ingest(store, tmp_path / "staged", max_bytes="1 GB")  # type: ignore[arg-type]
        assert store.count() == 0
