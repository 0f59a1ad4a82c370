"""Imports as tasks: a sealed staging directory is added once, however often the task begins.

    queue    arguments
    import   staging, on_conflict, move, thorough

The task's id is derived from the import's id, so an import is in the queue once. Before each step
of `bulk.ingest` the handler reports its progress. The report fails if another worker has the task
by now, and the handler stops. If both workers have reached the last step, the import's id makes the
second one find the import added.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final, cast

from kvstore.bulk.ingest import OnConflict, ingest
from kvstore.bulk.staging import read_manifest
from kvstore.codec.json import JsonObject
from kvstore.remote.control import StoreOrClient
from kvstore.tasks import Arguments, Handler, TaskProgress, handler, submit

IMPORT_QUEUE: Final = "import"


def handlers(store: StoreOrClient) -> Mapping[str, Handler]:
    """The handlers of the tasks that this module submits."""
    return {IMPORT_QUEUE: handler(partial(_import, store))}


def submit_import(
    store: StoreOrClient,
    staging: str | os.PathLike[str],
    on_conflict: OnConflict = "overwrite",
    move: bool = False,
    *,
    thorough: bool = False,
    report_to: str | None = None,
) -> str:
    """Submit a `bulk.ingest`. Returns the task's id. `staging` must stay until the task is done.

    The report has the `timestamp` at which the rows became visible. Raises
    `ImportRefusedError` if the directory holds no sealed import.
    """
    directory = Path(staging).absolute()
    import_id = read_manifest(directory).import_id
    arguments = {
        "staging": str(directory),
        "on_conflict": on_conflict,
        "move": move,
        "thorough": thorough,
    }
    return submit(
        store.tasks,
        IMPORT_QUEUE,
        arguments,
        task_id=f"import-{import_id:016x}",
        report_to=report_to,
    )


def _import(store: StoreOrClient, arguments: JsonObject, progress: TaskProgress) -> Arguments:
    # `ingest` checks the choice of `on_conflict`.
    on_conflict = cast("OnConflict", arguments.text("on_conflict"))
    stamp = ingest(
        store,
        arguments.text("staging"),
        on_conflict,
        arguments.field("move", bool),
        thorough=arguments.field("thorough", bool),
        progress=lambda step: progress.tell(step=step),
    )
    return {"timestamp": int(stamp)}
