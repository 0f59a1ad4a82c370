"""Backups and the upkeep of collections as tasks: each is done once, however often it is begun.

    queue                arguments                 it is done once, because
    backup               url, full, max_age_s      the appended batch carries the task's token
    compact-collection   url                       merging a single batch does nothing
    expire-collection    url, before or keep_s     `since` only moves forward

Tasks are on disk in the clear, so they hold no keys and no passphrases. The worker's program says
how a collection is opened:

    def open_collection(url: str) -> Collection:
        return Collection(url, passphrase=secrets_of(url))

    Worker(store.tasks, handlers(store, open_collection=open_collection))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvstore.backup.collection import Collection
from kvstore.base.arguments import AGE
from kvstore.base.paths import is_url
from kvstore.base.timestamp import TIMESTAMP_MAX, AgeLike, TimeLike, Timestamp, to_timestamp
from kvstore.codec.json import JsonObject
from kvstore.errors import Argument, UsageError
from kvstore.remote.control import StoreOrClient
from kvstore.storage.address import require_address
from kvstore.tasks import Arguments, Handler, TaskProgress, age_of, handler, submit

BACKUP_QUEUE: Final = "backup"
COMPACT_QUEUE: Final = "compact-collection"
EXPIRE_QUEUE: Final = "expire-collection"


def handlers(
    store: StoreOrClient,
    *,
    open_collection: Callable[[str], Collection] = Collection,
    every_s: float | None = None,
) -> Mapping[str, Handler]:
    """The handlers of the queues above, for a worker.

    `open_collection` opens a collection by its URL, with keys and options where it needs any.
    A backup reports the rows that it has written every `every_s` seconds.
    """
    calls = {
        BACKUP_QUEUE: partial(_backup, store, open_collection),
        COMPACT_QUEUE: partial(_compact, open_collection),
        EXPIRE_QUEUE: partial(_expire, open_collection),
    }
    return {queue: handler(call, every_s=every_s) for queue, call in calls.items()}


def submit_backup(
    store: StoreOrClient,
    url: str | os.PathLike[str],
    *,
    full: bool = False,
    max_age: AgeLike | None = None,
    task_id: str | None = None,
    report_to: str | None = None,
) -> str:
    """Ask for `Collection.backup` of `store` to `url`; returns the task's id.

    The backup has everything that was committed before the task is carried out. The task's report
    has the fields of `BackupInfo`.
    """
    arguments: dict[str, Any] = {"url": place_of(url), "full": full}
    if (age := AGE.or_none.check("max_age", max_age)) is not None:
        arguments["max_age_s"] = age.total_seconds()
    return submit(store.tasks, BACKUP_QUEUE, arguments, task_id=task_id, report_to=report_to)


def submit_compact(
    store: StoreOrClient,
    url: str | os.PathLike[str],
    *,
    task_id: str | None = None,
    report_to: str | None = None,
) -> str:
    """Ask for `Collection.compact` at `url`; returns the task's id."""
    arguments = {"url": place_of(url)}
    return submit(store.tasks, COMPACT_QUEUE, arguments, task_id=task_id, report_to=report_to)


def submit_expire(
    store: StoreOrClient,
    url: str | os.PathLike[str],
    before: TimeLike | None = None,
    *,
    keep: AgeLike | None = None,
    task_id: str | None = None,
    report_to: str | None = None,
) -> str:
    """Ask for `Collection.expire` at `url`; returns the task's id. The report has `since`.

    `keep` counts back from the time at which the task is carried out.
    """
    if (before is None) == (keep is None):
        raise UsageError(
            ("expire takes ", Argument("before"), " or ", Argument("keep")), "pass one of the two"
        )
    arguments: dict[str, Any] = {"url": place_of(url)}
    if before is not None:
        arguments["before"] = int(to_timestamp(before, name="before", now=store.now))
    if (age := AGE.or_none.check("keep", keep)) is not None:
        arguments["keep_s"] = age.total_seconds()
    return submit(store.tasks, EXPIRE_QUEUE, arguments, task_id=task_id, report_to=report_to)


def place_of(url: str | os.PathLike[str]) -> str:
    """The URL in a form that means the same in every process.

    Raises `UsageError` if it has a password.
    """
    text = require_address(url)
    return text if is_url(text) else str(Path(text).absolute())


def _backup(
    store: StoreOrClient,
    open_collection: Callable[[str], Collection],
    arguments: JsonObject,
    progress: TaskProgress,
) -> Arguments:
    progress.tell(rows=0)
    info = open_collection(arguments.text("url")).backup(
        store,
        full=arguments.field("full", bool),
        token=progress.token,
        max_age=age_of(arguments, "max_age_s"),
        progress=lambda rows: progress.tick(rows=rows),
    )
    return {**info._asdict(), "lower": int(info.lower), "upper": int(info.upper)}


def _compact(
    open_collection: Callable[[str], Collection], arguments: JsonObject, progress: TaskProgress
) -> Arguments:
    progress.tell(step="compact")
    open_collection(arguments.text("url")).compact()
    return {}


def _expire(
    open_collection: Callable[[str], Collection], arguments: JsonObject, progress: TaskProgress
) -> Arguments:
    progress.tell(step="expire")
    number = arguments.optional_integer("before", most=TIMESTAMP_MAX)
    collection = open_collection(arguments.text("url"))
    before = None if number is None else Timestamp(number)
    since = collection.expire(before, keep=age_of(arguments, "keep_s"))
    return {"since": int(since)}
