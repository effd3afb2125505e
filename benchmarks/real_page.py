"""docs/real_problems.md from what `real_problems.py` has kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from esper.training.statistics import Estimate, Floats, bootstrap
from page_text import in_points, page_of, plain, table, with_interval
from real_data import PROBLEMS

ARMS = {
    "none": "ungrown",
    "small": "grown by `small`",
    "small free": "grown by `small`, size free (rent 0)",
    "heuristic": "grown by `heuristic`",
    "schedule": "grown by `schedule`",
    "scratch": "final network of `small` (rent 5) from scratch, equal epochs",
    "scratch flops": "the same, equal FLOPs",
    "wide 2": "host with ×2 parameters",
    "wide 4": "host with ×4 parameters",
    "optuna 1": "Optuna, FLOPs of `small`",
    "optuna 10": "Optuna, ten times these FLOPs",
}
COMMANDS = (
    'pip install -e ".[peers]"',
    "python benchmarks/real_problems.py measure --data-dir cifar --text-file tinyshakespeare.txt",
    "python benchmarks/real_problems.py render",
)
RIVALS = [arm for arm in ARMS if arm != "small"]
LARGE = "wide 4"
LEVEL = 0.5
"""Points by which a mean may be lower and still count as a match."""
Store = Mapping[str, Any]
Runs = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Of one problem, by arm and seed."""


def column(runs: Runs, arm: str, name: str = "test") -> Floats:
    """In the order of the seeds."""
    return np.array([runs[arm][seed][name] for seed in sorted(runs[arm], key=int)], dtype=np.float64)


def ahead(runs: Runs, over: str, arm: str = "small") -> Floats:
    """Points of test accuracy by which an arm is ahead of another one, by seed."""
    seeds = sorted(runs[arm].keys() & runs[over].keys(), key=int)
    return np.array([runs[arm][seed]["test"] - runs[over][seed]["test"] for seed in seeds])


def over_problems(problems: Sequence[Runs], over: str, arm: str = "small") -> Estimate:
    """The mean over problems of the mean difference; problems are resampled, because another one would differ."""
    return bootstrap([float(ahead(runs, over, arm).mean()) for runs in problems])


def share_of_large(runs: Runs) -> float:
    """The FLOPs of the run of `small` over those of the large static network."""
    return float(column(runs, "small", "flops").mean() / column(runs, LARGE, "flops").mean())


def measured(store: Store) -> dict[str, Runs]:
    """Problems with the arms that have every seed; problems without growth or the large network are left out."""
    seeds = len(store["protocol"]["seeds"])
    found = {}
    for name in (name for name in PROBLEMS if name in store["problems"]):
        runs = store["problems"][name].get("runs", {})
        whole = {arm: runs[arm] for arm in (*ARMS, "late") if len(runs.get(arm, {})) == seeds}
        if {"none", "small", LARGE} <= whole.keys():
            found[name] = whole
    return found


# -- the page ----------------------------------------------------------------------------------------------------------

