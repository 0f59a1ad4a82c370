"""The contract of engines fails engines that break one of its rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.engine import CHANGES, DATA
from kvstore.engine.memory_engine import MemoryEngine
from kvstore.testing.engines import DurableEngineContract, EngineContract


class Tears(MemoryEngine):
    """Shows a reader of `changes` a commit that `data` does not show yet."""

    def get(self, family: str, key: bytes) -> bytes | None:
        if family == DATA:
            return b"0"
        return super().get(family, key)


class EndsEarly(MemoryEngine):
    """Cuts each pass off after its first chunk."""

    def cursor(self, *span: Any, **how: Any) -> Any:
        cursor = super().cursor(*span, **how)
        first = iter([cursor.take])
        cursor.take = lambda count: next(first, lambda _: ([], []))(count)
        return cursor


class Mixes(MemoryEngine):
    """Keeps all families in one map."""

    def get(self, family: str, key: bytes) -> bytes | None:
        return super().get(CHANGES, key)


class Forgets(MemoryEngine):
    """Keeps nothing on disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(None)


BROKEN: dict[str, tuple[Callable[[Path], MemoryEngine], str]] = {
    "a torn batch": (Tears, "test_a_batch_spans_families_and_is_seen_whole"),
    "a pass that ends early": (EndsEarly, "test_a_pass_of_many_chunks_is_whole_both_ways"),
    "families that mix": (Mixes, "test_families_do_not_mix"),
}


@pytest.mark.parametrize(("opens", "rule"), BROKEN.values(), ids=BROKEN)
def test_a_broken_engine_fails_the_rule_it_breaks(
    tmp_path: Path, opens: Callable[[Path], MemoryEngine], rule: str
) -> None:
    with pytest.raises(AssertionError, match="assert "):  # the message shows the compared values
        getattr(EngineContract(), rule)(opens(tmp_path))


def test_an_engine_that_forgets_at_close_is_not_durable(tmp_path: Path) -> None:
    class Contract(DurableEngineContract):
        def open(self, path: Path) -> MemoryEngine:
            return Forgets(path)

    with pytest.raises(AssertionError):
        Contract().test_reopening_finds_everything(tmp_path)
