"""Rows out of an origin into Spark: batch reads, streams, and scans of Parquet files."""
