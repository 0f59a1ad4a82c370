"""Changes as rows: what the model gives, and what a state becomes by them."""

from __future__ import annotations

from collections.abc import Iterable

Row = tuple[int, str, bytes, bytes | None, bytes | None]  # timestamp, op, key, end key, value


def order(row: Row) -> tuple[int, bool, bytes]:
    return row[0], row[1] != "delete_range", row[2]


def apply(state: dict[bytes, bytes], rows: Iterable[Row]) -> dict[bytes, bytes]:
    """A state after some changes, made in time order."""
    after = dict(state)
    for _, op, key, end, value in sorted(rows, key=order):
        if op == "delete_range":
            after = {k: v for k, v in after.items() if not key <= k < end}
        elif op == "delete":
            after.pop(key, None)
        else:
            after[key] = value
    return after
