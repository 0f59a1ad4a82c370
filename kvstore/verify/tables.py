"""Verifies that each row of each table can be read: as Arrow, as Python, and by its columns.

Releases before this rule took texts that are no UTF-8, and times that Python does not have
(`kvstore.tables.exact`). Such a row is named here with its key as `Table.delete` takes it. It can
be deleted and put anew. Versions that were replaced are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.arrow import binary_array
from kvstore.parts import Parts
from kvstore.span import Span
from kvstore.tables.catalogue import Catalogue, StoreDefinitions
from kvstore.tables.codec import TableCodec
from kvstore.verify.report import Findings, Problem


def unreadable_rows(parts: Parts, at: int) -> Iterator[Problem]:
    """The live rows of tables that cannot be read as of `at`, each with what to do. Costs a pass
    over the rows of all tables. Raises `CorruptionError` for a definition that is damaged."""
    catalogue = Catalogue(StoreDefinitions(parts))
    for name in catalogue.names():
        yield from _of_table(parts, catalogue.codec(name, at), at)


def check_tables(findings: Findings, parts: Parts, at: int) -> None:
    """Note each row of a table that cannot be read."""
    with findings.reading():
        for problem in unreadable_rows(parts, at):
            findings.add(*problem)


def _of_table(parts: Parts, codec: TableCodec, at: int) -> Iterator[Problem]:
    for keys, values in parts.versions.scan(Span.of_prefix(codec.key.prefix), at):
        for row, why in codec.faults(binary_array(keys), binary_array(values)):
            where = f"{codec.definition.where}, row {codec.key.named(keys[row])}"
            yield Problem(where, f"{why}; delete the row, or put it anew")
