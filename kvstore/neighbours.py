"""Tells our packages `bulk` and `backup` from strangers of the same name.

`bulk`, `backup` and `kvstore` are names of other distributions as well. An installer overwrites
our `bulk/__init__.py` with theirs without a word, and a script `backup.py` in the working directory
comes before our package. Ours carry the mark `__kvstore__`.

Invariants
1. Each of our packages that imports `bulk` or `backup` first imports `kvstore.bulk` or
   `kvstore.backup`, which call `require_own`: a stranger raises here, never as a missing attribute.
"""

from __future__ import annotations

from importlib import import_module

from kvstore.errors import ForeignPackageError


def require_own(name: str) -> None:
    """Raise `ForeignPackageError` if the package that `import name` finds is not ours."""
    package = import_module(name)
    if not hasattr(package, "__kvstore__"):
        raise ForeignPackageError(name, str(getattr(package, "__file__", None) or "a built-in"))
