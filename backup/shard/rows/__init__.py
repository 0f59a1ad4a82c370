"""Rows of a shard: the rules that merge them, and the Parquet files that hold them.

Floors, from the top:

    batch_reader found ranges         batches, read back merged; the versions of labels
    batch_writer part_reader          a stream of sorted rows as parts; a part in pieces
    part_bytes part_writer
    trailer
    filters merge pages part_format
    beside rules tally thrift
    covers                            the newest range tombstones over sorted rows
"""
