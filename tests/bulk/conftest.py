"""Fixtures of forged staging directories: one to forge, and a store that refuses all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from tests.bulk.staged import stage


@pytest.fixture(scope="module")
def attacked(each_engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[kvstore.Store]:
    """A store that every refused staging directory of this module was to be added to."""
    place = tmp_path_factory.mktemp("attacked")
    with kvstore.open(place / "store") as store:
        store.put(b"live", b"kept")
        yield store
        assert list(store.scan()) == [(b"live", b"kept")]


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    """A sealed import, as it was sealed."""
    stage(tmp_path / "staged")
    return tmp_path / "staged"
