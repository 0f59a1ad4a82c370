"""The command line: `kvstore get | put | scan | ...`, and what other packages add to it."""

from kvstore.cli.app import app, main

__all__ = ["app", "main"]
