"""Consumers of the change index: feeds with durable positions, quiescent points, JSON lines.

Floors, from the top:

    envelopes group
    lines
    feed quiescent
    state
"""

from kvstore.feeds.envelopes import debezium_lines
from kvstore.feeds.feed import Feed, FeedBatch, Position, Share
from kvstore.feeds.group import STARTS, Feeds, require_name
from kvstore.feeds.lines import changes_json_lines
from kvstore.feeds.quiescent import QuiescentPoint, QuiescentReader

__all__ = [
    "STARTS",
    "Feed",
    "FeedBatch",
    "Feeds",
    "Position",
    "QuiescentPoint",
    "QuiescentReader",
    "Share",
    "changes_json_lines",
    "debezium_lines",
    "require_name",
]
