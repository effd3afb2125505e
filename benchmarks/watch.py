"""How quickly large runs open in `esper watch`, and what twenty viewers cost the training.

    python benchmarks/watch.py [--updates 1000] [--envs 64] [--bulk-steps 1000000] [--viewers 20]

Two stores are made up: one of 64 environments and 1,000 updates with every decision, one of a stacked run of a million
steps. Each is served by `esper watch`, and all that the page asks for when it opens is asked for by a plain client, and
then by a browser where there is chromium. Then a real run trains, in turns of a few updates without viewers and with
them: each viewer holds the stream of news and asks for what the page asks for after every update. The server and the
viewers are processes of their own. CPU time is that of the training process alone; on a machine with few cores the
viewers themselves, which would sit elsewhere, take wall time.

Exits with 1 where a run takes longer than 2 s to open, or CPU time per update rises by more than 2 %.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx
import torch
import tyro

from esper.agent.metrics import METRICS
from esper.telemetry.recorder import StoreRecorder
from esper.telemetry.schema import RUN_TABLES
from esper.telemetry.store import STORE_NAME, RunStore
from esper.training.journal import Journal
from esper.training.loop import Trainer
from esper.training.run_folder import RunFolder
from esper.training.train_config import TrainConfig
from synthetic_rollout import synthetic_rollout

LIMIT_OPEN, LIMIT_CPU = 2.0, 0.02
STEPS = 25
ON_OPENING = ("overview", "curves", "rollout?arm=train&sort=env&page=0", "findings", "leaderboard")


@dataclass(frozen=True)
class Benchmark:
    """What is measured."""

    updates: int = 1000
    """Of the made-up run whose every decision is recorded."""
    envs: int = 64
    bulk_steps: int = 1_000_000
    """Of the made-up stacked run."""
    bulk_envs: int = 1024
    viewers: int = 20
    turns: int = 6
    """Pairs of turns without and with viewers; 0 leaves them out."""
    turn: int = 2
    """Updates of a turn."""
    task: str = "mixed/vector"

    def run(self) -> int:
        torch.set_num_threads(1)
        good = True
        with tempfile.TemporaryDirectory() as folder:
            full, bulk = Path(folder) / "full", Path(folder) / "bulk"
            self._make(full, self.envs, self.updates)
            self._make(bulk, self.bulk_envs, -(-self.bulk_steps // (self.bulk_envs * (STEPS - 4))))
            for path in (full, bulk):
                good &= opened(path) <= LIMIT_OPEN
            if self.turns:
                good &= self._with_viewers(Path(folder) / "trained") <= LIMIT_CPU
        return 0 if good else 1

    def _make(self, folder: Path, envs: int, updates: int) -> None:
        """One made-up update as the training loop records it, then copies of its rows."""
        began = time.perf_counter()
        episodes = synthetic_rollout(envs, STEPS, slots=3, seed=1)
        store = RunStore(folder / STORE_NAME)
        store.describe({"config": TrainConfig(envs=envs, updates=updates).to_json(), "engine": "made up"})
        store.begin_session(0, "0")
        recorder = StoreRecorder(store)
        summary = Journal(recorder, 1).note(episodes)
        numbers = {name: 0.5 for name in METRICS if not name.startswith("head/")} | summary.metrics()
        recorder.metrics(1, numbers | {"steps_per_second": 3000.0})
        store.close()
        _repeat(folder / STORE_NAME, updates)
        size = (folder / STORE_NAME).stat().st_size / 1e6
        steps = episodes.steps * updates
        print(
            f"made up: {updates} updates of {envs} environments, {steps:,} steps, {size:,.0f} MB "
            f"({time.perf_counter() - began:.0f} s)"
        )

    def _with_viewers(self, folder: Path) -> float:
        """The share by which CPU time per update rises."""
        config = TrainConfig(task=self.task, envs=8, updates=2 * self.turns * self.turn + 1, evaluate_every=0)
        run = RunFolder.create(folder, config)
        trainer = Trainer(config, run, StoreRecorder(RunStore(folder / STORE_NAME)))
        spent: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        try:
            trainer._one_update()
            with served(folder) as address:
                for i in range(2 * self.turns):
                    watched = i % 4 in (1, 2)  # without, with, with, without: a drift of the machine falls on both
                    with viewed(address, self.viewers if watched else 0):
                        spent[watched] += [_timed(trainer) for _ in range(self.turn)]
        finally:
            trainer.close()
        (cpu_off, wall_off), (cpu_on, wall_on) = (
            [median(c) for c in zip(*spent[on], strict=True)] for on in (False, True)
        )
        print(
            f"{self.viewers} viewers: CPU time of an update {cpu_off:.2f} s without, {cpu_on:.2f} s with them "
            f"({cpu_on / cpu_off - 1.0:+.1%}); wall time {wall_off:.2f} s, {wall_on:.2f} s "
            f"({wall_on / wall_off - 1.0:+.1%}, server and viewers on the same {os.cpu_count()} cores)"
        )
        return cpu_on / cpu_off - 1.0


def _timed(trainer: Trainer) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    trainer._one_update()
    return time.process_time() - cpu, time.perf_counter() - wall


def _repeat(path: Path, updates: int) -> None:
    """Copies of the first update's rows under the other numbers, with small differences."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA synchronous = OFF")
    for table in RUN_TABLES:
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})") if row[1] != "event"]
        shown = [{"update_number": "u.n", "value": "value * (1 + 0.001 * (u.n % 97))"}.get(c, c) for c in columns]
        connection.execute(
            "WITH RECURSIVE u(n) AS (SELECT 2 UNION ALL SELECT n + 1 FROM u WHERE n < ?) "
            f"INSERT INTO {table} ({', '.join(columns)}) SELECT {', '.join(shown)} FROM u, {table} "
            "WHERE update_number = 1",
            (updates,),
        )
    connection.commit()
    connection.close()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    words = [sys.executable, "-m", "esper", "watch", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[-1].rstrip("/")
        finally:
            server.terminate()


def opened(folder: Path) -> float:
    """Seconds until all that the page asks for is answered, and until a browser shows it."""
    with served(folder) as address:
        began, parts = time.perf_counter(), {}
        for question in ("", *(f"api/runs/0/{name}" for name in ON_OPENING)):
            at = time.perf_counter()
            with urllib.request.urlopen(f"{address}/{question}") as answer:
                size = len(answer.read())
            parts[question.rpartition("/")[2].partition("?")[0] or "page"] = (time.perf_counter() - at, size)
        took = time.perf_counter() - began
        shown = ", ".join(f"{name} {seconds:.2f} s ({size / 1e3:.0f} kB)" for name, (seconds, size) in parts.items())
        print(f"{folder.name}: all answers in {took:.2f} s: {shown}")
        return max(took, _in_browser(address))


def _in_browser(address: str) -> float:
    if shutil.which("chromium") is None:
        print("  no chromium: not opened in a browser")
        return 0.0
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  (not needed without a browser)

    with sync_playwright() as driver:
        path = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        began = time.perf_counter()
        page.goto(address)
        page.wait_for_selector("body[data-ready]")
        took = time.perf_counter() - began
        browser.close()
    print(f"  in a browser: shown after {took:.2f} s")
    return took


@contextmanager
def viewed(address: str, viewers: int) -> Iterator[None]:
    if not viewers:
        yield
        return
    words = ["nice", "-n", "19", sys.executable, __file__, "--view", address, str(viewers)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # all of them are connected
        try:
            yield
        finally:
            process.terminate()


async def view(address: str, viewers: int) -> None:
    """Twenty pages: after every piece of news, what the page asks for."""
    limits = httpx.Limits(max_connections=4 * viewers)
    async with httpx.AsyncClient(base_url=address, timeout=60.0, limits=limits) as client:
        joined = asyncio.Semaphore(0)

        async def asked(path: str) -> httpx.Response:
            try:
                return await client.get(path)
            except httpx.RemoteProtocolError:  # the server closed an idle connection at that moment, as browsers know
                return await client.get(path)

        async def one() -> None:
            async with client.stream("GET", "/api/live") as stream:
                joined.release()
                async for line in stream.aiter_lines():
                    newest = 1
                    if line.startswith("data:"):
                        for name in ON_OPENING:
                            answer = await asked(f"/api/runs/0/{name}")
                            newest = answer.json()["update"] if name.startswith("rollout") else newest
                        await asked(f"/api/runs/0/episode?update={newest}&arm=train&env=0")

        tasks = [asyncio.create_task(one()) for _ in range(viewers)]
        for _ in range(viewers):
            await joined.acquire()
        print(json.dumps({"viewers": viewers}), flush=True)
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--view"]:
        asyncio.run(view(sys.argv[2], int(sys.argv[3])))
    else:
        sys.exit(tyro.cli(Benchmark, description=__doc__).run())
