"""The root of the error tree, and the forms that facts take in messages."""

from __future__ import annotations


def printable(key: bytes) -> str:
    """Render a key for a message: text as it is, other bytes as escapes, 64 bytes at most."""
    text = repr(bytes(key[:64]))
    return text if len(key) <= 64 else f"{text}... ({len(key)} bytes)"


class KVStoreError(Exception):
    """Root of the tree. `what` says what happened and where, `remedy` what the caller should do."""

    __module__ = "kvstore.errors"  # tracebacks and pickles name the public place

    def __init_subclass__(cls) -> None:
        if cls.__module__.startswith("kvstore.errors."):
            cls.__module__ = "kvstore.errors"

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross processes (Spark's workers, pools). By default Python makes an error anew
        # from its message alone, which fails for each class that takes other arguments.
        return _restore, (type(self), self.args), self.__dict__


def _restore(kind: type[KVStoreError], args: tuple[object, ...]) -> KVStoreError:
    """Make the error that `__reduce__` took apart, without calling its `__init__`."""
    return kind.__new__(kind, *args)


def span_text(span: tuple[bytes, bytes | None]) -> str:
    """Render the span of keys `start <= key < end` for a message."""
    start, end = span
    return f"[{printable(start)}, {'end' if end is None else printable(end)})"
