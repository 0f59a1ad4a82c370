"""Verification: do the stored bytes keep the invariants on which everything else relies?

Floors, from the top:

    walk
    epochs records tables
    report
"""

from kvstore.verify.report import Problem, StoreReport
from kvstore.verify.tables import unreadable_rows
from kvstore.verify.walk import verify

__all__ = ["Problem", "StoreReport", "unreadable_rows", "verify"]
