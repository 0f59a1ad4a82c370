"""The progress that a task reports while it runs."""

from __future__ import annotations

from typing import Any

from kvstore.store import Store
from kvstore.tasks import progress_of


def progress_seen(store: Store, task_id: int, field: str) -> list[Any]:
    """A list that gets the value of `field` in the progress each time the task is renewed."""
    seen: list[Any] = []
    renew = store.tasks.renew

    def watch(*args: Any, **options: Any) -> Any:
        renewed = renew(*args, **options)
        task = store.tasks.get(task_id)
        assert task is not None
        seen.append(progress_of(task)[field])
        return renewed

    store.tasks.renew = watch  # type: ignore[method-assign]
    return seen
