"""The state of a shard: its value, the machine that changes it, its bytes, and its log."""
