"""The command line: `kvstore get | put | scan | ...`, and the commands of other packages.

Floors, from the top:

    __main__
    app                             all commands, and the report of failures
    journal read serve tasks upkeep write
    exits options output
"""

from kvstore.cli.app import app, main

__all__ = ["app", "main"]
