"""An empty collection for backups of the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import backup


@pytest.fixture
def collection(tmp_path: Path) -> backup.Collection:
    return backup.Collection(tmp_path / "collection")


@pytest.fixture
def standby(tmp_path: Path) -> Path:
    """The path of a replica that does not exist yet."""
    return tmp_path / "standby"
