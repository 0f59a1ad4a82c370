"""Commands on a store that processes share."""

from __future__ import annotations

from pathlib import Path

import kvstore
from tests.cli.installed import Run, told


def test_the_shell_joins_the_guests_of_a_store_that_nobody_owns(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "store"
    kvstore.open(path).close()
    with kvstore.open(path, shared=True) as owner:
        owner.put(b"k", b"1")
        with kvstore.open(path, shared=True, role="guest") as guest:
            figures = told(run("stats", path, "--json"))
            assert figures["owner_pid"] > 0
            assert (figures["guests"], figures["takeovers"]) == (1, 0)
            owner.close()
            run("put", path, "k", "2")
            assert guest.refresh() > 0
            assert guest.get(b"k") == b"2"
            figures = told(run("stats", path, "--json"))
            assert (figures["guests"], figures["takeovers"]) == (1, 1)


def test_a_store_that_is_not_shared_has_no_such_figures(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "store"
    kvstore.open(path).close()
    assert "guests" not in told(run("stats", path, "--json"))
