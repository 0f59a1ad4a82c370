"""A process in a container of bounded memory, and the life of a store in it.

Where this process may make control groups (version 1 or 2 of Linux), the kernel ends the contained
process if it takes more than its limit. Everywhere, the process tells the most memory it has had.

    python -m tests.harness.contained STORE ROWS STEP     a step of the life itself
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvstore import Store

LIMIT_BYTES: Final = 256 << 20
_GROUP: Final = "KVSTORE_TEST_GROUP"
_FILES: Final = {"memory": "memory.limit_in_bytes", "": "memory.max"}
"""The file that sets the limit of a group, by the controller's name in version 1, and in 2."""

_CHUNK: Final = 10_000


@contextmanager
def control_group(limit: int) -> Iterator[Path | None]:
    """A control group whose processes have `limit` bytes of memory together. None where this
    process may not make one."""
    made = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controller, place = line.split(":", 2)
        if controller in _FILES:
            root = Path("/sys/fs/cgroup", controller, place.lstrip("/"))
            group = root / f"kvstore-test-{os.getpid()}"
            with suppress(OSError):
                group.mkdir()
                try:
                    (group / _FILES[controller]).write_text(str(limit))
                    made = group
                    break
                except OSError:
                    group.rmdir()
    try:
        yield made
    finally:
        if made is not None:
            made.rmdir()


def live_contained(store: Path, rows: int, step: str) -> tuple[int, bool]:
    """A step (`STEPS`) in the life of a store of `rows` rows in `LIMIT_BYTES`, in a process of its
    own. Returns the most bytes that the process had, and whether the kernel enforced the limit."""
    with control_group(LIMIT_BYTES) as group:
        environment = {**os.environ, _GROUP: "" if group is None else str(group)}
        done = subprocess.run(
            [sys.executable, "-m", "tests.harness.contained", str(store), str(rows), step],
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
        )
        return json.loads(done.stdout)["most"], group is not None


def main() -> None:
    """Enter the group, and live there."""
    group = os.environ[_GROUP]
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    STEPS[sys.argv[3]](Path(sys.argv[1]), int(sys.argv[2]))
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            sys.stdout.write(json.dumps({"most": int(line.split()[1]) * 1024}))


def write(place: Path, rows: int) -> None:
    """Write the rows in no order."""
    with _opened(place, durability="async") as store:
        for first in range(0, rows, _CHUNK):
            numbers = range(first, min(first + _CHUNK, rows))
            store.put_many({_key(number * 7919 % rows): b"v" * 30 for number in numbers})


def read(place: Path, rows: int) -> None:
    """Read the rows by scans, look-ups, a server and the looks of a page."""
    from kvstore.remote.server import ListenAddress, serving
    from kvstore.remote.server.app import app

    with _opened(place) as store:
        assert sum(batch.num_rows for batch in store.scan_batches()) == rows
        drawn = random.Random(0)
        for _ in range(2000):
            assert store.get(_key(drawn.randrange(rows))) is not None
        for number in range(rows // 40):  # of 10 M rows, so many fill the cache of newest values
            assert store.get(_key(number)) == b"v" * 30
        store.put_many({_key(number): b"w" * 30 for number in range(0, rows, 7)[:_CHUNK]})
        assert store.browsing.keys().next is not None
        store.browsing.activity(0)
        with serving(app(store), ListenAddress("127.0.0.1", 0)) as running:
            threads = [threading.Thread(target=_read_all, args=(running.url, rows)) for _ in "ab"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        store.gc(before=store.now())


STEPS: Final = {"write": write, "read": read}


def _opened(place: Path, **how: Any) -> Store:
    import kvstore

    options = kvstore.Options(cache_bytes=32 << 20, write_buffer_bytes=4 << 20, open_files=64)
    return kvstore.open(place, options=options, **how)


def _read_all(url: str, rows: int) -> None:
    import kvstore

    with kvstore.connect(url) as client:
        read = sum(batch.num_rows for batch in client.scan_batches(limit=min(rows, 1_000_000)))
        assert read == min(rows, 1_000_000)


def _key(number: int) -> bytes:
    return b"key/%010d" % number


if __name__ == "__main__":
    main()
