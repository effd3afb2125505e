"""The page in a real browser: Debian's chromium, driven by playwright. Skipped, with the reason, without one."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up_runs import add_update, make_bulk_run, make_comparison, make_run

from esper.cli.watch import listen
from esper.dashboard.guard import Policy
from esper.dashboard.source import Source
from esper.telemetry.recorder import StoreRecorder
from esper.telemetry.records import Event
from esper.telemetry.store import STORE_NAME, RunStore

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the page needs esper[web]")
server = pytest.importorskip("esper.dashboard.server", reason="the page needs esper[web]")

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium")

HOSTILE = "<script>window.hacked=1<script><img src=x onerror=window.hacked=1>"
AXE = Path(__file__).parent / "vendor" / "axe.min.js"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A finished run with baselines, another one, a large one, and one whose every name is hostile."""
    place = tmp_path_factory.mktemp("runs")
    first = make_run(place / "first")
    make_comparison(first / "comparison")
    with RunStore(first / STORE_NAME) as store:
        StoreRecorder(store).event(Event("anomaly", 12, HOSTILE, "warning", data={"name": "kl_spike"}))
    hostile = make_run(place / HOSTILE.replace("/", "_"), updates=2, task=HOSTILE)
    return [first, make_run(place / "second", updates=6), make_bulk_run(place / "bulk"), hostile]


class Served:
    """A server in a thread of this process."""

    def __init__(self, folders: list[Path]) -> None:
        app = server.make_app([Source.of(folder) for folder in folders], Policy.of("127.0.0.1"))
        app.state.hub.every = 0.05
        self.socket = listen("127.0.0.1", None)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}/"
        self.thread.start()

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture(scope="module")
def served(runs: list[Path]) -> Iterator[Served]:
    server = Served(runs)
    yield server
    server.close()


