"""Running a transaction again until it commits, a bounded number of times.

The bound of the waits doubles, and each wait is drawn at random below its bound ("full jitter"), so
that transactions that collided once do not collide again in step.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from kvstore.arguments import require_count
from kvstore.errors import ConflictError, UsageError
from kvstore.limits import TRANSACT_ATTEMPTS, TRANSACT_WAIT_S_MAX, TRANSACT_WAIT_S_MIN
from kvstore.txn.transaction import Transaction

T = TypeVar("T")


def transact(
    begin: Callable[[], Transaction],
    body: Callable[[Transaction], T],
    *,
    attempts: int | None = None,
    wait: Callable[[float], None] = time.sleep,
    draw: Callable[[], float] = random.random,
) -> T:
    """Run `body` in a transaction and commit it, again after each conflict; returns its result.

    `body` may run several times, so it should change nothing but the transaction. `wait` takes
    seconds, and `draw` returns a number in 0..1. Raises the last `ConflictError` after `attempts`.
    """
    if not callable(body):
        raise UsageError(f"{body!r} is no function", "pass one that takes the transaction")
    attempts = TRANSACT_ATTEMPTS if attempts is None else attempts
    require_count(attempts, name="attempts")
    for attempt in range(attempts - 1):
        with suppress(ConflictError):
            return _once(begin, body)
        wait(draw() * min(TRANSACT_WAIT_S_MAX, TRANSACT_WAIT_S_MIN * 2**attempt))
    return _once(begin, body)


def _once(begin: Callable[[], Transaction], body: Callable[[Transaction], T]) -> T:
    with begin() as transaction:
        return body(transaction)
