"""What the `journal` commands do, as plain functions: paths in, result values out.

`compact` must know what a journal's records mean: the journal names its content, and the caller
brings a fold for each content it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvstore.errors import NotAStoreError
from kvstore.journal.compaction import CompactResult, compact
from kvstore.journal.inspection import Inspection, content_of, inspect
from kvstore.journal.recovery import Fold
from kvstore.journal.salvage import Keep, SalvageReport, salvage


def journal_inspect(path: str) -> Inspection:
    """Report on every file of the journal in `path`. Changes nothing."""
    return inspect(path)


def journal_compact(path: str, *, folds: Mapping[str, Callable[[], Fold]]) -> CompactResult:
    """Compact the journal in `path`, also while its writer runs, by the fold for its content.

    Raises `NotAStoreError` if no fold is known for it.
    """
    content = content_of(path)
    if content is None or content not in folds:
        known = ", ".join(sorted(folds)) or "nothing"
        raise NotAStoreError(
            path, f"its journal holds {content!r}", f"contents that can be compacted: {known}"
        )
    return compact(path, folds[content](), content=content)


def journal_salvage(
    source: str, destination: str, *, keep: Keep = "prefix", content: str | None = None
) -> SalvageReport:
    """Copy what can be read of a damaged journal into a new directory."""
    return salvage(source, destination, keep=keep, content=content)
