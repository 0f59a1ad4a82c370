"""Parts: sorted Parquet files that anything can read, and this project can read piece by piece.

File:

    columns    as the schema of versions says, in the order of its rows (recorded as sorting
               columns); also `until` (see below), from format 2 on
    row group  about `PART_BLOCK_BYTES` as it is stored, which a reader of one key fetches; with
               min/max statistics of key, time and op
    pages      zstd at any level, each with a checksum; in a small part only pages of keys and
               values are compressed
    filters    Bloom filters of the keys of each row group (`filters`), in parts that another batch
               lies below, and that a reader of one key does not fetch whole
    trailer    digests of the row groups and of the tail (`trailer`), from format 3 on
    metadata   kvstore.part = "3" (format version), kvstore.rule = "versions"

Invariants
1. A part is written once, under a name that is never used again, so retrying its upload is safe.
2. Bounds (`key_min`, `key_max`, times) hold for every row; they may be wider, never narrower.
   A reader skips parts and row groups by them, so too narrow a bound would be a wrong answer.
3. Every read is checked: a small part by its checksum, a large part page by page or block by block.

The column `until` says when a version stops being the newest of its key:

    until int64    of a put or delete: the timestamp of the next newer put or delete of its key in
                   the same part; null where there is none, and at range tombstones

The rows of a part that are alive at t are then a filter, which any program can apply to rows in any
order: `op = 1 and timestamp <= t and (until is null or until > t)`, and no newer range tombstone
covers the key. Where a key's versions lie in two parts, the older versions do not know the newer:
look at the parts' bounds before relying on the filter.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from kvstore.backup.shard.rows.rules import ORDER, VERSIONS_SCHEMA
from kvstore.backup.shard.state.state import RULE

PART_FORMAT = b"3"
FORMATS_READ = (b"1", b"2", PART_FORMAT)
FORMAT_KEY = b"kvstore.part"
RULE_KEY = b"kvstore.rule"

UNTIL: Final = pa.field("until", pa.int64())


@cache
def layout() -> tuple[pa.Schema, list[str], list[pq.SortingColumn]]:
    """The schema of a part, its columns of numbers, and how rows are sorted."""
    metadata = {FORMAT_KEY: PART_FORMAT, RULE_KEY: RULE.encode()}
    schema = VERSIONS_SCHEMA.append(UNTIL).with_metadata(metadata)
    numbers = [f.name for f in schema if not pa.types.is_binary(f.type)]
    order = [
        pq.SortingColumn(schema.get_field_index(name), descending=way == "descending")
        for name, way in ORDER
    ]
    return schema, numbers, order
