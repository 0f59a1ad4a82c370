"""Pages of the notebooks: cells and what they print, as Markdown that the pages include.

A notebook is JSON, and its cells are Markdown already, so that no other extension is needed. The
build writes `notebooks/_quickstart.md` from `examples/notebooks/quickstart.ipynb`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from examples.notebooks import NOTEBOOKS, read, text

TARGET: Final = Path(__file__).parent / "notebooks"


def page(notebook: dict[str, Any], name: str) -> str:
    return "\n\n".join(_blocks(notebook, name)) + "\n"


def _blocks(notebook: dict[str, Any], name: str) -> Iterator[str]:
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "markdown":
            yield text(cell)
            if number == 0:
                yield f"{{download}}`{name} <../../examples/notebooks/{name}>` is this page to run."
            continue
        yield f"```python\n{text(cell)}\n```"
        for output in cell["outputs"]:
            yield f"```text\n{text(output).rstrip()}\n```"


def _write(_app: Any) -> None:
    for path in NOTEBOOKS:
        shown = page(read(path), path.name)
        target = TARGET / f"_{path.stem}.md"
        if not target.exists() or target.read_text(encoding="utf-8") != shown:
            target.write_text(shown, encoding="utf-8")


def setup(app: Any) -> dict[str, Any]:
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
