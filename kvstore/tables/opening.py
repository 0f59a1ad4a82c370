"""Tables of a store by name: found, or made if they are new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from kvstore.codec.tuples import desc
from kvstore.errors import UsageError
from kvstore.parts import Parts
from kvstore.tables.catalogue import Catalogue, make
from kvstore.tables.classes import schema_of_class
from kvstore.tables.evolve import IndexColumns, require_name
from kvstore.tables.sources import StoreRows
from kvstore.tables.table import Table


class Given(NamedTuple):
    """The arguments that make a table: schema, key, indexes and event time, and the class whose
    instances its rows are."""

    arguments: tuple[
        pa.Schema,
        str | desc | Sequence[str | desc],
        Mapping[str, IndexColumns] | None,
        str | None,
    ]
    model: type | None


def arguments_given(
    name: str,
    schema: pa.Schema | type | None,
    key: str | desc | Sequence[str | desc] | None,
    indexes: Mapping[str, IndexColumns] | None,
    event_time: str | None,
) -> Given | None:
    """The arguments of a call that makes a table; None for one that finds it by its name alone."""
    if schema is None:
        if key is not None or indexes is not None or event_time is not None:
            raise UsageError(f"table {name!r}: no schema", "pass schema=, or the name alone")
        return None
    model = schema if isinstance(schema, type) else None
    if model is not None:
        schema = schema_of_class(model)
    if key is None:
        raise UsageError(f"table {name!r}: no key", "pass key=[columns]")
    return Given((schema, key, indexes, event_time), model)


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
    rows = StoreRows(store, catalogue, parts)
    made = arguments_given(name, schema, key, indexes, event_time)
    if made is None:
        catalogue.codec(name)
        return Table(name, rows, rows)
    if parts.committer.policy.commits is None:
        # Plain reads leave tables out before the first one shows.
        parts.reserve.has_tables = True
    with catalogue.changing(name):
        number_free = catalogue.number_free
        store.transact(lambda txn: make(txn, name, *made.arguments, number_free=number_free))
    return Table(name, rows, rows, made.model)
