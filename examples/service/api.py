"""The API: `uvicorn api:service --workers 4` beside `kvstore serve flights.db`.

    GET /flights/UA/1545                          the row now
    GET /flights/UA/1545?at=yesterday             the row then
    PUT /flights/UA/1545?status=late&gate=7       a change; it is on disk when the answer comes
    GET /flights/UA/1545/history                  each version
    GET /status/late                              the flights with a status, by the index

Each worker reads the files of the store itself, without a request, and writes through the owner.
Its own writes show in its reads at once, and the writes of others after 50 ms at most.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from tables import STORE

import kvstore
from kvstore import errors


@asynccontextmanager
async def lifespan(service: FastAPI) -> AsyncIterator[None]:
    """Open the two handles of this worker."""
    with (
        kvstore.follow(STORE) as service.state.reader,
        kvstore.connect(STORE, patience=15) as service.state.writer,
    ):
        yield


service = FastAPI(title="flights", lifespan=lifespan)


@service.get("/flights/{carrier}/{flight}")
def read(carrier: str, flight: int, request: Request, at: str | None = None) -> dict[str, Any]:
    """The row of a flight, now or at a time."""
    row = request.app.state.reader.table("flights").get(carrier, flight, as_of=at)
    if row is None:
        raise HTTPException(404, f"no flight {carrier} {flight}")
    return row


@service.put("/flights/{carrier}/{flight}")
def write(
    carrier: str,
    flight: int,
    status: str,
    request: Request,
    gate: str | None = None,
    delay: int | None = None,
) -> dict[str, str]:
    """Set the row of a flight. `delay` is in seconds."""
    state = request.app.state
    stamp = state.writer.table("flights").put(
        {
            "carrier": carrier,
            "flight": flight,
            "status": status,
            "gate": gate,
            "delay_s": delay,
        }
    )
    state.reader.wait_beyond(stamp - 1, timeout=5)  # this worker's reads show it from here on
    return {"since": str(stamp)}


@service.get("/flights/{carrier}/{flight}/history")
def history(carrier: str, flight: int, request: Request) -> list[dict[str, Any]]:
    """Each version of a flight, newest first."""
    versions = request.app.state.reader.table("flights").history(carrier, flight)
    return [{"since": str(version.timestamp), "row": version.row} for version in versions]


@service.get("/status/{status}")
def with_status(status: str, request: Request) -> list[dict[str, Any]]:
    """The flights with a status, the first hundred."""
    table = request.app.state.reader.table("flights")
    return list(table.find("by_status", status, limit=100))


@service.exception_handler(errors.KVStoreError)
def refuse(_: Request, error: errors.KVStoreError) -> JSONResponse:
    """Errors of the store say what happened, and what the caller can do."""
    status = 400 if isinstance(error, errors.UsageError) else 503
    if isinstance(error, errors.HistoryGoneError | errors.NotYetWrittenError):
        status = 404
    return JSONResponse({"error": error.what, "remedy": error.remedy}, status)
