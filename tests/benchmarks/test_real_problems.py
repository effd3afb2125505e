"""The table of real problems: what depends on what, going on after a stop, refusals, FLOPs, and the page."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import real_problems
from esper.growth.tensors import count_parameters
from real_arms import Job, Training, built, run_job
from real_data import PROBLEMS, Sources
from real_page import ARMS, measured, over_problems, render, share_of_large
from real_problems import best_rate, check, main, measure, protocol, readable, stored

NOWHERE = Sources()
SEED = [["0", "mlp_small", "linear"]]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROBLEMS, "tiny", replace(PROBLEMS["wine"], epochs=8, updates_per_epoch=2))


def pretended(job: Job) -> dict[str, Any]:
    """The rate 0.003 is best; every run costs 100 FLOPs."""
    found = {"test": 90.0, "val": 80.0 - abs(job.rate - 0.003), "parameters": 10, "flops": 100, "seconds": 0.1}
    return found | {"network": SEED, "seeds": [["0", "mlp_small", "FOSSILIZED", 2, 6]]}


def test_every_arm_is_measured_once_and_after_a_stop_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done: list[Job] = []

    def run(job: Job) -> dict[str, Any]:
        if len(done) == 25:
            done.append(job)
            raise KeyboardInterrupt
        done.append(job)
        return pretended(job)

    monkeypatch.setattr(real_problems, "run_job", run)
    path = tmp_path / "kept.json"
    with pytest.raises(KeyboardInterrupt):
        measure("tiny", path, NOWHERE)
    measure("tiny", path, NOWHERE)
    assert len(done) == 1 + 8 * 3 * 2 + 12 * 5  # 8 arms are tuned, and 12 measured; the one that was stopped came twice
    assert set(stored(path)["problems"]["tiny"]["runs"]) == {*ARMS, "late"}
    runs = {(job.arm, job.seed): job for job in done if job.seed in real_problems.SEEDS}
    assert runs["optuna 10", 1].flops == 1000
    assert runs["scratch flops", 1].flops == 100
    assert runs["scratch", 2].network == SEED
    assert runs["none", 2].network == []
    assert runs["late", 2].births == [2]
    assert {job.rate for job in runs.values()} == {0.003}
    measure("tiny", path, NOWHERE)
    assert len(done) == 109


def test_of_equal_rates_the_lowest_is_taken() -> None:
    means = zip((0.001, 0.003, 0.01), (1, 2, 2), strict=True)  # of the two seeds, each of which prefers another rate
    tried = {f"{rate:g}": {"100": {"val": value - rate}, "101": {"val": value + rate}} for rate, value in means}
    assert best_rate({"tuning": {"scratch": tried}}, "optuna 1") == 0.003


def test_refusals_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"no problem is called 'windows'"):
        check(("windows",), {"protocol": protocol()})
    monkeypatch.setattr(real_problems, "find_spec", lambda name: object())
    with pytest.raises(SystemExit, match=r"another protocol .* remove real_problems.json"):
        check((), {"protocol": {**protocol(), "seeds": [7]}})
    monkeypatch.setattr(real_problems, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"Optuna is not installed: pip install -e \"\.\[peers\]\""):
        check((), {"protocol": protocol()})
    for name, cure in (("cifar10", "--data-dir"), ("gpt", "--text-file"), ("distilbert", "--text-file")):
        assert not readable(name, PROBLEMS[name], Sources(str(tmp_path), ""))
        said = capsys.readouterr().out
        assert said.startswith(f"real_problems: {name} is left out: ")
        assert cure in said
        assert said.count("\n") == 1


def test_hosts_are_widened_by_their_parameters_and_begin_alike() -> None:
    for name in ("digits", "cifar10", "gpt"):
        problem = PROBLEMS[name]
        sizes = [count_parameters(problem.host(0, ratio)) for ratio in (1.0, 2.0, 4.0)]
        assert [size / sizes[0] for size in sizes] == pytest.approx([1.0, 2.0, 4.0], rel=0.06)
        assert all(map(torch.equal, problem.host(3).parameters(), problem.host(3).parameters()))


def test_growth_is_trained_and_the_final_network_from_scratch() -> None:
    grown = run_job(Job("tiny", "schedule", 0, 0.01, NOWHERE))
    problem = PROBLEMS["tiny"]
    data = problem.read(0, NOWHERE)
    scratch = run_job(Job("tiny", "scratch", 0, 0.01, NOWHERE, SEED, flops=10_000_000))
    assert scratch["flops"] == pytest.approx(10_000_000, rel=0.05)
    assert scratch["parameters"] == count_parameters(built(problem, data, SEED, 0)) > count_parameters(problem.host(0))
    late = run_job(Job("tiny", "late", 0, 0.01, NOWHERE, SEED, births=[4]))
    assert late["parameters"] == scratch["parameters"]
    plain = run_job(Job("tiny", "none", 0, 0.01, NOWHERE))
    assert plain["updates"] == 16
    always = run_job(Job("tiny", "scratch", 0, 0.01, NOWHERE, SEED))
    assert late["flops"] == (plain["flops"] + always["flops"]) // 2  # the seed is there in 4 of 8 epochs
    assert grown["flops"] > 1.5 * plain["flops"]  # two seeds incubate
    assert grown["seeds"][0][:2] == ["0", "mlp"]


def test_flops_of_growth_without_a_seed_are_updates_and_passes_over_the_validation_examples() -> None:
    problem = PROBLEMS["tiny"]
    data, job = problem.read(0, NOWHERE), Job("tiny", "heuristic", 0, 0.01, NOWHERE)
    training = Training(problem, data, problem.host(0), job)
    found = run_job(job)
    assert not found["seeds"]
    assert found["update_flops"] == 16 * training.update_flops
    assert found["validation_flops"] == 8 * training.validation_flops
    rest = found["flops"] - found["update_flops"] - found["validation_flops"]
    assert training.validation_flops < rest < 8 * training.validation_flops  # before the run, and after it
    # By hand: 13 → 8 → 8 → 3, two FLOPs a weight; backward twice that, but for the inputs of the first layer.
    forward = 2 * (13 * 8 + 8 * 8 + 8 * 3)
    assert training.update_flops == 32 * (3 * forward - 2 * 13 * 8)
    assert training.validation_flops == 36 * forward


def test_a_search_spends_its_flops_and_gives_its_best_network() -> None:
    pytest.importorskip("optuna")
    found = run_job(Job("tiny", "optuna 1", 0, 0.01, NOWHERE, flops=5_000_000))
    assert 5_000_000 <= found["flops"] < 6_500_000
    assert found["trials"] >= 2
    assert found["parameters"] >= count_parameters(PROBLEMS["tiny"].host(0))


# -- the page ----------------------------------------------------------------------------------------------------------


def kept(ahead: float) -> dict[str, Any]:
    """Each rival has 50 points and 400 FLOPs, `small` that many more points and 100 FLOPs."""

    def run(arm: str) -> dict[str, Any]:
        own = {"test": 50.0 + ahead, "flops": 100} if arm == "small" else {"test": 50.0, "flops": 400}
        own |= {"update_flops": 40, "validation_flops": 35}
        return {**own, "val": 0.0, "parameters": 20, "seconds": 1.0, "rate": 0.003, "seeds": [], "network": []}

    return {"runs": {arm: {str(seed): run(arm) for seed in range(5)} for arm in ARMS}}


def test_the_page_has_leads_means_and_shares_of_flops() -> None:
    problems = {"digits": kept(2.0), "wine": kept(-1.0), "diabetes": {"runs": {"none": {}}}}
    store = {"protocol": protocol(), "problems": problems}
    assert list(measured(store)) == ["digits", "wine"]
    assert over_problems(list(measured(store).values()), "none").value == pytest.approx(0.5)
    assert share_of_large(problems["digits"]["runs"]) == 0.25
    text = render(store)
    assert "| digits | +2.0 (+2.0 to +2.0) | yes | 25 % |" in text
    assert "| wine | −1.0 (−1.0 to −1.0) | no | 25 % |" in text
    assert "| ungrown | 50.0 (50.0 to 50.0) | +2.0 (+2.0 to +2.0) | 20 |" in text
    assert "1 of 2 | ×4.00 |" in text
    assert "| digits | 40 % | 35 % | 25 % | ×0.25 |" in text
    assert "these are not measured, or not with all arms: breast cancer, diabetes, " in text
    assert "### diabetes" not in text


def test_the_page_in_docs_is_of_the_figures_that_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(PROBLEMS, "tiny")
    page = real_problems.PAGE
    monkeypatch.setattr(real_problems, "PAGE", tmp_path / page.name)
    assert main("render") == 0
    assert (tmp_path / page.name).read_text("utf-8") == page.read_text("utf-8")
