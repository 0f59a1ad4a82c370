"""Imports every compiled loop, so that an installation that lacks one says so at once."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from kvstore.errors import NotCompiledError

LOOPS: Final = (
    "blocks",
    "columns",
    "elements",
    "files",
    "live",
    "lookup",
    "matches",
    "nested",
    "packing",
    "records",
    "rows",
    "serials",
    "single",
    "writes",
)

try:
    for _name in LOOPS:
        import_module(f"kvstore.loops.{_name}")
except ImportError as error:
    import platform
    import sysconfig

    _here = f"{platform.python_implementation()} {platform.python_version()}"
    raise NotCompiledError(f"{_here} on {sysconfig.get_platform()}", str(error)) from None
