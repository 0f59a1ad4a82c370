"""The verbs of a server: methods of `Store`, by the names that they have there.

Floors, from the top:

    reads writes
    verb
"""

from kvstore.server.verbs.reads import READS
from kvstore.server.verbs.verb import Answer, Verb
from kvstore.server.verbs.writes import WRITES

__all__ = ["READS", "WRITES", "Answer", "Verb"]
