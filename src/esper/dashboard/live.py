"""News for viewers: one task looks at the files, and every viewer has a short queue. Who does not read is dropped.

News only says which run changed; what changed is asked for, and answered from the cache of the server. So a viewer
costs a few bytes of memory, whatever happens in the run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from esper.dashboard.source import Source

LOOK_EVERY = 0.5
"""Seconds between two looks at the files, for all viewers together."""
WAITING = 8
"""Pieces of news that may wait for a viewer."""
STALLED = 10.0
"""Seconds that a viewer may take to accept one."""
HEARTBEAT = 15.0
"""Seconds after which a comment is sent, so that a connection that died is noticed."""
VIEWERS = 64
"""At a time; more are refused."""


class Hub:
    """Passes news on to viewers."""

    def __init__(self, sources: Sequence[Source], every: float = LOOK_EVERY) -> None:
        self.sources, self.every = sources, every
        self.viewers: set[asyncio.Queue[str | None]] = set()
        self.dropped = 0

    def join(self) -> asyncio.Queue[str | None]:
        queue: asyncio.Queue[str | None] = asyncio.Queue(WAITING)
        self.viewers.add(queue)
        return queue

    def leave(self, queue: asyncio.Queue[str | None]) -> None:
        self.viewers.discard(queue)

    def publish(self, news: dict[str, Any]) -> None:
        """To every viewer; one whose queue is full gets nothing more."""
        text = json.dumps(news)
        for queue in list(self.viewers):
            try:
                queue.put_nowait(text)
            except asyncio.QueueFull:
                self.leave(queue)
                self.dropped += 1
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)  # the end, for a viewer that wakes up again

    async def watch(self) -> None:
        """Look at the files until cancelled."""
        seen = [source.stamp() for source in self.sources]
        while True:
            await asyncio.sleep(self.every)
            if not self.viewers:
                continue
            for i, source in enumerate(self.sources):
                stamp = source.stamp()
                if stamp != seen[i]:
                    seen[i] = stamp
                    self.publish({"run": i})


class EventStream:
    """Server-sent events as an ASGI application: ends when the viewer leaves, stalls, or falls behind."""

    def __init__(self, hub: Hub, stalled: float = STALLED) -> None:
        self.hub, self.stalled = hub, stalled

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        queue = self.hub.join()
        gone = asyncio.create_task(self._gone(receive))
        try:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send(send, ": esper\nretry: 2000\n\n")
            while (said := await self._next(queue, gone)) is not None:
                await self._send(send, said)
            with suppress(TimeoutError):
                await self._send(send, "", last=True)
        except TimeoutError:
            self.hub.dropped += 1  # and the connection is closed by returning
        finally:
            self.hub.leave(queue)
            gone.cancel()

    async def _next(self, queue: asyncio.Queue[str | None], gone: asyncio.Task[None]) -> str | None:
        """News, or a heartbeat; None at the end."""
        getting = asyncio.create_task(queue.get())
        done, _ = await asyncio.wait({getting, gone}, timeout=HEARTBEAT, return_when=asyncio.FIRST_COMPLETED)
        if getting in done:
            news = getting.result()
            return None if news is None else f"data: {news}\n\n"
        getting.cancel()
        return None if gone in done else ": still here\n\n"

    async def _send(self, send: Any, text: str, last: bool = False) -> None:
        body = {"type": "http.response.body", "body": text.encode(), "more_body": not last}
        await asyncio.wait_for(send(body), self.stalled)

    async def _gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
