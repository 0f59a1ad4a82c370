"""The command `kvstore backup`.

Floors, from the top:

    backups                 backups, replicas, upkeep
    reading restores retention drills fleets  reads; restores; expiry and labels; proofs
    options figures         how a collection is opened; how backups are printed
"""

from backup.cli.backups import app
from backup.cli.options import PASSPHRASE

__all__ = ["PASSPHRASE", "app"]
