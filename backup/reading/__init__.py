"""Reads straight from the parts of a collection. Nothing is restored.

Floors, from the top:

    reader                  the reads of a store, on a collection
    sides                   the side of a join that a reader answers
    held labels             the chains that a long reader holds; the side of a collection
    cache rows spans        the bytes that a reader keeps; rows of a snapshot, as a store gives
                            them; the first live rows of spans
"""

from backup.reading.cache import keeping
from backup.reading.labels import CollectionSide
from backup.reading.reader import CollectionReader
from backup.reading.rows import state_of

__all__ = ["CollectionReader", "CollectionSide", "keeping", "state_of"]
