"""Serving the page until Ctrl-C, by uvicorn."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import uvicorn

from esper.dashboard.guard import Policy
from esper.dashboard.server import make_app
from esper.dashboard.source import Source


def serve(sources: Sequence[Source], policy: Policy, listening: socket.socket) -> None:
    """Returns after Ctrl-C or SIGTERM; viewers that are still connected are left after a second."""
    config = uvicorn.Config(
        make_app(sources, policy),
        log_level="critical",  # a viewer that was dropped is no error
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listening])
