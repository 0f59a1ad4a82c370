"""Pushes: one job builds imports in a bucket, and any number of stores take them, in order.

    <root>/root.json                             the identity of the root
    <root>/log/<20 digits>.json                  the log: pushes, reverts, expiries
    <root>/imports/<job>/<shard, 4 digits>/      one staged import (`bulk.bucket`)
    <root>/status/<name>/<20 digits>.json        the report of one store; the highest number counts

Floors, from the top:

    cli
    pull sending             a store takes the pushes; rows in any order
    reverting                a push is taken back
    place                    how far a store has come
    pushes amended           a job makes them; a person reverts and expires them; one for one store
    statuses log rows        reports of stores; the order of events; rows of a table, by shards
    sharding modes newer     the shard of a key; older and newer rows
    roots                    the URL or the directory of a root
"""

from kvstore.bulk.pushes.log import Push, StoreStatus, shard_of
from kvstore.bulk.pushes.pull import Puller, pull
from kvstore.bulk.pushes.pushes import Pushes, PushStatus

__all__ = ["Puller", "Push", "PushStatus", "Pushes", "StoreStatus", "pull", "shard_of"]
