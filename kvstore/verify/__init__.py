"""Verification: does what is stored keep the invariants that everything else relies on?"""

from kvstore.verify.report import Problem, VerifyReport
from kvstore.verify.walk import verify

__all__ = ["Problem", "VerifyReport", "verify"]
