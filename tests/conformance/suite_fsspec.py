"""fsspec's abstract suite for file systems."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.tests import abstract

import kvstore
from kvstore.adapters.fsspec import KVStoreFileSystem


class Fixtures(abstract.AbstractFixtures):
    """A new store for each test."""

    @pytest.fixture
    def fs(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVStoreFileSystem]:
        place: Path = tmp_path_factory.mktemp("files") / "files.db"
        with kvstore.open(place, durability="async") as store:
            yield KVStoreFileSystem(store)

    @pytest.fixture
    def fs_path(self) -> str:
        return "files"

    @pytest.fixture
    def fs_join(self) -> object:
        return lambda *parts: "/".join(part for part in map(str, parts) if part)

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        """A directory exists as long as a file is in it, as in S3."""
        return False


class TestCopy(abstract.AbstractCopyTests, Fixtures):
    pass


class TestGet(abstract.AbstractGetTests, Fixtures):
    pass


class TestPut(abstract.AbstractPutTests, Fixtures):
    pass


class TestOpen(abstract.AbstractOpenTests, Fixtures):
    pass


class TestPipe(abstract.AbstractPipeTests, Fixtures):
    pass
