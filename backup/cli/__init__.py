"""The command `kvstore backup`.

Floors, from the top:

    backups                 backups, restores, standbys
    reading drills          commands that read a collection, and restore nothing; proofs
    options figures         how a collection is opened; how backups are printed
"""

from backup.cli.backups import app
from backup.cli.options import PASSPHRASE

__all__ = ["PASSPHRASE", "app"]
