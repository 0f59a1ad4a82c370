"""The figures of `explanation/comparison.md` come from BENCHMARKS.md, and are typed nowhere else.

The build writes `explanation/_figures.md`, which the page includes. A row that BENCHMARKS.md no
longer has fails the build.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from sphinx.errors import ExtensionError

HERE: Final = Path(__file__).parent
BENCHMARKS: Final = HERE.parent / "BENCHMARKS.md"
TARGET: Final = HERE / "explanation" / "_figures.md"

PEERS: Final = ("kvstore", "lmdb", "sqlite3", "deltalake")
OPERATIONS: Final = {
    "get": "read one key",
    "get-as-of": "read one key at an earlier time",
    "scan": "read all rows, one by one",
    "scan-arrow": "read all rows as Arrow",
    "scan-arrow-as-of": "read all rows as Arrow, at an earlier time",
    "bulk-load": "load all rows, sorted",
    "commit-100": "durable commits of 100 rows",
    "commit-10k": "durable commits of 10,000 rows",
    "delete-range": "delete a tenth of all rows, and keep their history",
    "changes": "read 10,000 changes as Python objects",
    "changes-arrow": "read 10,000 changes as Arrow",
    "disk": "bytes on disk, with history and changes",
}
DUELS: Final = {
    "rows-load-sqlite": ("load typed rows with two indexes", "sqlite3"),
    "rows-get-sqlite": ("read a typed row by its key", "sqlite3"),
    "rows-find-sqlite": ("read 100 typed rows by an index", "sqlite3"),
    "rows-scan-duckdb": ("read all typed rows", "DuckDB"),
    "spark-import-delta": ("bulk load by Spark", "the same job by delta-rs"),
    "spark-read-delta": ("read a collection of backups by Spark", "Spark's scan of a Delta table"),
    "push-feast": ("push rows into a new store", "Feast's materialisation into its sqlite store"),
    "serve-get-redis": ("read one key over the loopback", "redis"),
}


def tables(text: str) -> str:
    """The two tables of the page, from the text of BENCHMARKS.md."""
    lines = ["| operation | " + " | ".join(PEERS) + " |", "|---|" + "--:|" * len(PEERS)]
    for workload, operation in OPERATIONS.items():
        row = find(text, workload, PEERS)
        cells = [row[peer].split(" ")[0].strip("*") or "-" for peer in PEERS]
        lines.append(f"| {operation} (`{workload}`) | {' | '.join(cells)} |")
    lines += ["", "| operation | against | kvstore |", "|---|---|--:|"]
    for workload, (operation, peer) in DUELS.items():
        ratio = find(text, workload, ["kvstore"])["kvstore"].replace("*", "")
        lines.append(f"| {operation} (`{workload}`) | {peer} | {ratio} |")
    return "\n".join(lines) + "\n"


def find(text: str, workload: str, columns: Sequence[str]) -> dict[str, str]:
    """The row of `workload` in the first table that has these columns, by column."""
    for header, row in _rows(text):
        names = [re.sub(r" \(\d\)$", "", name) for name in header]
        if row[0] == workload and set(columns) <= set(names):
            return dict(zip(names, row, strict=True))
    raise ExtensionError(f"BENCHMARKS.md has no row {workload} with {', '.join(columns)}")


def _rows(text: str) -> Iterator[tuple[list[str], list[str]]]:
    header: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if header:
            yield header, cells
        else:
            header = cells


def _write(_app: Any) -> None:
    text = tables(BENCHMARKS.read_text(encoding="utf-8"))
    if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text:
        TARGET.write_text(text, encoding="utf-8")


def setup(app: Any) -> dict[str, Any]:
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
