"""Checks that epochs fit each other, the time, and the change events that they count.

Memory: the changesets whose epoch is still open where the pass is.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from kvstore.changes.audit import Audit, find_anchor, gap_before
from kvstore.changes.changeset import DOMAIN_MAX
from kvstore.changes.epoch import PREFIX, Epoch, unpack_run
from kvstore.changes.index import ChangeIndex
from kvstore.commit import Committer
from kvstore.meta import Meta
from kvstore.verify.report import Findings


class EpochsAt(NamedTuple):
    """The epochs of one moment: written ones, in the runs below `run`, and pending ones."""

    run: int
    waiting: list[Epoch]
    domain: int


def epochs_at(committer: Committer) -> EpochsAt:
    """The epochs of this moment. The caller holds the commit lock."""
    run, waiting = committer.capture.pending()
    return EpochsAt(run, waiting, committer.capture.domain)


def check_epochs(
    findings: Findings,
    epochs: EpochsAt,
    meta: Meta,
    index: ChangeIndex,
    *,
    floor: int,
    upto: int,
) -> None:
    """Walk the epochs, and the headers of the change index above `floor`, up to `upto`."""
    with findings.reading():
        _check_order(findings, epochs, meta, upto=upto)
        anchor = find_anchor(_all(epochs, meta), floor=floor, upto=floor)
        if anchor is None:
            return
        audit = Audit(after=anchor.after)
        headers = index.headers(since=anchor.since, upto=upto)
        behind = _all(epochs, meta)
        if anchor.after is not None:
            next(epoch for epoch in behind if epoch == anchor.after)
        for epoch in audit.over(behind, headers):
            for where, problem in audit.judge(epoch):
                findings.add(where, problem)
        # A store without writers has epochs that are not written yet, or never will be.
        if epochs.domain < DOMAIN_MAX and (left := audit.left_over(epochs.domain)):
            findings.add("change index", f"{left} changesets are in no epoch")


def _check_order(findings: Findings, epochs: EpochsAt, meta: Meta, *, upto: int) -> None:
    """Runs are numbered without a gap, epochs join, and times do not fall."""
    numbers = [number for number, _ in meta.numbered(PREFIX) if number < epochs.run]
    expected = numbers[0] if numbers else 0
    for number in [*numbers, epochs.run]:
        if number != expected:
            findings.add(f"meta record {PREFIX}{expected:016x}", "the run of epochs is missing")
        expected = number + 1
    last: Epoch | None = None
    for epoch in _all(epochs, meta):
        name = f"epoch [{epoch.begin}, {epoch.end}) of domain {epoch.domain:016x}"
        if last is not None:
            gap = gap_before(epoch, domain=last.domain, edge=last.end)
            if gap is not None:
                findings.add(*gap)
            if epoch.closed_at < last.closed_at:
                findings.add(name, f"closed at {epoch.closed_at}, before the one before it")
        if epoch.begin >= epoch.end or epoch.closed_at > upto + 1:
            findings.add(name, f"ends or lies wrong, closed at {epoch.closed_at}")
        last = epoch


def _all(epochs: EpochsAt, meta: Meta) -> Iterator[Epoch]:
    written = (
        epoch
        for number, fields in meta.numbered(PREFIX)
        if number < epochs.run
        for epoch in unpack_run(fields)
    )
    return chain(written, epochs.waiting)
