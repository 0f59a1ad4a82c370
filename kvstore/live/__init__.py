"""Live readers: a store that another process writes, read as it moves.

Floors, from the top:

    reader      `kvstore.follow` and the reader that it returns
    pursuit     when and how the state moves; failures
    records     frontiers and records in memory, brought up to the state of the engine
"""

from kvstore.live.reader import LiveReader, follow

__all__ = ["LiveReader", "follow"]
