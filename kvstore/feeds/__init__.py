"""Consumers of the change index: feeds with durable positions, quiescent points, JSON lines.

Floors, from the top:

    envelopes group
    lines
    feed quiescent
    state
"""

from kvstore.feeds.feed import (
    STARTS,
    Feed,
    FeedBatch,
    Feeds,
    Position,
    QuiescentPoint,
    QuiescentReader,
    Share,
    require_name,
)
from kvstore.feeds.lines import changes_json_lines, debezium_lines

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
