"""Facts that a reader of the figures needs: commit, machine, versions. No host name, no path."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import rocksdict

_PACKAGES = (
    "rocksdict", "pyarrow", "numpy", "pyspark", "lmdb", "plyvel", "duckdb", "deltalake", "pylance",
    "pyiceberg", "arcticdb",
)  # fmt: skip
_FSYNCS = 50


def facts() -> dict[str, Any]:
    """Look at the machine, and measure how long its disk takes to fsync a page."""
    return {
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": round(os.getloadavg()[0], 2),
        "fsync_ms": _fsync_ms(),
        "python": platform.python_version(),
        "rocksdb": _rocksdb(),
        "packages": _packages(),
    }


def _commit() -> str:
    """The commit, marked where files that it does not have were measured."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def _fsync_ms() -> float:
    taken = []
    with tempfile.TemporaryFile() as file:
        for _ in range(_FSYNCS):
            file.write(bytes(4096))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - began)
    return round(1000 * statistics.median(taken), 2)


def _rocksdb() -> str:
    """The version that RocksDB writes into a database's options."""
    with tempfile.TemporaryDirectory() as directory:
        rocksdict.Rdict(f"{directory}/db", rocksdict.Options(raw_mode=True)).close()
        for file in Path(directory, "db").glob("OPTIONS-*"):
            for line in file.read_text().splitlines():
                name, _, version = line.strip().partition("=")
                if name == "rocksdb_version":
                    return version
    return "unknown"


def _packages() -> dict[str, str]:
    installed = {
        found.metadata["Name"].lower(): found.version for found in metadata.distributions()
    }
    return {name: installed[name] for name in _PACKAGES if name in installed}
