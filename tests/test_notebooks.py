"""The notebooks of `examples/notebooks` run, and print what they show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.notebooks import NOTEBOOKS, read, run, text, write_outputs


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(path: Path) -> None:
    notebook = read(path)
    for count, (cell, printed) in enumerate(run(notebook, path.name), 1):
        shown = "".join(text(output) for output in cell["outputs"])
        assert printed == shown, f"run python -m examples.notebooks, and look at cell {cell['id']}"
        assert cell["execution_count"] == count
    assert count >= 5
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names)


def test_outputs_are_written_and_a_cell_that_fails_leaves_them(tmp_path: Path) -> None:
    path = tmp_path / "small.ipynb"
    cells = [
        {"id": "a", "cell_type": "markdown", "metadata": {}, "source": "# Small"},
        {"id": "b", "cell_type": "code", "metadata": {}, "source": ["x = 1\n", "print(x)\n"]},
    ]
    path.write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    )
    before = Path.cwd()
    write_outputs(path)
    written = read(path)
    assert [text(output) for output in written["cells"][1]["outputs"]] == ["1\n"]
    written["cells"][1]["source"] = "open('in-its-own-directory', 'x').close()\n1 / 0"
    path.write_text(json.dumps(written))
    with pytest.raises(ZeroDivisionError):
        write_outputs(path)
    assert json.loads(path.read_text()) == written
    assert Path.cwd() == before
    assert not Path("in-its-own-directory").exists()
