"""Links from our signatures into the documents of Python, Arrow and Spark, without a network.

Intersphinx would fetch the whole inventory of each project at each build. This module writes small
inventories of the names that our signatures have, from the rules by which these projects name their
pages. A build therefore gives the same links everywhere. A name that is missing here stays plain
text: add it. A signature says `pa.Table` or `timedelta` where the module imports the name for type
checkers alone, so each name is listed under these, too.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

PYTHON: Final = {
    "collections.abc": (
        "AsyncIterator", "Callable", "Collection", "Iterable", "Iterator", "Mapping",
        "MutableMapping", "Sequence",
    ),
    "datetime": ("date", "datetime", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "logging": ("Logger",),
    "os": ("PathLike",),
    "pathlib": ("Path",),
    "ssl": ("SSLContext",),
    "uuid": ("UUID",),
}  # fmt: skip
ARROW: Final = (
    "Array", "DataType", "Field", "RecordBatch", "RecordBatchReader", "Schema", "Table",
)  # fmt: skip
SPARK: Final = {"Column": "column", "DataFrame": "dataframe", "SparkSession": "session"}
"""The classes of `pyspark.sql`, by the module that has each."""

ADDRESSES: Final = {
    "python": "https://docs.python.org/3",
    "pyarrow": "https://arrow.apache.org/docs",
    "pyspark": "https://spark.apache.org/docs/latest/api/python",
}


def names() -> dict[str, dict[str, str]]:
    """The page and anchor of each name, by project. Pages are relative to the address."""
    found: dict[str, dict[str, str]] = {project: {} for project in ADDRESSES}
    for module, classes in PYTHON.items():
        for name in classes:
            page = f"library/{module}.html#{module}.{name}"
            found["python"][f"{module}.{name}"] = page
            found["python"][name] = page
    for name in ARROW:
        page = f"python/generated/pyarrow.{name}.html#pyarrow.{name}"
        for package in ("pyarrow", "pyarrow.lib", "pa"):
            found["pyarrow"][f"{package}.{name}"] = page
    for name, module in SPARK.items():
        page = f"reference/pyspark.sql/api/pyspark.sql.{name}.html#pyspark.sql.{name}"
        found["pyspark"][f"pyspark.sql.{name}"] = page
        found["pyspark"][f"pyspark.sql.{module}.{name}"] = page
    found["pyspark"]["DataFrame"] = found["pyspark"]["pyspark.sql.DataFrame"]
    return found


def write(directory: Path) -> dict[str, tuple[str, str]]:
    """Write the inventories, and return the setting `intersphinx_mapping` for them."""
    directory.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for project, entries in names().items():
        file = directory / f"{project}.inv"
        file.write_bytes(b"".join(_inventory(project, entries)))
        mapping[project] = (ADDRESSES[project], str(file))
    return mapping


def _inventory(project: str, entries: Mapping[str, str]) -> Iterator[bytes]:
    """The second format of Sphinx: four lines of text, then lines that are compressed."""
    yield b"# Sphinx inventory version 2\n"
    yield f"# Project: {project}\n# Version: \n".encode()
    yield b"# The remainder of this file is compressed using zlib.\n"
    lines = (f"{name} py:class 1 {page} -\n" for name, page in sorted(entries.items()))
    yield zlib.compress("".join(lines).encode())
