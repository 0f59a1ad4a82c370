"""Notebooks that run without a Jupyter server: their cells, their outputs, and their pages.

    python -m examples.notebooks          run all, and write what they print into them

The notebooks print and assert, and show no last expression, so that each front end shows the same.
`docs/notebook_pages.py` makes a page of each.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
NOTEBOOKS: Final = sorted(HERE.glob("*.ipynb"))


def read(path: Path) -> dict[str, Any]:
    """The notebook at `path`, in the fourth format of nbformat."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5), path
    return notebook


def text(cell: dict[str, Any]) -> str:
    """The source of a cell, or of an output, which is a text or a list of lines."""
    source = cell["text"] if "output_type" in cell else cell["source"]
    return source if isinstance(source, str) else "".join(source)


def run(notebook: dict[str, Any], name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Run the code cells in order, in an empty directory. Yields each with what it prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="notebook-") as directory:
        os.chdir(directory)
        try:
            for number, cell in enumerate(notebook["cells"]):
                if cell["cell_type"] == "code":
                    code = compile(text(cell), f"{name} cell {number}", "exec")
                    with contextlib.redirect_stdout(io.StringIO()) as printed:
                        exec(code, names)
                    yield cell, printed.getvalue()
        finally:
            os.chdir(before)


def write_outputs(path: Path) -> None:
    """Run the notebook at `path`, and keep what its cells print."""
    notebook = read(path)
    for count, (cell, printed) in enumerate(run(notebook, path.name), 1):
        lines = printed.splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": lines}
        cell["outputs"] = [stream] if lines else []
        cell["execution_count"] = count
    written = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    path.write_text(written + "\n", encoding="utf-8")
