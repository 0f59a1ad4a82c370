"""The verbs of a server: methods of `Store`, by the names that they have there.

Floors, from the top:

    capture feeds grouping parallel reads tables upkeep writes
    pieces progress
    verb
"""

from kvstore.server.verbs.capture import CAPTURE
from kvstore.server.verbs.feeds import FEEDS
from kvstore.server.verbs.grouping import changeset_verbs
from kvstore.server.verbs.parallel import PARALLEL
from kvstore.server.verbs.progress import told
from kvstore.server.verbs.reads import READS
from kvstore.server.verbs.tables import TABLES
from kvstore.server.verbs.upkeep import UPKEEP
from kvstore.server.verbs.verb import Answer, Verb, described
from kvstore.server.verbs.writes import WRITES

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
