"""The change index: what each commit did, in time order."""

from kvstore.changes.change import Change
from kvstore.changes.index import ChangeIndex
from kvstore.changes.read import ChangeReader, Order, Revisions

__all__ = ["Change", "ChangeIndex", "ChangeReader", "Order", "Revisions"]
