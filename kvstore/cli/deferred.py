"""Heavy packages that a command imports when it first uses them: numpy and Arrow.

Importing them takes 150 ms, most of the time of `kvstore get`, which uses neither. The modules of
the store import them as they import all others. So a process that runs one command first puts
placeholders into `sys.modules`. A placeholder becomes the module when one of its names is looked
up.

Invariants
1. After that look-up `sys.modules` has the module itself, and the placeholder has all its names.
2. An interrupt waits until an import is over: numpy cannot be imported twice in one process.
"""

from __future__ import annotations

import importlib
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from kvstore.cli.interrupts import uninterrupted

DEFERRED: Final = ("numpy", "numpy.typing", "pyarrow", "pyarrow.compute")

_LOCK: Final = threading.RLock()


class Placeholder(ModuleType):
    """Stands for a module that nobody has used yet."""

    def __getattr__(self, name: str) -> Any:
        own = self.__name__
        with _LOCK, uninterrupted():
            package = own.partition(".")[0]
            for each in DEFERRED:
                if each.partition(".")[0] == package and isinstance(
                    sys.modules.get(each), Placeholder
                ):
                    del sys.modules[each]
            module = importlib.import_module(own)
        vars(self).update(vars(module))
        return getattr(module, name)


def defer_imports() -> None:
    """Put placeholders where the modules of `DEFERRED` would be, unless they are imported."""
    for name in DEFERRED:
        package, _, member = name.partition(".")
        if name in sys.modules or (member and not isinstance(sys.modules[package], Placeholder)):
            continue
        placeholder = Placeholder(name)
        placeholder.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = placeholder
        if member:
            setattr(sys.modules[package], member, placeholder)
