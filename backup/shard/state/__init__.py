"""The state of a shard: its value with its commands, its bytes, and its log."""
