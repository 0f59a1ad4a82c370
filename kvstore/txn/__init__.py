"""Writes that depend on reads: transactions, conditions, updates in place, the versioned undo.

Floors, from the top:

    retry revert
    transaction
    owners
    conditional expiry reads tables updates
"""

from kvstore.txn.conditional import UNCHECKED, Conditional, Unchecked
from kvstore.txn.expiry import Expiry
from kvstore.txn.reads import ReadSet
from kvstore.txn.retry import transact
from kvstore.txn.revert import revert_range
from kvstore.txn.transaction import Transaction, Transactions
from kvstore.txn.updates import Updates, Updating, counted

__all__ = [
    "Updating",
    "Conditional",
    "Expiry",
    "ReadSet",
    "Transaction",
    "Transactions",
    "UNCHECKED",
    "Unchecked",
    "Updates",
    "counted",
    "revert_range",
    "transact",
]
