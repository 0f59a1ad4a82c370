"""A service of FastAPI that owns a store, and serves it to notebooks and jobs as well.

    FLIGHTS_TOKEN=$(python -c 'import secrets; print(secrets.token_urlsafe(32))') \
        uvicorn flights_service:service

    GET /flights/UA1545                               its status now
    GET /flights/UA1545?at=2013-01-31T12:00:00Z       its status then
    PUT /flights/UA1545?status=late                   a change
    GET /flights/UA1545/history                       all that is known
    /store                                            the store, for kvstore.connect

One process owns the store: run one worker. Handlers are plain functions, which FastAPI runs in
threads, because commits wait for the disk.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

import kvstore
from kvstore import errors
from kvstore.server import Token, app


@asynccontextmanager
async def lifespan(service: FastAPI) -> AsyncIterator[None]:
    """Open the store when the service begins, and close it when the service ends."""
    with kvstore.open(os.environ.get("FLIGHTS_STORE", "flights.db")) as store:
        service.state.store = store
        service.mount("/store", app(store, [Token(os.environ["FLIGHTS_TOKEN"], ["write"])]))
        yield


service = FastAPI(title="flights", lifespan=lifespan)


@service.get("/flights/{flight}")
def read_status(flight: str, request: Request, at: str | None = None) -> dict[str, Any]:
    """The status of a flight, now or at a time."""
    value = request.app.state.store.get(flight.encode(), as_of=at)
    return {"flight": flight, "status": None if value is None else value.decode()}


@service.put("/flights/{flight}")
def set_status(flight: str, status: str, request: Request) -> dict[str, str]:
    """Set the status of a flight. It is on disk when the answer comes."""
    stamp = request.app.state.store.put(flight.encode(), status.encode())
    return {"flight": flight, "since": str(stamp)}


@service.get("/flights/{flight}/history")
def read_history(flight: str, request: Request) -> list[dict[str, Any]]:
    """Every status of a flight, newest first."""
    return [
        {"since": str(stamp), "status": None if value is None else value.decode()}
        for _, stamp, value in request.app.state.store.history(flight.encode())
    ]


@service.exception_handler(errors.KVStoreError)
def refuse(_: Request, error: errors.KVStoreError) -> JSONResponse:
    """Errors of the store say what happened, and what the caller can do."""
    status = 400 if isinstance(error, errors.UsageError) else 503
    if isinstance(error, errors.HistoryGoneError | errors.NotYetWrittenError):
        status = 404
    return JSONResponse({"error": error.what, "remedy": error.remedy}, status)
