"""Writes `docs/reference/columns.md`: what a column of each type takes and gives, as tried.

`python -m tests.tables.columns_page` writes the page anew; `test_columns_page.py` compares it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pyarrow as pa

from kvstore.bulk.outside import outside_type
from kvstore.errors import UsageError
from kvstore.tables import TableCodec
from kvstore.tables.catalogue import define
from kvstore.tables.definition import Kind, kind_of
from kvstore.tables.row_codec import conform
from tests.tables.arrays import SOURCES, family
from tests.tables.drawn import EXAMPLES, TYPES

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "columns.md"
_RULE: Final = "|---|---|---|---|---|---|---|\n"


def page() -> str:
    """The page with its table as it is tried; the sentences stay."""
    head, rule, rest = PAGE.read_text().partition(_RULE)
    return f"{head}{rule}{''.join(map(_line, TYPES))}\n{rest.partition(chr(10) * 2)[2]}"


def _line(name: str) -> str:
    type_, _ = TYPES[name]
    kind = kind_of(type_)
    definition = define("t", 1, pa.schema([("k", pa.int64()), ("x", type_)]), ["k"])
    codec = TableCodec(definition)
    kinds = dict.fromkeys(family(source) for source in SOURCES if _takes(codec, source))
    row = codec.to_dict(*codec.row({"k": 1, "x": EXAMPLES[name]}))
    given = type(EXAMPLES[name]).__name__
    outside = outside_type(type_)
    least, most = _bounds(kind)
    cells = [
        f"`{type_}`",
        ", ".join(kinds),
        given,
        least,
        most,
        type(row["x"]).__name__,
        "none" if outside is None else f"`{outside}`",
    ]
    return f"| {' | '.join(cells)} |\n"


def _takes(codec: TableCodec, source: pa.DataType) -> bool:
    batch = pa.RecordBatch.from_arrays([pa.array([], pa.int64()), pa.array([], source)], ["k", "x"])
    try:
        conform(codec.definition, batch)
    except UsageError:
        return False
    return True


def _bounds(kind: Kind) -> tuple[str, str]:
    if kind.least is not None and kind.most is not None:
        made = [kind.value(each) if kind.value else each for each in (kind.least, kind.most)]
        return f"`{made[0]}`", f"`{made[1]}`"
    if pa.types.is_integer(kind.type):
        least = -(1 << kind.type.bit_width - 1) if pa.types.is_signed_integer(kind.type) else 0
        return str(least), str(least + (1 << kind.type.bit_width) - 1)
    if pa.types.is_temporal(kind.type):
        return "-2^63 units", "2^63 - 1 units"
    if pa.types.is_decimal(kind.type):
        return f"-10^{kind.type.precision} + 1 units", f"10^{kind.type.precision} - 1 units"
    return "any", "any"


if __name__ == "__main__":
    PAGE.write_text(page())
