"""The page and its answers, by starlette and uvicorn. Needs `pip install 'esper[web]'`; nothing can be changed here."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from threading import Lock
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from esper.dashboard.curves import curves
from esper.dashboard.episode_answers import episode, rollout
from esper.dashboard.findings import files, findings, leaderboard
from esper.dashboard.guard import Guard, Policy
from esper.dashboard.live import VIEWERS, EventStream, Hub
from esper.dashboard.overview import overview
from esper.dashboard.source import Source, Stamp
from esper.telemetry.records import to_json
from esper.telemetry.store import StoreError

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
NO_FILE = "there is no such file"
REMEMBERED = 256
"""Answers that are kept while the store does not change."""

Ask = Callable[[Source, Request], Any]


class RefusedRequestError(ValueError):
    """A question that makes no sense, with the reason."""


class Answers:
    """Answers by question, so that twenty viewers of one update cost one query."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Stamp, bytes]] = {}
        self._lock = Lock()
        self._asking: dict[str, Lock] = {}

    def get(self, key: str, source: Source, ask: Callable[[], Any], *, fresh: bool = False) -> bytes:
        with self._lock:
            lock = self._asking.setdefault(key, Lock())
        with lock:  # who asks the same at the same time waits for the one answer
            stamp = source.stamp()
            kept = self._kept.get(key)
            if kept is not None and kept[0] == stamp and not fresh:
                return kept[1]
            body = to_json(ask()).encode()
            with self._lock:
                if len(self._kept) >= REMEMBERED:
                    self._kept.clear()
                    self._asking.clear()
                self._kept[key] = (stamp, body)
            return body


def make_app(sources: Sequence[Source], policy: Policy | None = None) -> Starlette:
    """The application; `policy` says who may ask."""
    hub, answers = Hub(sources), Answers()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(hub.watch())
        yield
        task.cancel()

    def source_of(request: Request) -> Source:
        number: int = request.path_params["run"]
        if number >= len(sources):
            raise RefusedRequestError(f"there is no run {number} here")
        return sources[number]

    def answering(ask: Ask, *, fresh: bool = False) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            try:
                source, key = source_of(request), f"{request.url.path}?{request.url.query}"
                body = answers.get(key, source, lambda: ask(source, request), fresh=fresh)
            except RefusedRequestError as error:
                return PlainTextResponse(str(error), 404)
            except (sqlite3.Error, StoreError) as error:
                return PlainTextResponse(f"the store cannot be read: {error}", 503)
            return Response(body, media_type="application/json")

        return answer

    def runs(request: Request) -> Response:
        named = [{"id": i, "name": source.name} for i, source in enumerate(sources)]
        return Response(to_json(named), media_type="application/json")

    async def live(request: Request) -> Any:
        return EventStream(hub) if len(hub.viewers) < VIEWERS else PlainTextResponse("too many viewers", 503)

    def download(request: Request) -> Response:
        try:
            return run_file(source_of(request), request.path_params["name"])
        except RefusedRequestError:
            return PlainTextResponse(NO_FILE, 404)

    routes = [
        Route("/", lambda request: page_file("index.html")),
        Route("/static/{name}", lambda request: page_file(request.path_params["name"])),
        Route("/api/runs", runs),
        Route("/api/live", live),
        Route("/api/runs/{run:int}/overview", answering(lambda s, r: overview(s), fresh=True)),
        Route("/api/runs/{run:int}/curves", answering(lambda s, r: curves(s))),
        Route("/api/runs/{run:int}/rollout", answering(_rollout)),
        Route("/api/runs/{run:int}/episode", answering(_episode)),
        Route("/api/runs/{run:int}/findings", answering(lambda s, r: findings(s))),
        Route("/api/runs/{run:int}/leaderboard", answering(lambda s, r: leaderboard(s))),
        Route("/api/runs/{run:int}/files/{name:path}", download),
    ]
    guard = Middleware(Guard, policy=policy or Policy.of("127.0.0.1"))
    app = Starlette(routes=routes, middleware=[guard], lifespan=lifespan)
    app.state.hub = hub
    return app


def serve(sources: Sequence[Source], policy: Policy, listening: socket.socket) -> None:
    """Until Ctrl-C or SIGTERM; viewers that are still connected are left after a second."""
    config = uvicorn.Config(
        make_app(sources, policy),
        log_level="critical",  # a viewer that was dropped is no error
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listening])


def page_file(name: str) -> Response:
    """One of the files of the page; there are no folders."""
    known = {entry.name: entry for entry in (resources.files("esper.dashboard") / "static").iterdir()}
    ending = "." + name.rpartition(".")[2]
    if name not in known or ending not in MEDIA_TYPES:
        return PlainTextResponse(NO_FILE, 404)
    return Response(known[name].read_bytes(), media_type=MEDIA_TYPES[ending])


def run_file(source: Source, name: str) -> Response:
    """One of the files of a run. Only what the page lists: a name is looked up, and no path is ever made of it."""
    if not any(one["name"] == name for one in files(source)):
        return PlainTextResponse(NO_FILE, 404)
    path = source.folder / name
    return FileResponse(path, media_type="application/octet-stream", filename=path.name)


def _rollout(source: Source, request: Request) -> Any:
    asked = request.query_params
    update = _number(asked.get("update"), "update") if asked.get("update") else None
    page = _number(asked.get("page", "0"), "page")
    return rollout(source, update, asked.get("arm", "train"), asked.get("sort", "env"), page)


def _episode(source: Source, request: Request) -> Any:
    asked = request.query_params
    key = (_number(asked.get("update"), "update"), asked.get("arm", "train"), _number(asked.get("env"), "env"))
    found = episode(source, key)
    if found is None:
        raise RefusedRequestError(f"update {key[0]} has no episode of environment {key[2]} in arm {key[1]!r}")
    return found


def _number(text: str | None, name: str) -> int:
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise RefusedRequestError(f"{name} must be a whole number")
    return int(text)
