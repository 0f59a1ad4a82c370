"""The verbs of a server: methods of `Store`, by the names that they have there."""

from kvstore.remote.server.invocation import Answer, Verb, described
from kvstore.remote.server.verbs.capture import CAPTURE
from kvstore.remote.server.verbs.feeds import FEEDS
from kvstore.remote.server.verbs.parallel import PARALLEL
from kvstore.remote.server.verbs.reads import READS
from kvstore.remote.server.verbs.tables import TABLES
from kvstore.remote.server.verbs.upkeep import UPKEEP, told
from kvstore.remote.server.verbs.writes import WRITES, changeset_verbs

__all__ = [
    "CAPTURE",
    "FEEDS",
    "PARALLEL",
    "READS",
    "TABLES",
    "UPKEEP",
    "WRITES",
    "Answer",
    "Verb",
    "changeset_verbs",
    "described",
    "told",
]
