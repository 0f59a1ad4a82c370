"""Who is told of changes: reads of history, feeds with durable positions, JSON lines, replicas."""

from kvstore.feeds.feed import (
    FEED_NAME,
    STARTS,
    Feed,
    FeedBatch,
    Feeds,
    Position,
    QuiescentPoint,
    QuiescentReader,
    Share,
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
    "FEED_NAME",
]
