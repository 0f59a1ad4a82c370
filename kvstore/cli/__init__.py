"""The command line: `kvstore get | put | scan | ...`, and the commands of other packages.

Floors, from the top:

    __main__
    start                           the console script
    app                             all commands, and the report of failures
    doctor feeds journal serve tasks upkeep write
    changes imports holds read
    completion
    options stores
    deferred exits help interrupts output summaries times wording
    early                           the first handler of Ctrl-C
"""

from kvstore.cli.start import main

__all__ = ["main"]
