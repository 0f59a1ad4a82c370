"""Verification: does what is stored keep the invariants that everything else relies on?

Floors, from the top:

    walk
    epochs records
    report
"""

from kvstore.verify.report import Problem, StoreReport
from kvstore.verify.walk import verify

__all__ = ["Problem", "StoreReport", "verify"]
