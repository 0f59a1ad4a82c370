"""How much happens in the year, in the form of an hour and in smaller ones."""

from __future__ import annotations

from dataclasses import dataclass

WEEKS_IN_A_MONTH = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """Counts are of one day, unless they say otherwise."""

    weeks: int
    days: int
    """Days of service in a week."""
    users: int
    rows_per_user: int
    value_bytes: int
    imports: int
    import_rows: int
    import_users: int
    """Neighbours that own the rows of one import."""
    reverts: int
    deletes: int
    """Deletions of all rows of a user."""
    hot_puts: int
    commits: int
    transactions: int
    checkpoints: int
    reads: int
    """Rounds of look-ups and short scans."""
    parallel_scans: int
    """Parallel scans in a week."""
    keep_days: int = 2
    """The history that garbage collection keeps."""
    pinned_days: int = 3
    """How long a hold keeps a past state, which is then compared with the model's."""
    backup_days: int = 3
    """The instants that can be restored."""

    @property
    def days_before(self) -> int:
        """The days before the year: after them the store is as full as it will be."""
        return max(self.keep_days, self.pinned_days, self.backup_days) + 1


YEAR = Plan(
    weeks=52,
    days=7,
    users=5_000,
    rows_per_user=10,
    value_bytes=600,
    imports=280,
    import_rows=50,
    import_users=50,
    reverts=4,
    deletes=280,
    hot_puts=2_800,
    commits=60,
    transactions=60,
    checkpoints=28,
    reads=30,
    parallel_scans=2,
    backup_days=7,
)
"""100,000 imports, 100,000 range tombstones, 1,000,000 versions of hot keys, 10,000 checkpoints."""

MINUTE = Plan(
    weeks=52,
    days=1,
    users=1_000,
    rows_per_user=10,
    value_bytes=300,
    imports=20,
    import_rows=50,
    import_users=50,
    reverts=1,
    deletes=20,
    hot_puts=400,
    commits=20,
    transactions=20,
    checkpoints=4,
    reads=20,
    parallel_scans=1,
)
"""A year of 52 days. Its data is too small for a scan to use processes."""

SECONDS = Plan(
    weeks=16,
    days=1,
    users=50,
    rows_per_user=4,
    value_bytes=20,
    imports=6,
    import_rows=10,
    import_users=50,
    reverts=1,
    deletes=3,
    hot_puts=20,
    commits=5,
    transactions=5,
    checkpoints=2,
    reads=1,
    parallel_scans=1,
)
"""For a test of the state and of counts. Its times say nothing."""
