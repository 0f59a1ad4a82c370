"""Opening the origin that a place names."""

from __future__ import annotations

from collections.abc import Sequence

from spark_connector.origins.origin import Origin
from spark_connector.origins.place import Place


def open_origin(place: Place, *, covering: Sequence[int] = ()) -> Origin:
    """Open what `find` found; of a collection the chain that covers these times, if one does."""
    # Tasks open one of the two: neither pays for importing the other.
    if place.is_collection:
        from spark_connector.origins.collection import CollectionOrigin

        return CollectionOrigin(place, covering)
    from spark_connector.origins.checkpoint import CheckpointOrigin

    return CheckpointOrigin(place)
