"""The gateway's own routes, an ordinary FastAPI app: models, health, status, metrics, and two pages for people."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetero_llm.errors import HeteroError, InternalError, MethodNotAllowed, ModelNotServed, NotFound
from hetero_llm.gateway import views
from hetero_llm.gateway.openai_errors import error_body, error_headers
from hetero_llm.gateway.request import new_request_id
from hetero_llm.gateway.state import GatewayState

STREAM_HEARTBEAT_S = 10.0
OPEN_PATHS = frozenset(("/", "/docs", "/openapi.json", "/health", "/ready", "/favicon.ico"))
"""Answered without a key: the process's pulse for load balancers, and pages that hold no data."""

_CODE = "hetero_llm.error_code"
"""Where in the ASGI scope an error's code is left for the log and the counters."""

_log = logging.getLogger(__name__)


def build_app(state: GatewayState) -> ASGIApp:
    """Return the app for everything that is not relayed, guarded by the API keys."""
    app = FastAPI(title="hetero-llm", docs_url=None, redoc_url=None)
    _add_model_routes(app, state)
    _add_health_routes(app, state)
    _add_status_routes(app, state)
    _add_pages(app)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(HeteroError, _hetero_error)
    return Guard(app, state)


def _json(data: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(data), status, headers, media_type="application/json")


def _add_model_routes(app: FastAPI, state: GatewayState) -> None:
    @app.get("/v1/models", summary="Models served, ready or not")
    async def models() -> Response:
        return _json(views.model_list(state.table))

    @app.get("/v1/models/{name:path}", summary="One model")
    async def model(name: str) -> Response:
        for entry in state.table.models:
            if entry.name == name:
                return _json(views.model_card(entry, state.table))
        raise ModelNotServed(
            f"The model `{name[:200]}` does not exist here.", next=("GET /v1/models lists the models served",)
        )


def _add_health_routes(app: FastAPI, state: GatewayState) -> None:
    @app.get("/health", summary="The gateway process runs")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready", summary="At least one replica is ready")
    async def ready() -> Response:
        answer = views.readiness(state.table)
        if answer["ready"] and not state.draining:
            return _json(answer)
        return _json(answer, 503, {"retry-after": "2"})

    @app.get("/metrics", summary="Counters for Prometheus")
    async def metrics() -> Response:
        return Response(state.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_status_routes(app: FastAPI, state: GatewayState) -> None:
    @app.get("/status", summary="Models, replicas, and this gateway")
    async def status() -> Response:
        return _json(views.status(state))

    @app.get("/status/stream", summary="The same as server-sent events, one at each change")
    async def stream() -> Response:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(_status_events(state), headers=headers, media_type="text/event-stream")


async def _status_events(state: GatewayState) -> AsyncIterator[bytes]:
    while not state.draining:
        yield b"data: " + msgspec.json.encode(views.status(state)) + b"\n\n"
        while not await state.changed(STREAM_HEARTBEAT_S):
            yield b": still here\n\n"


def _add_pages(app: FastAPI) -> None:
    static = resources.files("hetero_llm.gateway") / "static"

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse((static / "index.html").read_bytes())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse((static / "docs.html").read_bytes())


def _error_response(error: HeteroError, scope: Scope, headers: dict[str, str] | None = None) -> Response:
    scope[_CODE] = error.code
    pairs = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_body(error), error.http_status, {**pairs, **(headers or {})})


async def _hetero_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeteroError)
    return _error_response(error, request.scope)


async def _http_error(request: Request, given: Exception) -> Response:
    assert isinstance(given, HTTPException)
    path = request.url.path[:200]
    if given.status_code == 405:
        allowed = (given.headers or {}).get("allow", "GET")
        return _error_response(
            MethodNotAllowed(f"{path} takes {allowed}, not {request.method}.", next=(f"use {allowed}",)),
            request.scope,
            {"allow": allowed},
        )
    error = NotFound(f"{path} is not a path of this endpoint.", next=("GET /docs lists the paths",))
    return _error_response(error, request.scope)


class Guard:
    """Around the app: asks for the key, numbers and logs requests, turns a bug into an error object."""

    _ID = re.compile(rb"[\x21-\x7e]{1,128}")

    def __init__(self, app: ASGIApp, state: GatewayState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if self._ID.fullmatch(given) else new_request_id()
        began_s = time.perf_counter()
        written: dict[str, Any] = {"status": None, "key": None}

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                written["status"] = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS:
                written["key"] = self._state.keys.check(headers.get(b"authorization"), headers.get(b"x-api-key"))
            await self._app(scope, receive, tagged)
        except HeteroError as error:
            await self._refuse(error, written, scope, receive, tagged)
        except Exception as error:  # noqa: BLE001  the last place where a bug can still get an answer
            _log.exception("bug: %s failed", scope["path"])
            bug = InternalError("The gateway failed on this request.", cause=f"{type(error).__name__}: {error}")
            await self._refuse(bug, written, scope, receive, tagged)
        finally:
            if _CODE in scope:
                self._state.metrics.refused(scope[_CODE], written["status"] or 0)
            self._log_access(scope, request_id, written, began_s)

    async def _refuse(
        self, error: HeteroError, written: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        if written["status"] is None:
            await _error_response(error, scope)(scope, receive, send)

    def _log_access(self, scope: Scope, request_id: bytes, written: dict[str, Any], began_s: float) -> None:
        if self._state.access_log is None:
            return
        self._state.access_log.write(
            {
                "event": "request",
                "id": request_id.decode("latin-1"),
                "method": scope["method"],
                "path": scope["path"],
                "ms": round((time.perf_counter() - began_s) * 1000, 1),
                "code": scope.get(_CODE),
                **written,
            }
        )
