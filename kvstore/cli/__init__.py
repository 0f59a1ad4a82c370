"""The command line: `kvstore get | put | scan | ...`, and the commands of other packages."""

from kvstore.cli.start import main

__all__ = ["main"]
