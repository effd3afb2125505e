"""Who may ask: the address that was asked for and the page that asks must be ours, and the token must be right.

The first stops other people's pages that point their own names at this machine (DNS rebinding), the second their
scripts; the token is asked for whenever others than this machine's users can connect.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Collection
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

COOKIE = "esper-token"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Policy:
    """Which hosts are ours, and which token is asked for; None asks for none."""

    hosts: frozenset[str]
    token: str | None = None

    @classmethod
    def of(cls, host: str, also: Collection[str] = ()) -> Policy:
        """For a server that listens on `host`: on loopback no token; on any other address a new one."""
        if is_loopback(host):
            return cls(_lower({*LOOPBACK, host, *also}))
        return cls(_lower({*LOOPBACK, host, *own_names(), *also}), secrets.token_urlsafe(24))

    def problem(self, headers: dict[str, str], method: str) -> tuple[int, str] | None:
        """Why a request is refused before it is looked at: the status and a sentence."""
        if method not in ("GET", "HEAD"):
            return 405, "this server only answers questions: nothing can be changed here"
        host = headers.get("host", "")
        if host_name(host) not in self.hosts:
            return 421, "this address is not one of this server's: name it with --allow-host if it should be"
        origin = headers.get("origin")
        if origin is not None and _place(origin) != host:
            return 403, "a page of another site may not ask here"
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return 403, "a page of another site may not ask here"
        return None

    def admits(self, headers: dict[str, str], query: str) -> bool:
        """Whether the request has the token: in its cookie, its Authorization header or, once, its address."""
        if self.token is None:
            return True
        given = [headers.get("authorization", "").removeprefix("Bearer "), _cookie(headers.get("cookie", ""))]
        given += parse_qs(query).get("token", [])
        return any(hmac.compare_digest(one.encode(), self.token.encode()) for one in given)


def _lower(names: Collection[str]) -> frozenset[str]:
    """As browsers send them."""
    return frozenset(name.lower() for name in names)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_names() -> set[str]:
    """Names and addresses of this machine, for a server that listens on all of them."""
    names = {socket.gethostname().lower(), socket.getfqdn().lower()}
    try:
        found = socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        found = []
    return names | {str(entry[4][0]) for entry in found}


def host_name(header: str) -> str:
    """Without the port; an IPv6 address without its brackets."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return ""


def _place(origin: str) -> str | None:
    """Host and port of a page's origin; None where it has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _cookie(header: str) -> str:
    try:
        morsel = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


class Guard:
    """ASGI middleware: refuses, or adds the headers that every answer has."""

    def __init__(self, app: Any, policy: Policy) -> None:
        self.app, self.policy = app, policy

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        query = scope["query_string"].decode("latin-1")
        problem = self.policy.problem(headers, scope["method"])
        if problem is None and not self.policy.admits(headers, query):
            problem = 401, "this server asks for a token: open the address that `esper watch` printed"
        if problem is not None:
            await _answer(send, problem[0], problem[1].encode(), [])
        elif self.policy.token is not None and "token=" in query:
            # The token leaves the address bar: it would be seen over a shoulder, and kept in the history.
            kept = f"{COOKIE}={self.policy.token}; HttpOnly; SameSite=Strict; Path=/"
            await _answer(send, 303, b"", [(b"location", b"/"), (b"set-cookie", kept.encode())])
        else:
            await self.app(scope, receive, _with_headers(send))


def _with_headers(send: Any) -> Any:
    async def sending(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *_standard()]}
        await send(message)

    return sending


def _standard() -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in HEADERS.items()]


async def _answer(send: Any, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    plain = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *plain, *_standard()]})
    await send({"type": "http.response.body", "body": body})
