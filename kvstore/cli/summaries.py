"""The first sentence of the help of each command, by which `kvstore --help` lists them.

The texts are kept here, because listing commands must not import them: that takes half a second.
A test compares the texts with the commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SUMMARIES: Final[Mapping[str, str]] = {
    "get": "Print the value of a key.",
    "scan": "Print keys and values in key order, a tab between them.",
    "history": "Print the kept versions of a key, newest first.",
    "stats": "Print frontiers, counts, sizes, and the claims that keep history.",
    "changes": "Print changes as JSON lines in time order.",
    "follow": "Print each change as a service commits it, as JSON lines, until interrupted.",
    "diff": "Print the keys whose values differ between two times, in key order.",
    "put": "Set a key and print the timestamp.",
    "delete": "Delete a key, which may be absent, and print the timestamp.",
    "delete-range": "Delete all keys of a span by one write, and print the timestamp.",
    "revert": "Undo an import from now on, or the changes of a span since a time.",
    "verify": "Read the whole store and list all damage.",
    "gc": "Give up old history and free its space.",
    "checkpoint": "Copy a store as of now, and print the newest time of the copy.",
    "holds": "List the holds that keep history in a store, or drop an abandoned one.",
    "imports": "List the imports of a store, or revert one.",
    "feeds": "List the feeds of a store, print changes that a feed has not acknowledged, or drop "
    "one.",
    "tasks": "List the tasks of a store with their progress.",
    "serve": "Serve a store until a signal ends the process (SIGINT or SIGTERM).",
    "ui": "Show a store as a page for a browser, until a signal ends the process (SIGINT "
    "or SIGTERM).",
    "doctor": "Look at the environment, and at a store: versions, disk, clock, holds, failures.",
    "journal": "Look at, compact or rescue a journal.",
    "help": "Print the help of a command, or of all commands.",
    "backup": "Back a store up, and restore it as of any instant.",
    "export": "Write keys and values to a file that `kvstore import` reads, or a table as "
    "typed Parquet.",
    "import": "Load many rows at once.",
    "push": "Push loads through a bucket to many stores.",
    "expire-stagings": "Remove the imports below a URL that were begun long ago, sealed or not.",
    "seed": "Make a new store of old events.",
    "table": "Look at tables, read and load their rows, and change their columns.",
}
