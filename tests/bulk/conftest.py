"""Fixtures for forged staging directories: a directory to forge, and a store that refuses each of
them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from tests.bulk.staged import stage


@pytest.fixture(scope="module")
def attacked(each_engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvstore.Store]:
    """The store to which each test of this module tries to add its staging directory."""
    place = tmp_path_factory.mktemp("attacked")
    with kvstore.open(place / "store") as store:
        store.put(b"live", b"kept")
        yield store
        assert list(store.scan()) == [(b"live", b"kept")]


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    """A sealed import that nobody has changed."""
    stage(tmp_path / "staged")
    return tmp_path / "staged"
