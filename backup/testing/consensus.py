"""The contract of consensus, as a suite that the tests of a consensus inherit.

    class TestMyConsensus(ConsensusContract):
        @pytest.fixture
        def consensus(self) -> Consensus:
            return MyConsensus()

pytest then runs every rule of a consensus in `kvstore.storage.contract` on `MyConsensus`.
"""

from __future__ import annotations

import threading

import pytest

from kvstore.errors import UsageError
from kvstore.storage.contract import SEQNO_MAX, Cas, Consensus, Versioned

KEY = "s-1"
"""The key whose versions `cas`, `fill` and `seqnos` write and read."""


def cas(consensus: Consensus, expected: int | None, seqno: int) -> Cas:
    """Write version `seqno` if the head is `expected`."""
    new = Versioned(seqno, str(seqno).encode())
    return consensus.compare_and_set(KEY, expected=expected, new=new)


def fill(consensus: Consensus, *wanted: int) -> None:
    """Write these versions of a new key."""
    previous: int | None = None
    for seqno in wanted:
        assert cas(consensus, previous, seqno) is Cas.COMMITTED
        previous = seqno


def seqnos(consensus: Consensus) -> list[int]:
    """The versions that a scan shows."""
    return [version.seqno for version in consensus.scan(KEY, start=0, limit=100)]


class ConsensusContract:
    """The rules of every consensus. A subclass gives an empty one by a fixture `consensus`."""

    def test_a_key_without_versions_is_empty(self, consensus: Consensus) -> None:
        assert consensus.head(KEY) is None
        assert consensus.scan(KEY, start=0, limit=10) == []
        assert consensus.list_keys() == []

    def test_the_first_version_needs_expected_none(self, consensus: Consensus) -> None:
        assert cas(consensus, 3, 5) is Cas.MISMATCH
        assert consensus.head(KEY) is None
        assert cas(consensus, None, 5) is Cas.COMMITTED
        assert consensus.head(KEY) == Versioned(5, b"5")
        assert cas(consensus, None, 6) is Cas.MISMATCH

    def test_expectations_too_low_and_too_high_both_mismatch(self, consensus: Consensus) -> None:
        fill(consensus, 1, 2, 3)
        assert cas(consensus, 2, 4) is Cas.MISMATCH
        assert cas(consensus, 4, 5) is Cas.MISMATCH
        assert cas(consensus, 3, 4) is Cas.COMMITTED

    def test_a_mismatch_with_the_bytes_of_the_head_is_still_one(self, consensus: Consensus) -> None:
        fill(consensus, 1)
        assert cas(consensus, None, 1) is Cas.MISMATCH

    def test_sequence_numbers_may_have_gaps_but_never_go_back(self, consensus: Consensus) -> None:
        fill(consensus, 5, 10)
        for seqno in (10, 9, 0):
            with pytest.raises(UsageError):
                cas(consensus, 10, seqno)
        assert seqnos(consensus) == [5, 10]

    def test_sequence_numbers_end_at_the_signed_64_bit_maximum(self, consensus: Consensus) -> None:
        with pytest.raises(UsageError):
            cas(consensus, None, SEQNO_MAX + 1)
        with pytest.raises(UsageError):
            cas(consensus, None, -1)
        assert cas(consensus, None, SEQNO_MAX) is Cas.COMMITTED
        assert consensus.head(KEY) == Versioned(SEQNO_MAX, str(SEQNO_MAX).encode())

    def test_scan_starts_at_or_above_and_keeps_its_limit(self, consensus: Consensus) -> None:
        fill(consensus, 1, 2, 4, 8)
        assert [v.seqno for v in consensus.scan(KEY, start=2, limit=2)] == [2, 4]
        assert [v.seqno for v in consensus.scan(KEY, start=3, limit=1)] == [4]
        assert [v.seqno for v in consensus.scan(KEY, start=3, limit=9)] == [4, 8]
        assert consensus.scan(KEY, start=9, limit=9) == []
        assert consensus.scan(KEY, start=1, limit=0) == []

    def test_truncate_removes_what_is_below_and_is_idempotent(self, consensus: Consensus) -> None:
        fill(consensus, 1, 2, 4, 8)
        assert consensus.truncate(KEY, 4) in (2, None)
        assert seqnos(consensus) == [4, 8]
        assert consensus.truncate(KEY, 4) in (0, None)
        assert consensus.truncate(KEY, 3) in (0, None)
        assert consensus.truncate(KEY, 8) in (1, None)
        assert seqnos(consensus) == [8]

    def test_truncating_above_the_head_or_no_data_is_refused(self, consensus: Consensus) -> None:
        with pytest.raises(UsageError):
            consensus.truncate(KEY, 1)
        fill(consensus, 1, 2)
        with pytest.raises(UsageError):
            consensus.truncate(KEY, 3)
        assert seqnos(consensus) == [1, 2]

    def test_the_log_goes_on_after_a_truncation(self, consensus: Consensus) -> None:
        fill(consensus, 1, 2, 3)
        consensus.truncate(KEY, 3)
        assert cas(consensus, 2, 4) is Cas.MISMATCH
        assert cas(consensus, 3, 4) is Cas.COMMITTED
        assert seqnos(consensus) == [3, 4]

    def test_keys_are_independent_and_listed(self, consensus: Consensus) -> None:
        fill(consensus, 1, 2)
        assert consensus.head("other") is None
        new = Versioned(7, b"")
        assert consensus.compare_and_set("other", expected=None, new=new) is Cas.COMMITTED
        consensus.truncate(KEY, 2)
        assert consensus.list_keys() == ["other", KEY]
        assert [v.seqno for v in consensus.scan("other", start=0, limit=9)] == [7]

    def test_empty_and_ten_kib_values_come_back_whole(self, consensus: Consensus) -> None:
        large = bytes(range(256)) * 40
        consensus.compare_and_set(KEY, expected=None, new=Versioned(1, b""))
        consensus.compare_and_set(KEY, expected=1, new=Versioned(2, large))
        assert consensus.scan(KEY, start=0, limit=9) == [Versioned(1, b""), Versioned(2, large)]

    def test_keys_that_a_storage_could_not_hold_are_refused(self, consensus: Consensus) -> None:
        for key in ("", "a/b", "..", "x" * 200):
            with pytest.raises(UsageError):
                consensus.compare_and_set(key, expected=None, new=Versioned(1, b""))

    def test_of_many_at_once_exactly_one_commits_each_version(self, consensus: Consensus) -> None:
        fill(consensus, 1)
        won: list[int] = []

        def race() -> None:
            for seqno in range(2, 8):
                new = Versioned(seqno, b"same")
                if consensus.compare_and_set(KEY, expected=seqno - 1, new=new) is Cas.COMMITTED:
                    won.append(seqno)

        threads = [threading.Thread(target=race) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won) == seqnos(consensus)[1:]
