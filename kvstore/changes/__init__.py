"""The change index: the changes of each commit, in time order.

Floors, from the top:

    columns          changes as Arrow batches
    expand           index rows as events; imports and ranges as keys
    capture windows  epochs as commits close them; the changes of a window
    audit index expiring  events against epochs; the index in the engine; due times
    epoch event generation
    entry            the bytes of one commit in one stream
    change changeset lz4 sequencer stream
"""

from kvstore.changes.events import Change
from kvstore.changes.index import ChangeIndex
from kvstore.changes.windows import ChangeReader, Order, Revisions

__all__ = ["Change", "ChangeIndex", "ChangeReader", "Order", "Revisions"]
