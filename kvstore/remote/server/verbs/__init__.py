"""The work of the verbs of a server: most are the method of `Store` with their
name; `changes` is `Store.changes_batches`, `versions` is `Store.changes`, `floor` is `floor_many`.
"""

from kvstore.remote.server.invocation import SERVED
from kvstore.remote.server.verbs import capture, feeds, parallel, reads, tables, upkeep, writes

__all__ = ["SERVED", "capture", "feeds", "parallel", "reads", "tables", "upkeep", "writes"]
