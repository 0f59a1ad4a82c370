"""Backups by cron: `python backups.py backups`, every hour, beside the owner.

The first backup is full, each further one costs what changed. Each run thins old history, and
ends with a drill: it restores a random instant elsewhere, and compares it with the store.
"""

from __future__ import annotations

import subprocess
import sys

from tables import STORE


def run(*words: str) -> None:
    """Run a command of kvstore. A failure ends the program with its exit code, which cron mails."""
    done = subprocess.run([sys.executable, "-m", "kvstore", *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def main(collection: str) -> None:
    """Back up, thin, and drill."""
    run("backup", "run", STORE, collection)
    run("backup", "expire", collection, "--keep-within", "7d", "--daily", "30")
    run("backup", "drill", collection, "--depth", "contents", "--store", STORE)


if __name__ == "__main__":
    main(*sys.argv[1:])
