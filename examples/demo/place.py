"""The directory of a demo."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from kvstore.errors import UsageError, storage_errors

MARKER: Final = ".kvstore-demo"


def prepare(out: Path) -> None:
    """Empty a demo's own directory, and refuse any other one."""
    with storage_errors(str(out)):
        if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
            raise UsageError(f"{out} holds other files", "pass --out with a directory of its own")
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        (out / MARKER).touch()
