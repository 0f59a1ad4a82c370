"""Opening the origin that a place names."""

from __future__ import annotations

from collections.abc import Sequence

from spark_connector.executors import require_seen
from spark_connector.origins.origin import Origin
from spark_connector.origins.place import Place


def open_origin(place: Place, *, covering: Sequence[int] = ()) -> Origin:
    """Open the origin at a place. Of a collection, take the chain that covers the times, if any.

    Raises `UsageError` if this machine does not see its directory.
    """
    if "://" not in place.path:
        require_seen([place.path])
    # A task opens one of the kinds, and need not pay for importing the others.
    if place.is_server:
        from spark_connector.origins.server import ServerOrigin

        return ServerOrigin(place)
    if place.is_collection:
        from spark_connector.origins.collection import CollectionOrigin

        return CollectionOrigin(place, covering)
    from spark_connector.origins.checkpoint import CheckpointOrigin

    return CheckpointOrigin(place)
