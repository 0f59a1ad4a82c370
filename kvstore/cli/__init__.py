"""The command line: `kvstore get | put | scan | ...`, and the commands of other packages.

Floors, from the top:

    __main__
    app                             all commands, and the report of failures
    doctor feeds journal serve tasks upkeep write
    changes imports holds read
    completion
    options
    exits output times
"""

from kvstore.cli.app import app, main

__all__ = ["app", "main"]
