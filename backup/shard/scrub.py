"""Scrub: compare the names in a shard with the blobs of its storage.

*Missing* blobs are named by a live version and are not there: damage. *Altered* blobs have another
size, or fail their checksum where checksums are compared. *Orphans* are there and no live version
names them: parts of crashed or running uploads, and of merges that came too late. Orphans are
harmless, and only the caller knows how long an upload may run. So they are deleted only on request,
if they were made before a given time.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial

from kvstore.backup.shard.rows.part_reader import MissingPartError, require_part
from kvstore.backup.shard.state import codec
from kvstore.backup.shard.state.state_log import StateLog
from kvstore.backup.shard.state.trace import ShardPart
from kvstore.backup.shard.state.witness import is_witness
from kvstore.base.meters import Tally
from kvstore.errors import CorruptionError


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """The findings of a scrub; `deleted` orphans are listed among `orphans` too."""

    missing: tuple[str, ...]
    altered: tuple[str, ...]
    orphans: tuple[str, ...]
    deleted: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """True if everything named is there and whole."""
        return not self.missing and not self.altered


def scrub(
    log: StateLog,
    *,
    checksums: bool = False,
    delete_orphans_before_ns: int | None = None,
    pending: Set[str] = frozenset(),
    tally: Tally | None = None,
) -> ScrubReport:
    """Look at every blob of the shard; read them all if `checksums`.

    `pending` names parts of uploads that may still be resumed: they are no orphans. `tally` counts
    the rows of the parts that were read.

    The listing is taken first: a part that is uploaded and named while the scrub runs is no orphan.
    """
    listed = dict(log.retrying(lambda: list(log.blob.list(f"{log.shard}/"))))
    named = codec.blobs_named(*log.live_diffs())
    unlisted = named - listed.keys()
    gone = {name for name in unlisted if log.retrying(partial(log.blob.size, name)) is None}
    parts = [part for batch in log.state.batches for part in batch.parts]
    bad = {part.name for part in parts if listed.get(part.name, part.size) != part.size}
    if checksums:
        bad |= _altered(log, parts, gone, tally or Tally())
    # A part that compaction replaced and collected meanwhile, unheld by a lease, is no damage.
    needed = set(log.refresh().blobs())
    missing = tuple(sorted(gone & needed))
    altered = tuple(sorted(bad & needed))
    left = listed.keys() - named - pending
    orphans = tuple(sorted(name for name in left if not is_witness(name)))
    deleted = []
    if delete_orphans_before_ns is not None:
        deleted = [name for name in orphans if _made_ns(name) < delete_orphans_before_ns]
        for name in deleted:
            log.retrying(partial(log.blob.delete, name))
    return ScrubReport(missing, altered, orphans, tuple(deleted))


def _altered(log: StateLog, parts: Sequence[ShardPart], gone: set[str], tally: Tally) -> set[str]:
    """Names of parts whose bytes are not as written. Names of missing parts are added to `gone`."""
    bad = set()
    for part in parts:
        try:
            if part.name not in gone:
                require_part(log.blob, part)
        except MissingPartError:
            gone.add(part.name)
        except CorruptionError:
            bad.add(part.name)
        tally.add(part.rows)
    return bad


def _made_ns(name: str) -> int:
    """The time in a part's name. Rollups and foreign files get the end of time: they are kept."""
    stem = name.rpartition("/")[2].partition("-")[0]
    return int(stem) if "/part/" in name and stem.isdigit() else 1 << 63
