"""The server: who may ask, what is answered, that nothing outside the run is, and that a stalled viewer is dropped."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import make_comparison, make_run

pytest.importorskip("starlette", reason="the page needs esper[web]")
pytest.importorskip("httpx", reason="starlette's client for tests needs httpx")
from starlette.testclient import TestClient

from esper.dashboard import server
from esper.dashboard.guard import Policy, host_name, is_loopback
from esper.dashboard.live import WAITING, EventStream, Hub
from esper.dashboard.server import make_app
from esper.dashboard.source import Source

HOME = "http://127.0.0.1:8470"
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "first", task=HOSTILE)
    (folder / "best.safetensors").write_bytes(b"weights")
    (folder.parent / "secret.json").write_text("{}")
    (folder / "out.json").symlink_to(folder.parent / "secret.json")
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> TestClient:
    return TestClient(make_app([Source.of(folder)]), base_url=HOME)


def test_the_page_and_all_its_files(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    for name in ("page.css", "main.js", "dom.js", "chart.js", "network.js", "decisions.js", "panels.js", "icon.svg"):
        answer = client.get(f"/static/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"].split(";")[0] in server.MEDIA_TYPES.values()
    assert "http://" not in page.text.replace("http://www.w3.org", "")  # nothing from elsewhere
    assert "https://" not in page.text


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/runs/0/overview", "/static/page.css", "/nowhere"])
def test_every_answer_is_guarded(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cache-control"] == "no-store"


def test_all_answers(client: TestClient) -> None:
    assert client.get("/api/runs").json() == [{"id": 0, "name": "first"}]
    assert client.get("/api/runs/0/overview").json()["task"] == HOSTILE
    assert client.get("/api/runs/0/curves").json()["updates"][-1] == 12
    assert client.get("/api/runs/0/rollout?update=3").json()["update"] == 3
    assert client.get("/api/runs/0/episode?update=3&env=1").json()["epochs"] == 6
    assert client.get("/api/runs/0/findings").json()["events"] == []
    assert client.get("/api/runs/0/leaderboard").json()["best"][0]["score"] == 73.0


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/1/overview",
        "/api/runs/-1/overview",
        "/api/runs/0/episode?update=1",
        "/api/runs/0/episode?update=x&env=0",
        "/api/runs/0/episode?update=1&env=99",
        "/api/runs/0/episode?update=1&env=0&arm=%27%20OR%201=1",
        f"/api/runs/0/rollout?update={'9' * 400}",
        "/api/runs/0/rollout?page=-1",
        "/static/../server.py",
        "/static/%2e%2e%2fserver.py",
        "/static/server.py",
    ],
)
def test_questions_that_make_no_sense(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "Traceback" not in answer.text


def test_nothing_can_be_changed(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, "/api/runs").status_code == 405


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("best.safetensors", 200),
        ("run.sqlite", 404),
        ("out.json", 404),  # a link that leads out
        ("../secret.json", 404),
        ("%2e%2e/secret.json", 404),
        ("..%2fsecret.json", 404),
        ("checkpoints/..%2f..%2fsecret.json", 404),
        ("/etc/passwd", 404),
        ("%2fetc%2fpasswd", 404),
        ("nothing.json", 404),
        ("a%00b.json", 404),
    ],
)
def test_downloads_stay_in_the_folder(client: TestClient, name: str, status: int) -> None:
    answer = client.get(f"/api/runs/0/files/{name}")
    assert answer.status_code == status
    if status == 200:
        assert answer.content == b"weights"
        assert answer.headers["content-disposition"].startswith("attachment")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8470"}, 200),
        ({"host": "evil.example"}, 421),  # somebody's name that leads to 127.0.0.1
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": ""}, 421),
        ({"host": "[::1"}, 421),
        ({"origin": HOME}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),  # another server of this machine
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),  # a link in a mail
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
    ],
)
def test_who_may_ask(client: TestClient, headers: dict[str, str], status: int) -> None:
    assert client.get("/api/runs", headers=headers).status_code == status


def test_another_host_demands_a_token(folder: Path) -> None:
    policy = Policy.of("0.0.0.0", ["proxy.example"])
    assert policy.token is not None
    assert len(policy.token) >= 24
    assert Policy.of("127.0.0.1").token is None
    assert Policy.of("0.0.0.0").token != policy.token
    client = TestClient(make_app([Source.of(folder)], policy), base_url="http://proxy.example", follow_redirects=False)
    for path in ("/", "/api/runs", "/api/live", "/static/main.js"):
        answer = client.get(path)
        assert answer.status_code == 401
        assert policy.token not in answer.text
    assert client.get("/?token=wrong").status_code == 401
    assert client.get("/api/runs", headers={"authorization": f"Bearer {policy.token}"}).status_code == 200
    assert client.get("/api/runs", headers={"cookie": "esper-token=wrong"}).status_code == 401
    entered = client.get(f"/?token={policy.token}")
    assert entered.status_code == 303
    assert entered.headers["location"] == "/"  # the token leaves the address bar
    assert "HttpOnly" in entered.headers["set-cookie"]
    assert "SameSite=Strict" in entered.headers["set-cookie"]
    assert client.get("/api/runs").status_code == 200  # by the cookie
    assert client.get("/api/runs", headers={"host": "evil.example"}).status_code == 421


def test_names_of_hosts() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.evil.example"))
    assert host_name("[::1]:8470") == "::1"
    assert host_name("Example.ORG:80") == "example.org"


def test_the_same_question_is_asked_once_until_the_store_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    monkeypatch.setattr(server, "curves", lambda source: asked.append(1) or {"n": len(asked)})
    run = make_run(tmp_path / "r", updates=2)
    client = TestClient(make_app([Source.of(run)]), base_url=HOME)
    answers = [client.get("/api/runs/0/curves").json() for _ in range(20)]
    assert answers == [{"n": 1}] * 20
    make_run(run, updates=0)  # another process writes
    assert client.get("/api/runs/0/curves").json() == {"n": 2}
    make_comparison(run / "comparison")  # as `esper train` does after its last update
    assert client.get("/api/runs/0/curves").json() == {"n": 3}
    assert client.get("/api/runs/0/curves").json() == {"n": 3}


def test_a_store_that_goes_away_is_an_answer_not_a_crash(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", updates=2)
    client = TestClient(make_app([Source.of(run)]), base_url=HOME, raise_server_exceptions=False)
    (run / "run.sqlite").write_bytes(b"not a store any more" * 100)
    answer = client.get("/api/runs/0/overview")
    assert answer.status_code == 503
    assert "cannot be read" in answer.text


# -- news --------------------------------------------------------------------------------------------------------------


class Stamped:
    """Stands in for a source."""

    def __init__(self) -> None:
        self.at = 0

    def stamp(self) -> tuple[int, ...]:
        return (self.at,)


def test_a_change_is_news_and_a_viewer_that_does_not_read_is_dropped() -> None:
    async def scene() -> None:
        source = Stamped()
        hub = Hub([source], every=0.005)  # type: ignore[list-item]
        reads, stalls = hub.join(), hub.join()
        task = asyncio.create_task(hub.watch())
        await asyncio.sleep(0)  # it has had its first look
        for change in range(1, WAITING + 3):
            source.at = change
            assert json.loads(await asyncio.wait_for(reads.get(), 2.0) or "") == {"run": 0}
        task.cancel()
        assert hub.viewers == {reads}
        assert hub.dropped == 1
        assert stalls.get_nowait() is None  # it ends, and keeps nothing
        assert stalls.empty()

    asyncio.run(scene())


def test_a_connection_that_accepts_nothing_is_closed() -> None:
    async def scene() -> None:
        hub = Hub([])
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            if b"data:" in message.get("body", b""):
                await asyncio.sleep(60)
            sent.append(message)

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        stream = asyncio.create_task(EventStream(hub, stalled=0.05)({}, receive, send))
        while not hub.viewers:
            await asyncio.sleep(0.001)
        hub.publish({"run": 0})
        await asyncio.wait_for(stream, 2.0)
        assert not hub.viewers
        assert hub.dropped == 1
        assert sent[0]["status"] == 200

    asyncio.run(scene())


def test_a_viewer_that_leaves_is_forgotten() -> None:
    async def scene() -> None:
        hub = Hub([])

        async def send(message: dict[str, Any]) -> None: ...

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.02)
            return {"type": "http.disconnect"}

        await asyncio.wait_for(EventStream(hub)({}, receive, send), 2.0)
        assert not hub.viewers
        assert hub.dropped == 0

    asyncio.run(scene())


def test_an_origin_that_cannot_be_read_is_refused_and_names_have_no_case(client: TestClient) -> None:
    assert client.get("/api/runs", headers={"origin": "http://[::1"}).status_code == 403
    assert Policy.of("127.0.0.1", ["Proxy.Example"]).problem({"host": "proxy.example:80"}, "GET") is None
