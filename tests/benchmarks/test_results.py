"""The page of results: its figures worked out by hand, its claims decided by the numbers, its text from any parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import made_up_results as made_up
import numpy as np
import pytest

from esper.agent.shipped import shipped_path
from esper.tasks.family import get_family

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from esper.training.statistics import Estimate
from results.claims import claims
from results.cost import break_even, expected_best, search
from results.estimates import difference, harm, improvement, share_kept, shortfall
from results.families import Reseeded, transfer_families
from results.markdown import in_points, plain, share_with_interval, signed
from results.measure import SCRATCH, measure_harm, measure_mixed, read, sha256_of, write
from results.page import render, repeatable
from results.run import folder_of

NOTHING = dict.fromkeys(("mixed", "harm", "transfer", "cifar"))


# -- estimates ---------------------------------------------------------------------------------------------------------


def test_harm_is_the_mean_over_seeds_per_draw() -> None:
    found = harm(made_up.harm())
    assert found == pytest.approx({0: 10.0, 1: 0.0, 2: -0.4, 3: -2.0})
    assert list(found) == [3, 2, 1, 0]  # the worst first


def test_share_kept_is_the_gain_elsewhere_over_the_gain_at_home() -> None:
    home = np.array([8.0, 12.0, 10.0, 10.0])
    kept = share_kept([np.array([4.0, 6.0]), np.array([1.0, 1.0])], home)  # means 5 and 1 → 3 of 10
    assert kept is not None
    assert kept.value == pytest.approx(0.3)
    assert kept.low is not None
    assert kept.low <= 0.3 <= (kept.high or 0.0)
    nothing = share_kept([np.zeros(8)], np.array([-9.0, 10.0] * 4))  # resampled, the gain at home is often negative
    assert nothing is not None
    assert (nothing.value, nothing.low, nothing.high) == (0.0, 0.0, 0.0)
    assert share_kept([home], np.array([-1.0, 1.0])) is None  # no gain at home: nothing to keep
    assert share_kept([], home) is None


def test_differences_to_the_learned_controller_are_paired() -> None:
    content = made_up.mixed()
    found = difference(content, "heuristic")
    assert found.value == pytest.approx(10.0, abs=1.0)
    assert found.low is not None
    assert found.low > 8.0
    assert improvement(content, "heuristic").value > 0.9


def test_shortfall_does_not_make_up_for_one_problem_by_another() -> None:
    content = {"episodes": {"learned": {"number": [0, 1, 2], "regret": [-60.0, 3.0, None]}}}
    assert shortfall(content, "learned").value == pytest.approx(1.5)  # (0 + 3) / 2; the third is not known


def test_expected_best_of_random_trials() -> None:
    # Options by validation: the best has test 1, the next 5, the worst 3.
    # one trial: the mean 3; two of three: the best is in with ⅔, else the next: ⅔·1 + ⅓·5; three: 1
    found = expected_best(np.array([9.0, 7.0, 2.0]), np.array([1.0, 5.0, 3.0]))
    assert found.tolist() == pytest.approx([3.0, 2.0 / 3.0 + 5.0 / 3.0, 1.0])


def test_search_counts_the_trials_that_a_gain_takes() -> None:
    found = search(made_up.need_and_place()["mixed"])
    # The single schedule is a@0, 75 on average. One trial: (50 + 90 + 60) / 3 and (50 + 60 + 88) / 3, minus 75 → −8.67
    # All three: 90 and 88, minus 75 → +14
    assert found.gains[0] == pytest.approx((200 / 3 + 198 / 3) / 2 - 75)
    assert found.gains[-1] == pytest.approx(14.0)
    assert found.trials_for(14.0) == 3
    assert found.trials_for(15.0) is None


def test_break_even_divides_the_training_by_what_a_problem_saves(tmp_path: Path) -> None:
    (tmp_path / "n.json").write_text(json.dumps(made_up.need_and_place()))
    text = "\n".join(break_even(1000.0, made_up.mixed(), tmp_path / "n.json"))
    # A gain of about 15 is out of reach for 3 schedules: 2 saved trials of 20 epochs → 1000 / 40
    assert "Break-even: 25 problems" in text
    assert "cannot be told" in "\n".join(break_even(None, made_up.mixed(), tmp_path / "n.json"))


# -- claims ------------------------------------------------------------------------------------------------------------


def test_claims_follow_the_numbers() -> None:
    parts = {**NOTHING, "mixed": made_up.mixed(), "harm": made_up.harm(), "transfer": made_up.transfer()}
    found = {claim.text: claim.holds for claim in claims(parts)}
    assert found["A better score than *heuristic* on `mixed`"] is True
    assert found["A better score than *random* on `mixed`"] is True
    assert [holds for text, holds in found.items() if text.startswith("Harmless")] == [False]  # one draw in four
    # gains of 2 and 10 points away, of 15 at home: 40 % is less than 70 %
    assert [holds for text, holds in found.items() if text.startswith("Keeps")] == [False]
    assert found["What `run.py cifar` measures"] is None


def test_a_controller_that_is_no_better_is_not_said_to_be() -> None:
    parts = {**NOTHING, "mixed": made_up.mixed(better_by=-12.0)}
    found = {claim.text: claim.holds for claim in claims(parts)}
    assert found["A better score than *heuristic* on `mixed`"] is False
    assert found["A better score than *none* on `mixed`"] is True


def test_claims_of_parts_that_were_not_run_are_open() -> None:
    found = {claim.text: claim.holds for claim in claims({**NOTHING, "mixed": made_up.mixed()})}
    assert [text for text, holds in found.items() if holds is None] == [
        f"What `run.py {name}` measures" for name in ("harm", "transfer", "cifar")
    ]


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_is_written_from_the_files(tmp_path: Path) -> None:
    folder, docs = tmp_path / "results", tmp_path / "docs"
    for name in ("mixed", "harm", "transfer", "cifar"):
        write(folder / f"{name}.json", getattr(made_up, name)())
    docs.mkdir()
    (docs / "need_and_place.json").write_text(json.dumps(made_up.need_and_place()))
    provenance = tmp_path / "small.json"
    provenance.write_text(json.dumps({"commands": ["esper train --task mixed"], "env_steps": 400_000, "seeds": [1]}))
    text = render("small", folder, docs, tmp_path).read_text("utf-8")
    for wanted in (
        "python benchmarks/results/run.py mixed",
        "esper train --task mixed",
        "400,000",
        "Break-even",
        "dw@\\*",
    ):
        assert wanted in text
    for picture in ("results_scores", "results_kinds", "results_harm"):
        assert (docs / "images" / f"{picture}.png").stat().st_size > 5_000
        assert f"images/{picture}.png" in text
    assert "nan" not in text.lower().split()


def test_the_page_of_a_pair_says_what_made_both(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"commands": [f"esper train --seed {name}"]}))
    pair = {"commands": ["ship them"], "asks": {"dense": "one", "others": "two"}}
    (tmp_path / "small.json").write_text(json.dumps(pair))
    write(tmp_path / "results" / "mixed.json", made_up.mixed())
    text = render("small", tmp_path / "results", tmp_path, tmp_path).read_text("utf-8")
    assert "ship them<br># one<br>`esper train --seed one`<br># two<br>`esper train --seed two`" in text


def test_a_pair_has_a_sum_of_its_own() -> None:
    assert sha256_of("small") not in {sha256_of("small-conv"), sha256_of("small-dense")}
    assert sha256_of("small-conv") == sha256_of(str(shipped_path("small-conv")))  # the file's, by name or by path


def test_the_page_is_about_one_policy(tmp_path: Path) -> None:
    provenance = tmp_path / "small.json"
    provenance.write_text(json.dumps({"sha256": "ours"}))
    write(tmp_path / "harm.json", made_up.harm() | {"learned_sha256": "another"})
    with pytest.raises(SystemExit, match=r"harm.json is about another policy \(another…\) than ships"):
        render("small", tmp_path, tmp_path, tmp_path)


def test_a_page_without_results_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"mixed.json is not there: run `python benchmarks/results/run.py mixed`"):
        render("small", tmp_path, tmp_path, tmp_path)
    write(tmp_path / "mixed.json", made_up.mixed())
    text = render("small", tmp_path, tmp_path, tmp_path).read_text("utf-8")
    for part in ("harm", "transfer", "cifar"):
        assert f"Not measured yet: `python benchmarks/results/run.py {part}`" in text


def test_commands_are_shown_without_what_only_one_machine_had() -> None:
    ran = "python run.py cifar --controller SISTER --data-dir /tmp/cifar --seeds 5 --out /root/out/cifar.json"
    assert repeatable(ran, "small") == "python run.py cifar --controller small --data-dir DIR --seeds 5"


def test_a_controller_that_is_not_the_default_has_results_and_a_page_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="does not ship: say with --out"):
        folder_of("runs/mine")
    assert folder_of("small-conv") == folder_of("small") / "small-conv"
    content = {**made_up.mixed(), "command": "python run.py mixed --controller OTHER", "learned_sha256": "abc"}
    write(tmp_path / "other" / "mixed.json", content)
    (tmp_path / "other.json").write_text(json.dumps({"summary": "a specialist", "sha256": "abc"}))
    text = render("other", tmp_path / "other", tmp_path, tmp_path).read_text("utf-8")
    assert text.startswith("# Results of `other`\n\nIt is a specialist.")
    assert "python run.py mixed --controller other" in text
    assert "A better score than *none* on `mixed`" in text
    (tmp_path / "other.json").write_text(json.dumps({"summary": "a specialist", "sha256": "def"}))
    with pytest.raises(SystemExit, match="is about another policy"):
        render("other", tmp_path / "other", tmp_path, tmp_path)


def test_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    content = made_up.mixed()
    write(tmp_path / "mixed.json", content)
    assert read(tmp_path / "mixed.json") == content
    assert len((tmp_path / "mixed.json").read_text().splitlines()) < 250  # a column is a line
    assert read(tmp_path / "other.json") is None
    write(tmp_path / "old.json", {"format": 0})
    with pytest.raises(ValueError, match="run that part again"):
        read(tmp_path / "old.json")


def test_numbers_are_written_for_people() -> None:
    assert (plain(-1.25), plain(-0.01), signed(2.0), signed(0.0)) == ("−1.2", "0.0", "+2.0", "0.0")
    assert in_points(Estimate(1.0, -0.5, 2.5, 9)) == "+1.0 (−0.5 to +2.5)"
    assert share_with_interval(Estimate(0.5, 0.25, float("inf"), 9)) == "50 % (25 to ∞)"


# -- families ----------------------------------------------------------------------------------------------------------


def test_reseeding_changes_the_seed_and_nothing_else() -> None:
    base, family = get_family("mixed/vector"), Reseeded("mixed/vector", 3)
    first, second = (family.draw(3 * 2 + repeat, held_out=True) for repeat in (0, 2))
    original = base.draw(2, held_out=True)
    assert first.seed == original.seed
    assert second.seed != original.seed
    assert second.seed % 2 == 1
    assert second.facts["draw"] == 2
    assert np.array_equal(second.task.splits.train.x, original.task.splits.train.x)
    assert (second.horizon, second.budget) == (original.horizon, original.budget)


@pytest.mark.parametrize(
    ("name", "stages"),
    [("deep series", 5), ("deep vectors", 5), ("very deep vectors", 8)],
    ids=lambda value: str(value),
)
def test_deep_families_repeat_themselves_and_leave_room(name: str, stages: int) -> None:
    family = transfer_families()[name]
    for number in range(4):
        draw, again = family.draw(number, held_out=True), family.draw(number, held_out=True)
        assert draw.facts == again.facts
        assert draw.seed == again.seed
        assert draw.seed % 2 == 1
        assert len(draw.task.slots) == stages
        assert draw.budget is not None
        assert draw.task.make_host()(draw.task.splits.val.x[:2]).isfinite().all()
        assert family.draw(number).seed != draw.seed


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_parts_are_measured_as_the_page_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One draw, a rule in place of the learned controller: columns, static controls, and a page of it."""
    monkeypatch.setattr("results.measure.sha256_of", lambda controller: f"sum of {controller}")
    rules = {name: name for name in ("none", "schedule", "heuristic")} | {"learned": "heuristic"}
    measure_mixed(rules, 1, 1, tmp_path / "mixed.json")
    measure_harm({"none": "none", "learned": "heuristic"}, 1, 1, tmp_path / "harm.json")
    mixed, harmed = (read(tmp_path / f"{name}.json") for name in ("mixed", "harm"))
    assert mixed is not None
    assert harmed is not None
    assert list(mixed["episodes"]) == list(rules)
    assert {f"{SCRATCH}, equal epochs", f"{SCRATCH}, equal FLOPs"} <= set(mixed["controls"])
    assert mixed["episodes"]["none"]["size"] == [1.0]
    assert mixed["episodes"]["learned"]["accuracy"] == mixed["episodes"]["heuristic"]["accuracy"]
    assert [draw["repeat"] for draw in harmed["draws"]] == [0, 1, 2]
    assert mixed["learned_sha256"] == "sum of heuristic"
    (tmp_path / "small.json").write_text(json.dumps({"sha256": "sum of heuristic"}))
    text = render("small", tmp_path, tmp_path, tmp_path).read_text("utf-8")
    assert "1 draws of `mixed`" in text
    assert "on 1 held-out draws of `mixed` with 3 random seeds each" in text
