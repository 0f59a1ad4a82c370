"""Who gives old data up: garbage collection, and the clearing of spans.

Holds and pins, which keep history, lie in `kvstore.timeline`.
"""
