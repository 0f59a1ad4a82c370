"""The table of the service: `python tables.py` makes it, or alters it to what stands here.

Run it once, and again after each change of the columns. It works beside the owner.
"""

from __future__ import annotations

import os

import pyarrow as pa

import kvstore

STORE = os.environ.get("FLIGHTS_STORE", "flights.db")

SCHEMA = pa.schema(
    [
        ("carrier", pa.string()),
        ("flight", pa.int32()),
        ("status", pa.string()),
        ("gate", pa.string()),
        ("delay_s", pa.int32()),
    ]
)
KEY = ["carrier", "flight"]
INDEXES = {"by_status": "status"}


def main() -> None:
    """Make the table in a store that is served or free."""
    with kvstore.connect(STORE, patience=15) as client:
        table = client.table("flights", SCHEMA, key=KEY, indexes=INDEXES)
        print(f"flights: {table.count()} rows")


if __name__ == "__main__":
    main()
