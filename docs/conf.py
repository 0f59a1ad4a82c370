"""How the site is built: pages in MyST, the API from docstrings, the shell from its commands.

`make docs` builds strictly: a broken link, an unknown name or an unlisted page is an error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import inventories  # noqa: E402

import kvstore  # noqa: E402

project = "kvstore"
author = "the kvstore authors"
version = release = kvstore.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "twins",
    "figures",
    "notebook_pages",
]
intersphinx_mapping = inventories.write(HERE.parent / "build" / "inventories")
exclude_patterns = ["**/_*.md"]
myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_substitutions = {"version": release}
myst_heading_anchors = 3
default_role = "code"
nitpicky = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
toc_object_entries = False

html_theme = "furo"
html_title = f"kvstore {release}"


_ITEM = re.compile(r"(\d+\.|[*-]) ")


def _as_typed(
    _app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """Show a docstring as it is typed: an indented table of bytes, a list below its heading."""
    shown: list[str] = []
    in_table = in_list = False
    for line in lines:
        after_blank = not shown or not shown[-1].strip()
        if line.startswith("    ") and after_blank and not (in_table or in_list):
            shown += ["::", ""]
            in_table = True
        elif line.strip() and not line.startswith(" "):
            in_table = False
            if _ITEM.match(line) and not in_list and not after_blank:
                shown.append("")
            in_list = bool(_ITEM.match(line)) or (in_list and not after_blank)
        shown.append(line)
    lines[:] = shown


def _write_commands(_app: Any) -> None:
    """Write the reference of the shell from the commands themselves."""
    import typer
    from typer.cli import get_docs_for_click

    from kvstore.cli.main import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(
        obj=command, ctx=typer.Context(command, info_name="kvstore"), name="kvstore"
    )
    target = HERE / "reference" / "_commands.md"
    text = re.sub(r"\n{3,}", "\n\n", text)
    if not target.exists() or target.read_text() != text:  # else the page would be read again
        target.write_text(text)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _as_typed)
    app.connect("builder-inited", _write_commands)