TITLE = "# Real problems: growing compared with other methods"
WHO = (
    "For everyone who asks whether growing pays on data and models that were not made for it. Written by "
    "`python benchmarks/real_problems.py render` from docs/real_problems.json; do not edit."
)
PROTOCOL = """This is the third measurement; its protocol was committed before the first of its runs. Each one corrects
the one before, so these test sets have had a say in the design twice:

- The first (`git show 1a1024d:docs/real_problems.md`) showed that seeds *after* a narrow linear layer cannot widen it.
  Since then seeds stand [beside such layers](slots.md#beside-a-linear-layer), take the activation and the norm of
  their host, and learned policies keep what clearly pays.
- The second (`git show 2d9e3a1:docs/real_problems.md`) charged growing with an upper bound of its FLOPs, and the plain
  trainings with their updates alone. By that count `small` was −1.2 (−2.7 to −0.3) points against its final network
  from scratch at equal FLOPs; on four problems 71 to 98 % of the bound was really computed. Now FLOPs are counted while
  a network grows, and every arm pays for one pass over the validation examples per epoch. There are five seeds in place
  of three.

- **Splits.** The test examples of a problem are fixed, and looked at once, at the end. The rest is divided into
  training and validation examples by the seed of a run. The validation examples decide about growth, about Optuna's
  trials and about learning rates; no arm trains on them. Inputs, and the targets of a regression, are scaled by the
  training examples.
- **Hosts** are small, because a small one may need to grow. All of it runs on one thread of a CPU.
- **Training.** Every arm: AdamW, minibatches drawn with replacement, the rate constant and falling to zero over the
  last 30 % of the updates. 40 epochs, as by default of `esper.grow`; equal epochs are equal updates.
- **Rates.** For each problem and arm one of {rates}, by the mean validation accuracy of the seeds {tuning}, which are
  not in the table. The final network at equal FLOPs and Optuna's trials have the rate of the final network at equal
  epochs. These runs are in no arm's FLOPs.
- **Grown**: `esper.grow` with `slots="auto"` and the defaults of each controller, rent 5 among them. Rivals pay no
  rent: the fair arm against a wider host is `small` at rent 0. **From scratch**: the seeds of the network that `small`
  (rent 5) ended with, new, in the host with the same first weights. **Wider**: all hidden widths by one factor.
- **Optuna**: TPE with Hyperband's pruning (from 4 epochs on, reduction 3). For each of the same slots it chooses one
  of the kinds of seed that fit, or nothing. Trials begin until the FLOPs are spent; the last one is stopped there.
  Its answer is the network with the best validation accuracy of those that its trials ended with, as it was trained
  there.
- **FLOPs** are those of `torch.utils.flop_counter`: matrix products, convolutions and attention, of forward and
  backward passes. Every arm pays for its updates and for one pass over the validation examples per epoch. Those of
  growing are counted while the same growth is made once more: updates, shadow passes, all measuring, and the checks at
  the end. What the controller (`small`: about 0.5 MFLOPs an epoch) and TPE compute for themselves is not counted.
- **Wall time** is of a shared machine, with other work on its two cores: an order of magnitude.
- **Statistics.** Seeds {seeds}. Differences are paired by seed; 95 % bootstrap intervals over seeds, and for means
  over problems over problems ([how](compare.md)). Accuracy is in per cent of examples (of characters for the GPT),
  and R² in per cent for diabetes.
- **Left out**: `cifar10-resnet20`, ResNet-20 on all of CIFAR-10, which needs hours of a GPU; the same command
  measures it by name."""


def render(store: Store) -> str:
    problems = measured(store)
    wanted = [name for name, problem in PROBLEMS.items() if problem.by_default]
    missing = [name for name in wanted if not ARMS.keys() <= problems.get(name, {}).keys()]
    sections = [[TITLE], [WHO], ["## What it shows", "", *findings(problems)]]
    if missing:
        sections += [
            [f"Of the problems of the protocol these are not measured, or not with all arms: {', '.join(missing)}."]
        ]
    if problems:
        sections += [["## In the mean over problems", "", *means_table(problems)]]
        sections += [["## Against the large static network", "", *large_table(problems)]]
    sections += [["## Protocol", "", protocol_text(store)]]
    if problems:
        sections += [["## Each problem"]]
        sections += [[f"### {name}", "", *problem_table(name, runs)] for name, runs in problems.items()]
        sections += [["## What grew", "", *grown_table(problems)]]
        sections += [["## What growing spends", "", *spent_table(problems)]]
        sections += [["## Where the difference to training from scratch comes from", "", *late_table(problems)]]
        sections += [["## Commands", "", "```sh", *COMMANDS, "```"]]
    return page_of(sections)


