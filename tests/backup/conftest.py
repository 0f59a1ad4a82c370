"""A collection to back a store up into."""

from __future__ import annotations

from pathlib import Path

import pytest

import backup
from tests.memory import tmp_path as tmp_path


@pytest.fixture
def collection(tmp_path: Path) -> backup.Collection:
    return backup.Collection(tmp_path / "collection")


@pytest.fixture
def standby(tmp_path: Path) -> Path:
    """Where a replica is to be."""
    return tmp_path / "standby"
