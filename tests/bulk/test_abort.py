"""Aborts of imports that are half added, and aborts beside the thread that adds."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.errors import UsageError
from tests.bulk.staged import stage

pytestmark = [pytest.mark.usefixtures("each_engine"), pytest.mark.tiny_limits]


def test_who_has_an_import_to_himself_may_abort_and_add_it(
    store: kvstore.Store, tmp_path: Path
) -> None:
    staged = stage(tmp_path / "staged", {b"a": b"1"})
    with store.imports.alone(staged.import_id):
        assert not store.imports.abort(staged.import_id)
        bulk.ingest(store, tmp_path / "staged")
        with pytest.raises(UsageError, match="revert"):
            store.imports.abort(staged.import_id)
    assert bulk.ingest(store, tmp_path / "staged") == store.imports.all()[0].added


def test_an_import_left_half_added_is_invisible_and_can_be_aborted_or_added(
    store: kvstore.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = stage(tmp_path / "staged", {b"a": b"1"})

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("killed here")

    with monkeypatch.context() as patched:
        patched.setattr(store.imports, "add", fail)
        with pytest.raises(RuntimeError):
            bulk.ingest(store, tmp_path / "staged")
    assert store.get(b"a") is None
    assert [record.state for record in store.imports.all()] == ["adding"]
    assert store.imports.abort(staged.import_id)
    assert store.imports.all() == []
    assert not store.imports.abort(staged.import_id)
    bulk.ingest(store, tmp_path / "staged")
    assert store.get(b"a") == b"1"
    with pytest.raises(UsageError, match="revert"):
        store.imports.abort(staged.import_id)


@pytest.mark.parametrize("step", ["check", "prepare", "link", "add"])
def test_an_abort_waits_for_who_is_adding_the_import(
    store: kvstore.Store, tmp_path: Path, step: str
) -> None:
    """An abort beside the adding thread would remove rows, and the import would be added without
    them."""
    staged = stage(tmp_path / "staged", {b"a": b"1", b"b": b"2"})

    def killed(at: str) -> None:
        if at == "add":
            raise RuntimeError("killed here")

    with pytest.raises(RuntimeError):
        bulk.ingest(store, tmp_path / "staged", progress=killed)
    refused: list[str] = []

    def abort() -> None:
        try:
            store.imports.abort(staged.import_id)
        except UsageError as error:
            refused.append(str(error))

    other = threading.Thread(target=abort)

    def interfere(at: str) -> None:
        if at == step:
            other.start()
            other.join(0.05)
            with pytest.raises(UsageError, match="being added by this thread"):
                store.imports.abort(staged.import_id)

    if step == "link":  # the import is not linked yet
        assert store.imports.abort(staged.import_id)
    bulk.ingest(store, tmp_path / "staged", progress=interfere)
    other.join()
    assert "revert it instead" in refused[0]
    assert dict(store.scan()) == {b"a": b"1", b"b": b"2"}
    store.verify().require_ok()
