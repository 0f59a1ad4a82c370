"""Imports: bulk loads that get their timestamp when they are added, at a cost that does not depend
on their size.

The rows of an import carry its id where other versions carry a timestamp. Nobody sees them until
one record says when the import was added; that record is the commit. GC lets a small import settle:
its rows become plain versions, and the record goes.

Floors, from the top:

    imports           adding, reverting, aborting; the stamps that readers use
    key_lists past    the keys of small imports; imports whose records are gone
    record            the record of one import
"""

from kvstore.imports.imports import INGEST_DIRECTORY, Imports
from kvstore.imports.record import ImportRecord, import_fields, read_import

__all__ = ["INGEST_DIRECTORY", "ImportRecord", "Imports", "import_fields", "read_import"]
