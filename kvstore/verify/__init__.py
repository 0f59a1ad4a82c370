"""Verification: do the stored bytes keep the invariants on which everything else relies?

Floors, from the top:

    walk
    epochs records
    report
"""

from kvstore.verify.report import Problem, StoreReport
from kvstore.verify.walk import verify

__all__ = ["Problem", "StoreReport", "verify"]