def findings(problems: Mapping[str, Runs]) -> list[str]:
    """Figures, and words that follow from their intervals."""
    if any(not {*ARMS, "late"} <= runs.keys() for runs in problems.values()) or len(problems) < 7:
        return ["Not measured yet."]
    every = list(problems.values())

    def lead(arm: str, over: str) -> str:
        return in_points(over_problems(every, over, arm))

    def standing(arm: str, over: str) -> str:
        found = over_problems(every, over, arm)
        assert found.low is not None
        assert found.high is not None
        return "ahead" if found.low > 0.0 else "below" if found.high < 0.0 else "level"

    matched = [name for name, runs in problems.items() if ahead(runs, LARGE).mean() >= -LEVEL]
    shares = ", ".join(f"{name} {100 * share_of_large(problems[name]):.0f} %" for name in matched)
    matched_at = f", at these shares of its FLOPs: {shares}" if matched else ""
    costs = [column(runs, "small", "flops").mean() / column(runs, "scratch", "flops").mean() for runs in every]
    cost = f"×{np.exp(np.mean(np.log(costs))):.2f}"
    over = ("scratch", "scratch flops", "optuna 1", "optuna 10", LARGE)
    arms = ("small", "small free")
    cells = [[ARMS[rival], *(f"{standing(arm, rival)}, {lead(arm, rival)}" for arm in arms)] for rival in over]
    return [
        "In the mean over seven problems, in points of test accuracy. Networks and FLOPs of the rivals are those of",
        "`small` at a rent of 5; with size free it spends more.",
        "",
        *table(["against", "`small`, rent 5", "`small`, size free (rent 0)"], cells),
        "",
        f"""- **Growing costs** {cost} the FLOPs of training the final network from scratch for the same epochs.
- **Size**: `small` pays a rent of 5, and its rivals pay none. With size free it is {lead("small free", "small")}
  against itself, and {lead("small free", "none")} against the ungrown host; the host with twice the parameters is
  {lead("wide 2", "none")}, with four times {lead(LARGE, "none")}.
- **The large static network** (×4 parameters) is matched on {len(matched)} of {len(every)} problems{matched_at}.
- **The time of planting** is not what costs: seeds that act at once in the epoch in which they were planted, without a
  lifecycle, are {lead("late", "small")} against `small`.
- `heuristic` is {lead("heuristic", "small")} against `small`, the fixed schedule {lead("schedule", "small")}.""",
        "",
        """**Limits.** Hosts and data are small, and trainings are short. The rates are chosen by two seeds, from a grid
of three. R² of diabetes weighs as much as an accuracy, and varies most. Test sets have between 53 examples (wine) and
2,000.""",
    ]


def protocol_text(store: Store) -> str:
    known = store["protocol"]
    text = PROTOCOL.format(
        rates=", ".join(f"{rate:g}" for rate in known["rates"]),
        tuning=" and ".join(map(str, known["tuning_seeds"])),
        seeds=", ".join(map(str, known["seeds"])),
    )
    rows = []
    for name, problem in PROBLEMS.items():
        updates = str(problem.updates_per_epoch or "one pass")
        rows.append([name, problem.title, str(problem.epochs), updates, str(problem.batch_size)])
    return "\n".join([text, "", *table(["problem", "what", "epochs", "updates per epoch", "batch"], rows)])


def means_table(problems: Mapping[str, Runs]) -> list[str]:
    rows = []
    for arm in RIVALS:
        there = [runs for runs in problems.values() if arm in runs]
        if not there:
            continue
        leads = [float(ahead(runs, arm).mean()) for runs in there]
        shares = [column(runs, arm, "flops").mean() / column(runs, "small", "flops").mean() for runs in there]
        found = over_problems(there, arm)
        better = f"{sum(lead > 0 for lead in leads)} of {len(leads)}"
        rows.append([ARMS[arm], in_points(found), better, f"×{np.exp(np.mean(np.log(shares))):.2f}"])
    head = ["`small` against", "points ahead", "problems on which it is ahead", "training FLOPs of the other"]
    note = (
        "Points of test accuracy (R² for diabetes) by which the network that `small` grew is ahead; FLOPs against "
        "those of its run, in the geometric mean."
    )
    return [note, "", *table(head, rows)]


