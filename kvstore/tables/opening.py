"""Tables of a store by name: found, or made if they are new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from kvstore.codec.tuples import desc
from kvstore.errors import UsageError
from kvstore.parts import Parts
from kvstore.tables.catalogue import Catalogue, make
from kvstore.tables.classes import schema_of_class
from kvstore.tables.evolve import IndexColumns, require_name
from kvstore.tables.sources import StoreRows
from kvstore.tables.table import Table


def open_table(
    store: Any,
    parts: Parts,
    catalogue: Catalogue,
    name: str,
    schema: pa.Schema | type | None,
    key: str | desc | Sequence[str | desc] | None,
    indexes: Mapping[str, IndexColumns] | None,
    event_time: str | None,
) -> Table:
    """See `Store.table`."""
    require_name(name)
    parts.reserve.require_free(parts.committer.where)
    rows = StoreRows(store, catalogue, parts)
    if schema is None:
        if key is not None or indexes is not None or event_time is not None:
            raise UsageError(f"table {name!r}: no schema", "pass schema=, or the name alone")
        catalogue.codec(name)
        return Table(name, rows, rows)
    model = schema if isinstance(schema, type) else None
    if model is not None:
        schema = schema_of_class(model)
    if key is None:
        raise UsageError(f"table {name!r}: no key", "pass key=[columns]")
    if parts.committer.policy.commits is None:
        # Plain reads leave tables out before the first one shows.
        parts.reserve.has_tables = True
    store.transact(lambda txn: make(txn, name, schema, key, indexes, event_time))
    catalogue.forget(name)
    return Table(name, rows, rows, model)
