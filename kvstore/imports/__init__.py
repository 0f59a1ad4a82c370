"""Imports: bulk loads that get their timestamp when they are added, at a cost that does not depend
on their size.

The rows of an import carry its id where other versions carry a timestamp. Nobody sees them until
one record says when the import was added; that record is the commit. GC lets a small import settle:
its rows become plain versions, and the record goes.

Floors, from the top:

    imports           adding, reverting, aborting; the stamps that readers use
    key_lists past    the keys of small imports; imports whose records are gone
    stored            the rows of an import that is not yet added
    record            the record of one import
"""

from kvstore.imports.imports import INGEST_DIRECTORY, Imports
from kvstore.imports.key_lists import FoundKeys
from kvstore.imports.record import ImportRecord, import_fields, read_import
from kvstore.imports.stored import Amend, RowChanges

__all__ = [
    "FoundKeys",
    "INGEST_DIRECTORY",
    "Amend",
    "ImportRecord",
    "Imports",
    "RowChanges",
    "import_fields",
    "read_import",
]
