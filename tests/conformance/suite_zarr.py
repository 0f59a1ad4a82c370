"""zarr's suite for stores, and its two state machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from zarr.core.buffer import Buffer, cpu
from zarr.testing.stateful import ZarrHierarchyStateMachine, ZarrStoreStateMachine
from zarr.testing.store import StoreTests

import kvstore
from kvstore.adapters.zarr import ZarrStore

BELOW = b"zarr/"


class TestZarrStore(StoreTests[ZarrStore, cpu.Buffer]):
    """The store by its path: it pickles, and two of them are equal."""

    store_cls = ZarrStore
    buffer_cls = cpu.Buffer

    @pytest.fixture
    def store_kwargs(self, tmp_path: Path) -> dict[str, Any]:
        return {"where": str(tmp_path / "arrays.db")}

    async def set(self, store: ZarrStore, key: str, value: Buffer) -> None:
        with kvstore.connect(place(store)) as client:
            client.put(BELOW + key.encode(), value.to_bytes())

    async def get(self, store: ZarrStore, key: str) -> Buffer:
        with kvstore.connect(place(store)) as client:
            return self.buffer_cls.from_bytes(client.get(BELOW + key.encode(), default=b""))

    def test_store_repr(self, store: ZarrStore) -> None:
        assert repr(store) == f"ZarrStore('kvstore://{place(store)}@/zarr/')"

    def test_store_supports_writes(self, store: ZarrStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: ZarrStore) -> None:
        assert store.supports_listing


def place(store: ZarrStore) -> str:
    """The path of the store, which listens from now on."""
    handle = store.handle
    assert handle.store
    return handle.address


def run(machine: Any, tmp_path: Path) -> None:
    with kvstore.open(tmp_path / "arrays.db", durability="async") as store:
        run_state_machine_as_test(
            lambda: machine(ZarrStore(store)), settings=settings(max_examples=25, deadline=None)
        )


def test_the_store_state_machine(tmp_path: Path) -> None:
    run(ZarrStoreStateMachine, tmp_path)


def test_the_hierarchy_state_machine(tmp_path: Path) -> None:
    run(ZarrHierarchyStateMachine, tmp_path)
