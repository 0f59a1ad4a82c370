"""Imports that a server fetches and adds at the word of a client: the verb of the server.

    kvstore serve flights.db --imports-from s3://bucket/staging        the server
    bulk.ingest(kvstore.connect("https://..."), "s3://bucket/staging/run-42")

The rows travel from the staging place to the server, and not through the client.

Invariants
1. A server reads below the places that its operator named, and nowhere else. It reaches them with
   its own credentials, so a client sends none.
2. A client that goes away stops the import at its next step, and a later call continues it. Adding
   the same import again returns the first timestamp.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

from kvstore.bulk.bucket import BucketUrl
from kvstore.bulk.ingest import CONFLICTS, INGEST, PLACES, ingest
from kvstore.bulk.progress import StageTimes
from kvstore.bulk.staging import staging_place
from kvstore.errors import AccessDeniedError, UsageError
from kvstore.remote import results
from kvstore.remote.parameters import FLAG, TEXT, count, word
from kvstore.remote.server.invocation import Answer, Invocation, ServedVerb
from kvstore.remote.server.verbs.upkeep import progress_rows
from kvstore.remote.verbs import ADMIN, Verb
from kvstore.storage.address import parse_address, public_address


def import_verbs(
    places: Sequence[str], *, options: Mapping[str, Any] | None = None
) -> Sequence[ServedVerb]:
    """The verbs of a server that takes imports from below `places`: URLs, or directories of its
    machine. `options` go to the object store. Pass the verbs to
    `kvstore.server.app(verbs=)`.

    Raises `UsageError` for a place that is neither.
    """
    allowed = [AllowedPlaces(place, options or {}) for place in places]
    parameters = {
        "staging": TEXT.required,
        "on_conflict": word(CONFLICTS),
        "move": FLAG,
        "thorough": FLAG,
        "max_bytes": count(),
        "origin": TEXT,
    }
    add = Verb(INGEST, ADMIN, parameters, results.ANY_OBJECT, is_work=True)
    tell = Verb(
        PLACES, ADMIN, {"staging": TEXT}, results.fields(places=results.items(results.TEXT))
    )
    return [
        ServedVerb(add, update_wrapper(partial(_ingest, allowed), _ingest)),
        ServedVerb(tell, update_wrapper(partial(_places, allowed), _places)),
    ]


class AllowedPlaces:
    """A place below which a server reads imports."""

    def __init__(self, place: str, options: Mapping[str, Any]) -> None:
        found = staging_place(place, options if _is_bucket(place) else None)
        self.name = public_address(place) if isinstance(found, BucketUrl) else str(found.absolute())
        self._place = found if isinstance(found, BucketUrl) else Path(os.path.realpath(found))

    def staging(self, given: str) -> Path | BucketUrl | None:
        """The staging place that `given` names; None if it does not lie below this place."""
        try:
            asked = parse_address(given)
        except UsageError:
            return None
        if isinstance(self._place, Path):
            if not asked.is_file:
                return None
            path = Path(os.path.realpath(asked.path))
            return path if path.is_relative_to(self._place) else None
        root = parse_address(self._place.url)
        below = asked.path.removeprefix(f"{root.path}/" if root.path else "")
        return self._place.below(below) if below and root.below(below) == asked else None


def _is_bucket(place: str) -> bool:
    return not parse_address(place).is_file


def _ingest(allowed: Sequence[AllowedPlaces], call: Invocation) -> Answer:
    """Fetch the sealed import at `staging`, a URL or a directory below the places that the server
    was started with, and add it. Answers with rows of progress, then the timestamp at which its
    rows became visible, and the seconds of each stage."""
    place, on_conflict = _allowed(allowed, call["staging"]), call.word("on_conflict", "overwrite")
    origin = call.text("origin") or ""
    move, thorough = call.flag("move"), call.flag("thorough")
    max_bytes, times, steps = call.count("max_bytes"), StageTimes(), 0

    def work(tell: Callable[[int], None]) -> Mapping[str, Any]:
        def step(_: str) -> None:
            nonlocal steps
            steps += 1
            tell(steps)

        stamp = ingest(
            call.store,
            place,
            on_conflict,
            move,
            thorough=thorough,
            max_bytes=max_bytes,
            times=times,
            progress=step,
            origin=origin,
        )
        return {"timestamp": int(stamp), "seconds": dict(times.seconds)}

    return progress_rows(work)


def _places(allowed: Sequence[AllowedPlaces], call: Invocation) -> Answer:
    """The places from which the server takes imports, so that a job can ask before it builds. With
    `staging` the call is refused unless this place lies below one, and the server reaches it."""
    given = call.text("staging")
    if given is not None:
        place = _allowed(allowed, given)
        if isinstance(place, BucketUrl):
            place.open().is_sealed()
        elif not place.is_dir():
            raise UsageError(
                f"the server does not see the directory {place}",
                "stage in a directory that this process and the server see, or in a bucket",
            )
    return {"places": [each.name for each in allowed]}


def _allowed(allowed: Sequence[AllowedPlaces], given: str) -> Path | BucketUrl:
    """The staging place `given`. Raises `AccessDeniedError` unless it lies below an allowed one."""
    for each in allowed:
        if (found := each.staging(given)) is not None:
            return found
    named = ", ".join(each.name for each in allowed) or "nowhere"
    raise AccessDeniedError(
        f"staging={given!r}",
        f"the server takes imports from {named}, and not from there",
        "stage below a place of `kvstore serve --imports-from`",
    )
