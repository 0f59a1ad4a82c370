"""Rows of a shard: the rules that merge them, and the Parquet files that hold them."""
