"""Pushes: one job builds imports in a bucket, and any number of stores take them, in order.

    <root>/root.json                             the identity of the root
    <root>/log/<20 digits>.json                  the log: pushes, reverts, expiries
    <root>/imports/<job>/<shard, 4 digits>/      one staged import (`kvstore.bulk.staging`)
    <root>/status/<name>/<20 digits>.json        the report of one store; the highest number counts

`push_log` keeps the root, `pushes` is the side of the job, and `pull` is the side of a store.
"""

from kvstore.bulk.pushes.pull import Puller, pull
from kvstore.bulk.pushes.push_log import Push, StoreStatus, shard_of
from kvstore.bulk.pushes.pushes import Pushes, PushStatus

__all__ = ["Puller", "Push", "PushStatus", "Pushes", "StoreStatus", "pull", "shard_of"]
