"""A blob for a worker that may be stopped: then its calls are repeated for a short while only."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

from kvstore.limits import FOLLOW_END_S
from kvstore.storage.contract import Blob
from kvstore.storage.patience import Patience


def until_stopped(blob: Blob, stop: threading.Event) -> Blob:
    """`blob`, whose calls are repeated for `FOLLOW_END_S` at most once `stop` is set."""
    return cast("Blob", _HurriedBlob(blob, _UntilStopped(blob.patience, stop)))


class _UntilStopped(Patience):
    """The patience of a storage. Once the worker is stopped, a call is repeated for `FOLLOW_END_S`
    at most."""

    def __init__(self, patience: Patience, stop: threading.Event) -> None:
        def pause(seconds: float) -> None:
            if patience.pause is time.sleep and not stop.is_set():
                stop.wait(seconds)  # the end of the worker ends the pause
            else:
                patience.pause(seconds)

        super().__init__(tell=patience.tell, pause=pause, monotonic=patience.monotonic)
        self._patience, self._stop = patience, stop

    @property
    def seconds(self) -> float:
        """See `Patience.seconds`."""
        known = self._patience.seconds
        return min(known, FOLLOW_END_S) if self._stop.is_set() else known


class _HurriedBlob:
    """`blob` with another patience."""

    def __init__(self, blob: Blob, patience: Patience) -> None:
        self._blob, self.patience = blob, patience

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blob, name)
