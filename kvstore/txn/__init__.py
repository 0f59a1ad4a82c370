"""Transactions, conditional writes and the versioned undo: writes that depend on reads.

Floors, from the top:

    retry revert
    transaction
    owners
    conditional reads
"""

from kvstore.txn.conditional import UNCHECKED, Conditional, Unchecked
from kvstore.txn.reads import ReadSet
from kvstore.txn.retry import transact
from kvstore.txn.revert import revert_range
from kvstore.txn.transaction import Transaction, Transactions

__all__ = [
    "Conditional",
    "ReadSet",
    "Transaction",
    "Transactions",
    "UNCHECKED",
    "Unchecked",
    "revert_range",
    "transact",
]
