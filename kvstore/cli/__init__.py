"""The command line: `kvstore get | put | scan | ...`, and what other packages add to it.

Floors, from the top:

    __main__
    app                             all commands, and how failures are told
    journal read tasks upkeep write
    exits options output
"""

from kvstore.cli.app import app, main

__all__ = ["app", "main"]
