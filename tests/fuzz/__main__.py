"""`python -m tests.fuzz [NAME ...] [-libFuzzer options]`: targets steered by coverage, by atheris.

Each target runs in a process of its own, for as long as the options say.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

from tests.fuzz.driver import Target, targets


def functions(target: Target) -> Iterator[FunctionType]:
    """The modules whose coverage steers the fuzzer: the code of the format, and no library
    below."""
    for module in target.modules:
        for thing in vars(module).values():
            members = vars(thing).values() if isinstance(thing, type) else [thing]
            yield from (
                member
                for member in members
                if isinstance(member, FunctionType) and member.__module__ == module.__name__
            )


def fuzz(target: Target, options: list[str]) -> None:
    """Hand one target and its sound bytes to atheris, which does not return."""
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    for function in functions(target):
        atheris.instrument_func(function)
    corpus = Path(tempfile.mkdtemp(prefix=f"fuzz-{target.name}-"))
    for number, seed in enumerate(target.seeds()):
        (corpus / str(number)).write_bytes(seed)
    atheris.Setup([sys.argv[0], *options, str(corpus)], target.run)
    atheris.Fuzz()


def main() -> int:
    """Fuzz the named targets, or all of them; the first failure ends the run."""
    options = [word for word in sys.argv[1:] if word.startswith("-")]
    names = [word for word in sys.argv[1:] if not word.startswith("-")]
    known = targets()
    if len(names) == 1:
        fuzz(known[names[0]], options)
    for name in names or known:
        print(f"fuzz: {name}", flush=True)
        code = subprocess.call([sys.executable, "-m", "tests.fuzz", name, *options])
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