def large_table(problems: Mapping[str, Runs]) -> list[str]:
    rows = []
    for name, runs in problems.items():
        matched = "yes" if ahead(runs, LARGE).mean() >= -LEVEL else "no"
        rows.append([name, in_points(bootstrap(ahead(runs, LARGE))), matched, f"{100 * share_of_large(runs):.0f} %"])
    note = (
        f"`small` against the host with ×4 parameters; a match is a mean at most {plain(LEVEL)} points lower. "
        "Published growers match a large static network at 50 to 70 % of its training FLOPs."
    )
    return [note, "", *table(["problem", "points ahead", "match", "its FLOPs of those of the large network"], rows)]


def problem_table(name: str, runs: Runs) -> list[str]:
    rows = []
    for arm, label in ARMS.items():
        if arm not in runs:
            continue
        found = bootstrap(column(runs, arm))
        lead = "" if arm == "small" else in_points(bootstrap(ahead(runs, arm)))
        size = f"{column(runs, arm, 'parameters').mean():,.0f}"
        rate = f"{runs[arm]['0']['rate']:g}"
        flops = f"{column(runs, arm, 'flops').mean() / 1e9:.3g}"
        seconds = f"{column(runs, arm, 'seconds').mean():.3g}"
        rows.append([label, with_interval(found), lead, size, flops, seconds, rate])
    head = ["arm", "test", "`small` ahead by", "parameters", "training GFLOPs", "seconds", "rate"]
    return [f"{PROBLEMS[name].title}.", "", *table(head, rows)]


def grown_table(problems: Mapping[str, Runs]) -> list[str]:
    rows = []
    for name, runs in problems.items():
        for seed, run in sorted(runs["small"].items(), key=lambda one: int(one[0])):
            kept = [
                f"{kind} at {slot} (epoch {born})" for slot, kind, fate, born, _ in run["seeds"] if fate != "PRUNED"
            ]
            rows.append([name, seed, ", ".join(kept) or "nothing", str(len(run["seeds"]))])
    note = "By `small`: what each final network has, with the epoch in which it was planted, of 40."
    return [note, "", *table(["problem", "seed", "kept", "planted in all"], rows)]


def spent_table(problems: Mapping[str, Runs]) -> list[str]:
    rows = []
    for name, runs in problems.items():
        total, scratch = column(runs, "small", "flops").mean(), column(runs, "scratch", "flops").mean()
        parts = [column(runs, "small", f"{part}_flops").mean() / total for part in ("update", "validation")]
        shares = [f"{100 * part:.0f} %" for part in (*parts, 1.0 - sum(parts))]
        rows.append([name, *shares, f"×{total / scratch:.2f}"])
    note = (
        "The training FLOPs of `small`. The rest is what growing adds: shadow passes, measuring each unfinished seed, "
        "the survey before the run and the checks after it. The last column is against the final network from scratch, "
        "at equal epochs."
    )
    return [note, "", *table(["problem", "updates", "one validation pass per epoch", "the rest", "in all"], rows)]


def late_table(problems: Mapping[str, Runs]) -> list[str]:
    parts = (("scratch", "small"), ("scratch", "late"), ("late", "small"))
    known = {name: runs for name, runs in problems.items() if {"scratch", "late"} <= runs.keys()}
    if not known:
        return ["Not measured."]
    rows = [[name, *(in_points(bootstrap(ahead(runs, b, a))) for a, b in parts)] for name, runs in known.items()]
    means = [in_points(over_problems(list(known.values()), b, a)) for a, b in parts]
    note = (
        "Added when the first tables were known. Between the two is a third network: it has the seeds that `small` "
        "kept, and they act from the epoch in which `small` planted them, without incubation, blending or warm-up, at "
        "the learning rate of training from scratch. From scratch minus this network is the price of planting late; "
        "this network minus `small` is the price of the rest (incubation, blending, warm-up, another rate). Points "
        "of test accuracy."
    )
    head = ["problem", "from scratch − `small`", "price of planting late", "price of the rest"]
    return [note, "", *table(head, [*rows, ["mean", *means]])]
