"""Spark as a way in and out: sessions, bulk loads."""

from spark_connector.load import bulk_import, stage_import
from spark_connector.session import session

__all__ = ["bulk_import", "session", "stage_import"]