class Page:
    """A page that has been drawn, and whatever it complained about."""

    def __init__(self, browser: Any, address: str, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(address)
        self.page.wait_for_selector("body[data-ready]")

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def words(self, selector: str) -> str:
        """Of a drawing."""
        return " ".join(self.page.locator(f"{selector} text").all_text_contents())


@pytest.fixture
def opened(browser: Any, served: Served) -> Iterator[Page]:
    page = Page(browser, served.address)
    yield page
    assert page.complaints == []
    page.context.close()


def test_a_finished_run_answers_the_first_questions(opened: Page) -> None:
    assert "finished · update 12 of 12" in opened.text("#state")
    assert "72.0" in opened.text("#facts")
    assert "69.0" in opened.text("#facts")
    lights = opened.page.locator("#lights li")
    assert lights.count() == 5
    assert "63.0 at first, 70.0 now" in lights.nth(0).inner_text()
    assert lights.nth(1).get_attribute("data-state") == "warning"  # the alarm below
    assert "learned 71.5" in opened.words("#c-learning svg.plot")
    assert "kl spike" in opened.text("#events")
    assert "learning rate" in opened.text("#events")  # what to do
    assert "norm at stages.0" in opened.text("#best")
    for chart in (
        "c-reward",
        "c-entropy",
        "c-kl",
        "c-variance",
        "c-clip",
        "c-gradients",
        "c-seeds",
        "c-size",
        "c-speed",
    ):
        assert opened.page.locator(f"#{chart} path").count() or "not measured" in opened.text(f"#{chart}"), chart


def test_choosing_an_environment_and_a_decision_shows_why(opened: Page) -> None:
    opened.page.click("#tile-1")
    opened.page.wait_for_selector("#tile-1[aria-selected=true]")
    sync_api.expect(opened.page.locator("#episode-title")).to_contain_text("environment 1,")
    opened.page.click("#decisions tr[data-epoch='0']")
    why = opened.text("#why")
    assert "the critic expected 7.5" in why
    assert "germinate\n75 %" in why
    assert "illegal: no unfinished seed to remove (dormant) at stages.0, stages.1" in why
    assert "stages.1\n40 %" in why
    opened.page.click("#decisions tr[data-epoch='4']")
    drawn = opened.words("#drawing svg")
    assert "kept" in drawn
    assert "contribution +3.5 ± 0.5, epoch 4" in drawn  # measured last, and when
    assert "shadow not measured" in drawn
    assert "empty" in drawn


def test_the_keyboard_is_enough(opened: Page) -> None:
    page = opened.page
    page.focus("#tiles")
    page.keyboard.press("Home")
    page.wait_for_selector("#tile-0[aria-selected=true]")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#tile-2[aria-selected=true]")
    assert page.get_attribute("#tiles", "aria-activedescendant") == "tile-2"
    sync_api.expect(page.locator("#episode-title")).to_contain_text("environment 2,")
    page.focus("#decisions")
    page.keyboard.press("ArrowUp")
    sync_api.expect(page.locator("#why-title")).to_have_text("Why, epoch 4")
    page.keyboard.press("[")
    sync_api.expect(page.locator("#at-update")).to_have_text("update 11")
    assert not page.is_checked("#follow")
    page.keyboard.press("f")
    sync_api.expect(page.locator("#at-update")).to_have_text("update 12")
    page.keyboard.press("4")
    assert page.evaluate("document.activeElement.hash") == "#policy"
    page.focus("#c-entropy")
    page.keyboard.press("Home")
    assert opened.text("#c-entropy .key").endswith("at\n1")
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#keys").is_visible()


def test_light_and_dark(opened: Page) -> None:
    page = opened.page
    colour = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(colour) == "rgb(246, 247, 248)"
    page.keyboard.press("t")  # light
    page.keyboard.press("t")  # dark
    assert page.evaluate(colour) == "rgb(15, 20, 24)"
    page.reload()
    page.wait_for_selector("body[data-ready]")
    assert page.evaluate(colour) == "rgb(15, 20, 24)"  # remembered


def test_two_runs_side_by_side_and_thousands_of_environments(opened: Page) -> None:
    page = opened.page
    table = opened.text("#compared table")
    assert "second" in table
    assert "score, last update\t72.0\t66.0" in table
    page.select_option("#runs", label="bulk")
    page.wait_for_selector("#aggregates:not([hidden])")
    assert "Scores of all 600 episodes" in opened.text("#aggregates")
    assert page.locator("#tiles .tile").count() == 1
    page.click("#rows th button:has-text('score')")
    sync_api.expect(page.locator("#rows tbody td").first).to_have_text("599")
    page.click("#rows tbody tr >> nth=0")
    sync_api.expect(page.locator("#episode-title")).to_contain_text("environment 599")
    assert "not recorded" in opened.text("#decisions")
    assert "not measured" in opened.text("#facts")


def test_an_answer_that_comes_late_does_not_replace_what_was_chosen_since(opened: Page) -> None:
    page, held = opened.page, []
    page.route("**/episode?*env=1", lambda route: held.append(route) if not held else route.continue_())
    page.click("#tile-1")
    page.wait_for_selector("#tile-1[aria-selected=true]")
    page.click("#tile-2")
    title = page.locator("#episode-title")
    sync_api.expect(title).to_contain_text("environment 2,", timeout=30_000)
    with page.expect_response("**/episode?*env=1"):
        held[0].continue_()
    page.evaluate("new Promise((done) => setTimeout(done, 100))")  # the page has read it
    assert "environment 2," in opened.text("#episode-title")


def test_hostile_names_are_text(browser: Any, served: Served, opened: Page) -> None:
    page = opened.page
    assert page.locator("#events img").count() == 0
    page.select_option("#runs", index=3)
    sync_api.expect(page.locator("#run-task")).to_contain_text("<script>")
    assert page.evaluate("window.hacked") is None
    assert page.locator("main script, main img").count() == 0


def test_a_narrow_screen_scrolls_in_one_direction_only(browser: Any, served: Served) -> None:
    page = Page(browser, served.address, width=390)
    assert page.page.evaluate("document.documentElement.scrollWidth") == 390
    wide = """[...document.querySelectorAll('main *')].filter((node) => !node.closest('.scroll, .drawing, svg')
        && node.getBoundingClientRect().right > 391).map((node) => node.className || node.tagName)"""
    assert page.page.evaluate(wide) == []
    assert page.complaints == []
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility_by_the_rules_of_axe(browser: Any, served: Served, scheme: str) -> None:
    page = Page(browser, served.address, scheme=scheme)
    page.page.evaluate(AXE.read_text("utf-8"))
    found = page.page.evaluate(
        "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']}).then((r) => "
        "r.violations.map((v) => v.id + ': ' + v.nodes.slice(0, 3).map((n) => n.target.join(' ')).join(', ')))"
    )
    assert found == []
    page.context.close()


def test_an_update_of_a_live_run_arrives_and_nothing_jumps(browser: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "live", updates=3, total=10)
    server = Served([folder])
    store = RunStore(folder / STORE_NAME)
    try:
        page = Page(browser, server.address)
        assert "running · update 3 of 10" in page.text("#state")
        places = """['facts', 'lights', 'c-learning', 'tiles', 'drawing', 'decisions', 'c-reward'].map((id) => {
            const box = document.getElementById(id).getBoundingClientRect(); return [id, box.top, box.height]; })"""
        before = page.page.evaluate(places)
        page.page.focus("#tiles")
        add_update(StoreRecorder(store), 4)
        page.page.wait_for_selector("body[data-ready='4']")
        assert "update 4 of 10" in page.text("#state")
        assert "64.0" in page.text("#facts")
        assert page.text("#at-update") == "update 4"
        assert page.page.evaluate(places) == before
        assert page.page.evaluate("document.activeElement.id") == "tiles"
        page.page.uncheck("#follow")
        add_update(StoreRecorder(store), 5)
        page.page.wait_for_selector("body[data-ready='5']")
        assert page.text("#at-update") == "update 4"  # who looks at something keeps it
        assert page.complaints == []
        page.context.close()
    finally:
        store.close()
        server.close()
