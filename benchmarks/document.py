"""Writes BENCHMARKS.md, its pictures, and README's table, from one run: `make bench`.

`page.md` beside this module is the text around the tables. Nothing in BENCHMARKS.md is written by
hand; in README the lines between the two marks are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.report import Line, Scale
from benchmarks.workloads import table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "BENCHMARKS.md"
README = ROOT / "README.md"
PICTURES = Path(__file__).parent / "pictures"
TEMPLATE = Path(__file__).parent / "page.md"

MARKS = "<!-- from BENCHMARKS.md -->\n", "<!-- end -->\n"
"""README's table stands between these lines."""


class Headline(NamedTuple):
    """A row of README's table: a workload, in words that need no other page."""

    workload: str
    operation: str
    baseline: str
    reason: str


HEADLINES = (
    Headline(
        "changes-arrow", "read 10,000 changes as Arrow", "iterating over as many rows",
        "the change index is packed per commit",
    ),
    Headline(
        "backup", "incremental backup of 10,000 changes", "copying a checkpoint's new files",
        "the work follows the changes, but each part is sorted, compressed and checked",
    ),
    Headline(
        "bulk-load", "bulk load of all rows, sorted", "the same without timestamps and digests",
        "keys are ten bytes longer; a digest of each file takes a tenth of the time",
    ),
    Headline(
        "scan-arrow", "scan of all rows into Arrow", "a scan as Python objects",
        "sorted files are read as columns in compiled code, without RocksDB",
    ),
    Headline(
        "get", "read one key", "one call of RocksDB",
        "three calls into RocksDB: seek, key, value",
    ),
    Headline(
        "commit-100", "durable commit of 100 rows", "the same batch and fsync",
        "each change goes to the log twice: as a version and in the change index",
    ),
    Headline(
        "transact-8", "transactions by 8 threads, not synced", "a get and a put by 8 threads",
        "checks run in Python under one lock",
    ),
    Headline(
        "backup-full", "full backup", "copying a checkpoint's files",
        "every row is sorted, encoded as Parquet and checked",
    ),
)  # fmt: skip
"""The worst ratio of BENCHMARKS.md must be among them: a test says so."""


def write(file: Path) -> None:
    """Write the documents from the run that wrote `file`."""
    from benchmarks import picture  # matplotlib is not needed for anything else

    facts, lines = report.read(file)
    scales = report.scales(lines)
    drawn = picture.draw(scales, PICTURES)
    PAGE.write_text(page(facts, lines, {each.title: each.file for each in drawn}))
    README.write_text(with_headlines(README.read_text(), headlines(report.widest(scales))))


def page(facts: Line, lines: Sequence[Line], pictures: Mapping[str, str]) -> str:
    """BENCHMARKS.md as a whole. `pictures` are files of the directory of pictures, by title."""
    place = PICTURES.relative_to(ROOT)
    parts = {
        "pictures": "\n\n".join(f"![{title}]({place / file})" for title, file in pictures.items()),
        "machine": "\n".join(_machine(facts)),
        "tables": report.tables(lines),
        "workloads": _described(),
        "minutes": f"{facts['seconds'] / 60:.0f}",
    }
    return re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], TEMPLATE.read_text())


def headlines(scale: Scale) -> str:
    """README's table, best ratio first."""
    measured = {workload.name: scale.ours(workload) for workload in scale.workloads}
    rows = [row for row in HEADLINES if measured.get(row.workload, {}).get("median") is not None]
    rows.sort(key=lambda row: measured[row.workload]["median"], reverse=True)
    out = ["| operation | against | ratio | reason |", "|---|---|--:|---|"]
    for row in rows:
        ratio = report.figure(measured[row.workload])
        out.append(
            f"| {row.operation} (`{row.workload}`) | {row.baseline} | {ratio} | {row.reason} |"
        )
    return "\n".join(out) + "\n"


def with_headlines(readme: str, table: str) -> str:
    """`readme` with `table` between its marks."""
    head, rest = readme.split(MARKS[0])
    _, tail = rest.split(MARKS[1])
    return f"{head}{MARKS[0]}\n{table}\n{MARKS[1]}{tail}"


def _machine(facts: dict[str, Any]) -> Iterator[str]:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    memory = facts["memory_bytes"] / 2**30
    yield "| | |"
    yield "|---|---|"
    yield f"| commit | {facts['commit']}, measured on {facts['date']} |"
    yield f"| processor | {facts['processor']}, {facts['cores']} cores |"
    yield f"| memory | {memory:.0f} GiB |"
    yield f"| disk | an fsync of one page takes {facts['fsync_ms']} ms |"
    yield f"| load before the run | {facts['load']} |"
    yield f"| Python | {facts['python']} |"
    yield f"| RocksDB | {facts['rocksdb']} |"
    yield f"| packages | {packages} |"


def _described() -> str:
    """The lines that name the workloads, from the top of `workloads/table.py`."""
    text = table.__doc__ or ""
    return text[text.index("Writing, ") :].rstrip()
