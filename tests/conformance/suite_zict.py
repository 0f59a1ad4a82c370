"""zict's checks of mappings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from zict import Buffer
from zict.tests import utils_test as checks

import kvstore
from kvstore.adapters.zict import KVStoreMapping


@pytest.fixture
def mapping(tmp_path: Path) -> Iterator[KVStoreMapping]:
    with kvstore.open(tmp_path / "s", durability="async") as store:
        yield KVStoreMapping(store)


def test_mapping(mapping: KVStoreMapping) -> None:
    checks.check_mapping(mapping)


def test_empty_mapping(mapping: KVStoreMapping) -> None:
    checks.check_empty_mapping(mapping)


def test_bad_key_types(mapping: KVStoreMapping) -> None:
    checks.check_bad_key_types(mapping)


def test_bad_value_types(mapping: KVStoreMapping) -> None:
    checks.check_bad_value_types(mapping)


def test_stress(mapping: KVStoreMapping) -> None:
    checks.stress_test_mapping_updates(mapping)


def test_different_keys_threadsafe(mapping: KVStoreMapping) -> None:
    checks.check_different_keys_threadsafe(mapping)


def test_same_key_threadsafe(mapping: KVStoreMapping) -> None:
    checks.check_same_key_threadsafe(mapping)


def test_closing(tmp_path: Path) -> None:
    checks.check_closing(KVStoreMapping(tmp_path / "s"))


def test_a_buffer_spills_into_it(mapping: KVStoreMapping) -> None:
    buffer = Buffer({}, mapping, n=3)
    buffer.update({str(n): b"%d" % n for n in range(10)})
    assert len(mapping) == 7
    assert {key: bytes(value) for key, value in buffer.items()} == {
        str(n): b"%d" % n for n in range(10)
    }
