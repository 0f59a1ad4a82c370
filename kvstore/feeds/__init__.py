"""Consumers of the change index: feeds with durable positions, quiescent points, JSON lines.

Floors, from the top:

    group lines
    feed quiescent
"""

from kvstore.feeds.feed import Feed, FeedBatch, Position, Share
from kvstore.feeds.group import Feeds
from kvstore.feeds.lines import changes_json_lines
from kvstore.feeds.quiescent import QuiescentPoint, QuiescentReader

__all__ = [
    "Feed",
    "FeedBatch",
    "Feeds",
    "Position",
    "QuiescentPoint",
    "QuiescentReader",
    "Share",
    "changes_json_lines",
]
