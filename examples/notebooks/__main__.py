"""Runs all notebooks, and writes what they print into them."""

from __future__ import annotations

from examples.notebooks import NOTEBOOKS, write_outputs

for notebook in NOTEBOOKS:
    write_outputs(notebook)
