"""The recorded process: `python -m tests.crash.recorded ROOT ENGINE SEED STEPS RESULT`.

It writes to a store below ROOT. At each durable point it notes, in a file there, the number of
states and of copies that must be found again.
"""

from __future__ import annotations

import pickle
import random
import sys
from pathlib import Path

from tests.harness.bounds import bounds
from tests.harness.writer import Writer

ACKNOWLEDGED = "acknowledged"


def main(root: Path, engine: str, seed: int, steps: int, result: Path) -> None:
    rng = random.Random(seed)
    writer = Writer(root, engine, rng)
    copies = []
    pieces = {"COMMIT_PIECE_BYTES": 40, "COMMIT_PIECE_ROWS": 2, "CHANGE_CHUNK_BYTES": 30}
    with (
        bounds(pieces if rng.random() < 0.5 else {}),
        (root / ACKNOWLEDGED).open("wb", buffering=0) as said,
        writer.store as store,
    ):
        for number in range(steps):
            is_durable = writer.step()
            if is_durable or writer.rng.random() < 0.3:
                if not is_durable:
                    store.sync()
                said.write(b"%d %d\n" % (len(writer.states), len(copies)))
            if number % 20 == 19:
                copy = f"copy-{len(copies)}"
                copies.append((copy, int(store.checkpoint(root / copy))))
                said.write(b"%d %d\n" % (len(writer.states), len(copies)))
    result.write_bytes(pickle.dumps((writer.states, copies)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
