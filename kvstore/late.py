"""Names of `kvstore` that are imported at their first use.

`import kvstore` takes a few milliseconds then: a script that opens no store, and a command that
answers `--help`, do not wait for RocksDB's and Arrow's bindings. A first use costs the import. So
`kvstore.server.app(store)` needs no import of `kvstore.server`.

Many verbs of an open store import their module late, too. A process that has no file descriptor
left cannot read a module: `OwnModules` makes this an error of the project, for all late imports.
"""

from __future__ import annotations

import errno
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, Final, NoReturn

_NO_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE)


class _Loader(SourceFileLoader):
    """Loads a module of ours from its source."""

    def exec_module(self, module: ModuleType) -> None:
        try:
            super().exec_module(module)
        except OSError as error:
            _raise_told(self.name, error)


class OwnModules:
    """Finds the modules below `kvstore` as Python does, and translates the error of a process
    that has no file descriptor left to read one. Such an import can be repeated."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if not name.startswith("kvstore."):
            return None
        try:
            spec = PathFinder.find_spec(name, path, target)
        except OSError as error:
            _raise_told(name, error)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _raise_told(name: str, error: OSError) -> NoReturn:
    errors = sys.modules.get("kvstore.errors")  # nothing can be imported now
    if errors is None or error.errno not in _NO_DESCRIPTORS:
        raise error
    raise errors.DeterminateError(
        f"the import of {name}",
        f"{error}: this process has too many files open; close some, or raise `ulimit -n`",
    ) from error


# Before the finder of sources, and behind those that others put first, such as pytest's.
sys.meta_path.insert(
    next((n for n, each in enumerate(sys.meta_path) if each is PathFinder), 0), OwnModules
)

_NAMES: Final = {
    "Batch": ("kvstore.batch", "Batch"),
    "Change": ("kvstore.changes", "Change"),
    "Changeset": ("kvstore.changes.epochs", "Changeset"),
    "ChangesetId": ("kvstore.changes.epochs", "ChangesetId"),
    "Clock": ("kvstore.base.clock", "Clock"),
    "Durability": ("kvstore.timeline.durability", "Durability"),
    "Epoch": ("kvstore.changes.epochs", "Epoch"),
    "Event": ("kvstore.changes.events", "Event"),
    "Feed": ("kvstore.feeds", "Feed"),
    "FeedBatch": ("kvstore.feeds", "FeedBatch"),
    "GcPolicy": ("kvstore.retention.gc", "GcPolicy"),
    "GcReport": ("kvstore.retention.gc", "GcReport"),
    "Generation": ("kvstore.changes.streams", "Generation"),
    "Hold": ("kvstore.timeline.holds", "Hold"),
    "HoldRecord": ("kvstore.timeline.holds", "HoldRecord"),
    "ImportRecord": ("kvstore.timeline.import_records", "ImportRecord"),
    "Join": ("kvstore.tables.joins", "Join"),
    "LiveReader": ("kvstore.remote.live", "LiveReader"),
    "ManualClock": ("kvstore.base.clock", "ManualClock"),
    "MappingCodec": ("kvstore.mapping", "MappingCodec"),
    "Operation": ("kvstore.changes.events", "Operation"),
    "Options": ("kvstore.engine.rocks", "Options"),
    "Position": ("kvstore.feeds", "Position"),
    "Share": ("kvstore.feeds", "Share"),
    "SharedStore": ("kvstore.remote.shared", "SharedStore"),
    "Snapshot": ("kvstore.snapshot", "Snapshot"),
    "Span": ("kvstore.base.span", "Span"),
    "Store": ("kvstore.store", "Store"),
    "StoreMapping": ("kvstore.mapping", "StoreMapping"),
    "Table": ("kvstore.tables", "Table"),
    "Timestamp": ("kvstore.base.timestamp", "Timestamp"),
    "Transaction": ("kvstore.transaction", "Transaction"),
    "Version": ("kvstore.mvcc", "Version"),
    "desc": ("kvstore.tables", "desc"),
    "follow": ("kvstore.remote.live", "follow"),
    "join": ("kvstore.tables.joins", "join"),
    "open": ("kvstore.remote.control", "open"),
    "open_read_only": ("kvstore.opening", "open_read_only"),
    "unique": ("kvstore.tables", "unique"),
    "connect": ("kvstore.remote.client", "connect"),
    "connect_async": ("kvstore.remote.client", "connect_async"),
    "Client": ("kvstore.remote.client", "Client"),
    "AsyncClient": ("kvstore.remote.client", "AsyncClient"),
}
"""The module and the member of each name. A name without a member is the module."""


def __getattr__(name: str) -> Any:
    """The object of `kvstore` by this name, or its module of this name. Raises `AttributeError`."""
    absent = f"module 'kvstore' has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(absent)
    import importlib.util  # where it is needed: it loads more modules than all of this file

    package = sys.modules["kvstore"]
    module, member = _NAMES.get(name, (f"kvstore.{name}", ""))
    if name not in _NAMES and importlib.util.find_spec(module) is None:
        raise AttributeError(absent)
    found = importlib.import_module(module)
    if member:
        found = getattr(found, member)
        setattr(package, name, found)  # the next use finds it without this function
    return found


def __dir__() -> list[str]:
    """The names of `kvstore`, also the names that nobody has used yet."""
    return sorted({*vars(sys.modules["kvstore"]), *_NAMES})
