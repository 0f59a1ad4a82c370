"""Bulk loads: built as SST files anywhere, visible atomically at the time they are added."""

from bulk.ingest import ingest
from bulk.part import Part, PartWriter
from bulk.staged import Import
from bulk.staging import Manifest, read_manifest

__all__ = ["Import", "Manifest", "Part", "PartWriter", "ingest", "read_manifest"]
