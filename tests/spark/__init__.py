"""Spark as a way in and out: loads, reads, changes, streams."""
