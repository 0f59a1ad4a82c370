"""The directory of a test, in memory where the system has such a place with free room.

Most of the time of tests would pass in waits for the disk: they sync a hundred thousand times. No
test can see whether the disk has synced: a kill loses nothing of the page cache, and tests of lost
power have a simulated disk. Tests that kill at a random moment are marked `on_disk`: memory is too
fast to be hit in the middle of a write. `tmp_path_factory` makes its directories on the disk.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

MEMORY: Final = Path("/dev/shm")
BYTES_MIN: Final = 2 << 30
"""Bytes that must be free there. A test writes less than 300 MB."""


@pytest.fixture
def tmp_path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A directory for the time of the test."""
    is_full = not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < BYTES_MIN
    if is_full or request.node.get_closest_marker("on_disk"):
        yield tmp_path_factory.mktemp("test")
        return
    place = Path(tempfile.mkdtemp(prefix="test-", dir=MEMORY))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
