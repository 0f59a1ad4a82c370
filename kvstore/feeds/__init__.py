"""Who is told of changes: reads of history, feeds with durable positions, JSON lines, replicas."""

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
