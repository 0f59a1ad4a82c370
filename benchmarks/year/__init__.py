"""A year of service, played in an hour at most: `python -m benchmarks.year`.

A store meets in this year what services do to stores: micro-batches as small imports, reverts,
deletions of all rows of a user, hot keys with very many versions, transactions, checkpoints,
parallel scans, incremental backups with expiry, feeds that follow, lag, are lost and go, holds,
reopenings, and garbage collection. The clock is passed in, so no second of the year is waited for.

    plan      how much happens in a day, and how many days there are
    model     the same data as a plain dict
    service   one action each, made on the store and on the model, and timed
    calendar  the order of the actions, and the checks against the model
    levels    one line a cost over the year, and whether it stays level
    picture   the lines, drawn
    document  the page that the command writes
    run       the command

Invariants
1. The same plan makes the same calls, in the same order.
2. Each day a past state is read and compared with the model's state of that time. At the end of the
   year the store, the feed's mirror and the restored backup equal the model.
"""
