"""The choices of a call that adds an import, and the call that a client's server carries out.

The rows travel from the staging place to the server, and not through the client. `bulk.served` is
the verb of the server.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from bulk.amending import Amending
from bulk.bucket import BucketUrl
from bulk.stages import StageTimes
from kvstore.commit import After
from kvstore.errors import UsageError
from kvstore.timestamp import Timestamp

if TYPE_CHECKING:
    from kvstore.client import Client

NAME: Final = "ingest"
OnConflict: TypeAlias = Literal["overwrite", "error"]


class How(NamedTuple):
    """The choices of a call of `bulk.ingest`."""

    on_conflict: OnConflict
    move: bool
    thorough: bool
    check: Callable[[], None] | None
    tell: Callable[[str], None]
    times: StageTimes
    after: After | None = None
    amends: Amending | None = None
    origin: str = ""


def require_no_check(how: How) -> None:
    """Raise `UsageError` for a check, which the process that owns the store cannot run."""
    if how.check is not None:
        raise UsageError("check has no effect at a server", "look at the store before the call")


def ingest_there(
    client: Client,
    place: Path | BucketUrl,
    max_bytes: int | None,
    how: How,
) -> Timestamp:
    """Have the server of `client` add the import at `place`. Raises as `bulk.ingest`, and
    `UsageError` for a check, for options of an object store, and for anything but a client."""
    from kvstore.client import Client  # imported late: it brings TLS with it

    if not isinstance(client, Client):
        raise UsageError(
            f"an import goes into a Store or a Client, not {type(client).__name__}",
            "open or connect to the store; a coroutine calls asyncio.to_thread(bulk.ingest, ...)",
        )
    staging = str(place)
    if isinstance(place, BucketUrl):
        staging = place.url
        if place.options or place.patience_s is not None:
            raise UsageError(f"options for {staging} have no effect at a server", "pass none")
    require_no_check(how)
    if how.origin:
        raise UsageError("origin has no effect at a server", "pass none")
    done = client.work(
        NAME,
        lambda steps: how.tell(f"step {steps} of the server"),
        staging=staging,
        on_conflict=how.on_conflict,
        move=how.move,
        thorough=how.thorough,
        max_bytes=max_bytes,
    )
    for stage, seconds in done["seconds"].items():
        how.times.add(stage, seconds)
    return Timestamp(done["timestamp"])
