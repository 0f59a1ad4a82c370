"""The command `kvstore backup`.

Floors, from the top:

    backups                 backups, restores, standbys
    reading                 commands that read a collection, and restore nothing
    options                 how a collection is opened
"""

from backup.cli.backups import app
from backup.cli.options import PASSPHRASE

__all__ = ["PASSPHRASE", "app"]
