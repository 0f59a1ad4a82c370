"""The work of the verbs of a server: each is the method of `Store` with its name."""

from kvstore.remote.server.invocation import SERVED
from kvstore.remote.server.verbs import capture, feeds, parallel, reads, tables, upkeep, writes

__all__ = ["SERVED", "capture", "feeds", "parallel", "reads", "tables", "upkeep", "writes"]
