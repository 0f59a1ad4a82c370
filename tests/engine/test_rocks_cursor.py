"""A pass over RocksDB that another thread closes while it works: it raises, and never just ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.engine import DATA
from kvstore.engine.rocks import RocksEngine
from kvstore.errors import ClosedError
from kvstore.testing.engines import fill


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[RocksEngine]:
    with_rows = RocksEngine(tmp_path / "db", create=True)
    fill(with_rows, {b"%04d" % number: b"" for number in range(100)})
    yield with_rows
    with_rows.close()


class Closing:
    """A loop during which the pass is closed. `ahead` as in `kvstore.loops.live.Live`."""

    last = b"0050"

    def __init__(self, cursor: Any, ahead: tuple[bytes, bool] | None, *, has_more: bool) -> None:
        self._cursor = cursor
        self._has_more = has_more
        self.ahead = ahead

    def pass_over(self, source: object, count: int, bytes_max: int = 0) -> bool:
        self._cursor.close()
        return self._has_more


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("ahead", "has_more"), [((b"0070", False), True), (None, False)])
def test_a_pass_that_is_closed_while_it_works_raises(
    engine: RocksEngine, reverse: bool, ahead: tuple[bytes, bool] | None, has_more: bool
) -> None:
    cursor = engine.cursor(DATA, reverse=reverse)
    live: Any = Closing(cursor, ahead, has_more=has_more)
    with pytest.raises(ClosedError):
        _feed_twice(cursor, live)  # a descending pass has taken its entries before it is closed
    with pytest.raises(ClosedError):
        cursor.take(1)


def _feed_twice(cursor: Any, live: Any) -> None:
    cursor.feed(live, 10)
    cursor.feed(live, 10)
