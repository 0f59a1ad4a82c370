"""A refused import changes nothing, neither in the store nor in the staging directory."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore import bulk
from kvstore.errors import FormatVersionError, ImportRefusedError
from tests.bulk.staged import everything_in

REFUSED = (ImportRefusedError, FormatVersionError)


def refused(store: kvstore.Store, staging: Path, match: str = ".", **how: bool) -> None:
    """The import is refused, and no name or byte of the store and of `staging` changes."""
    assert store.path is not None
    places = store.path, staging.parent
    before = [everything_in(place) for place in places]
    with pytest.raises(REFUSED, match=match) as raised:
        bulk.ingest(store, staging, move=True, **how)
    assert len(str(raised.value)) < 1000
    assert [everything_in(place) for place in places] == before
    assert store.imports.all() == []
