"""Who may write, in which order, and when a write shows.

A commit takes its timestamp under one lock (`committer`); readers see it when `upper` has passed it
(`frontiers`), and feeds when it is durable (`durability`). Imports, holds, clears and expiries are
records beside the timeline. Who gives old data up is decided in `kvstore.retention`; who is told of
changes, in `kvstore.feeds`.
"""
