"""Spark jobs over a store: a session, bulk loads, reads and streams."""

from spark_connector.session import session

__all__ = ["session"]
