"""Rows out of an origin into Spark: batch reads, streams, and scans of Parquet files.

Floors, from the top:

    query stream          batch reads, and streams
    where history         reads with filters; what happened to a store
    native partitions  two ways to read: Spark's own scan, or tasks of ours
    images indexed
    row_filters
    pushdown
    typed              the rows of a table
    schema
"""
