"""Keys as paths: what lies directly in a directory, without a walk over all that lies below it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kvstore.base.span import prefix_end

_PASSED_MAX: Final = 64
"""Keys of one directory that a listing passes before it seeks to the directory's end."""


class Child(NamedTuple):
    """A name in a directory. A name can be both a file and a directory: then it comes twice."""

    name: bytes
    is_directory: bool


def children(store: Any, prefix: bytes, **at: Any) -> Iterator[Child]:
    """What lies directly below `prefix`, in the order of names, each once. `prefix` ends with a
    slash, or is empty. Costs a seek for each directory, and a pass over the files."""
    start, end = prefix, prefix_end(prefix)
    while True:
        directory, passed = b"", 0
        for key in store.keys(start=start, end=end, **at):
            name, slash, _ = key[len(prefix) :].partition(b"/")
            if not slash:
                yield Child(name, False)
            elif name == directory and passed:
                passed += 1
                if passed > _PASSED_MAX:
                    break
            else:
                directory, passed = name, 1
                yield Child(name, True)
        else:
            return
        start = prefix + directory + b"0"  # the byte above the slash
