"""A store and a collection to back it up into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import backup
import kvstore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(tmp_path / "store", durability="async") as opened:
        yield opened


@pytest.fixture
def collection(tmp_path: Path) -> backup.Collection:
    return backup.Collection(tmp_path / "collection")
