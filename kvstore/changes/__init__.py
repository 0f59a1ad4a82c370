"""What changed between two times: the index that each commit writes, its streams and its epochs.

It lies below the commits that write it. Consumers of it are in `kvstore.feeds`.
"""

from kvstore.changes.events import Change
from kvstore.changes.index import ChangeIndex
from kvstore.changes.windows import ChangeReader, Order, Revisions

__all__ = ["Change", "ChangeIndex", "ChangeReader", "Order", "Revisions"]
