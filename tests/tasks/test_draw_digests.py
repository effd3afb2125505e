"""A draw id is the same problem as ever: data, host, first weights, minibatches and limits.

Recorded scores, shipped policies and tables in docs/ name draws by their ids, so a change here makes them wrong. Exact
parts are compared by a digest, real numbers by their sums: libraries round differently on other processors.

    python tests/tasks/test_draw_digests.py        # prints the table, after a change that is meant
"""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from esper.tasks.family import Draw, get_family
from esper.tasks.feed import TensorFeed

DRAWS = [
    *((name, draw_id) for name in ("mixed", "disguised") for draw_id in (0, 5, 11, 17)),
    *(("varied", draw_id) for draw_id in range(5)),
    *((name, draw_id) for name in ("grammar", "grammar-unseen") for draw_id in range(4)),
    *(("natural", draw_id) for draw_id in range(3)),
    *((name, 1) for name in ("mnist1d", "digits", "stories", "mixed+varied", "varied/text", "disguised/image")),
]


def weighted_sum(values: torch.Tensor) -> float:
    """Of magnitudes, so that nothing cancels; weighted by place, so that another order is another sum."""
    flat = values.double().abs().flatten()
    return float((flat * (1 + torch.arange(len(flat)) % 97)).sum())


def described(draw: Draw) -> tuple[str, float, float]:
    """A digest of what is exact, and weighted sums over all inputs and over all first weights."""
    task, splits = draw.task, draw.task.splits
    torch.manual_seed(draw.seed)
    host = task.make_host()
    feed = TensorFeed(
        splits.train,
        splits.val,
        batch_size=task.batch_size,
        augment=task.augment,
        seed=draw.seed,
        numbers=task.numbers,
    )
    exact = {
        "draw": [draw.seed, draw.horizon, draw.budget, draw.max_seeds, draw.facts],
        "task": [task.name, task.slots, task.labels, task.batch_size, task.updates_per_epoch],
        "rate": f"{task.learning_rate:.9g}",  # its last bit follows from the processor
        "training": [task.weight_decay, task.augment, task.visibility],
        "host": [type(host).__name__, host.config, task.host_parameters],
        "targets": [part.y.tolist() for part in (splits.train, splits.val, splits.test)],
        "shapes": [list(part.x.shape) for part in (splits.train, splits.val, splits.test)],
        "minibatches": feed.plan(2).tolist(),
    }
    inputs = sum(weighted_sum(part.x) for part in (splits.train, splits.val, splits.test))
    weights = sum(weighted_sum(parameter.detach()) for parameter in host.parameters())
    return hashlib.sha256(json.dumps(exact, sort_keys=True).encode()).hexdigest()[:16], inputs, weights


def table() -> dict[str, tuple[str, float, float]]:
    rows = {}
    for name, draw_id in DRAWS:
        for held_out in (False, True):
            key = f"{name} {draw_id}{' held out' if held_out else ''}"
            digest, inputs, weights = described(get_family(name).draw(draw_id, held_out=held_out))
            rows[key] = (digest, round(inputs, 6), round(weights, 6))
    return rows


RECORDED: dict[str, tuple[str, float, float]] = {
    "mixed 0": ("932af4832f7b22f7", 2558038.940201, 3105.2585),
    "mixed 0 held out": ("9d74fd85bd29053e", 26893102.364106, 3437.560252),
    "mixed 5": ("9d5579fe9a87e306", 622951.019154, 5775.606866),
    "mixed 5 held out": ("d54c4b51c718ce40", 9953639.132602, 5325.148614),
    "mixed 11": ("df667922e2fbebcc", 700336.728812, 5240.048972),
    "mixed 11 held out": ("d0266f52eabcc70b", 15007130.249653, 3270.133497),
    "mixed 17": ("f3cb024e96f40a75", 2017121.679413, 4043.545163),
    "mixed 17 held out": ("ec29548e1125fcd9", 4811420.383791, 3364.813035),
    "disguised 0": ("7ff6f15374cad5ab", 9463868.76014, 5097.557275),
    "disguised 0 held out": ("389c9a1273d80f79", 17959383.559415, 4958.811498),
    "disguised 5": ("1a2f77cd5969dd66", 8948177.518091, 2768.72642),
    "disguised 5 held out": ("13f4c301ccfff210", 11431199.653269, 4815.363958),
    "disguised 11": ("3f3597e9d7a8da7a", 8001015.881548, 3479.566764),
    "disguised 11 held out": ("2e4fa2703825863e", 40157379.977316, 4027.719527),
    "disguised 17": ("917b21e10072e886", 12299766.170174, 6388.479604),
    "disguised 17 held out": ("e1497ae5e241d335", 850629.699749, 6068.567082),
    "varied 0": ("777f5a43541a7e00", 8142427.347514, 3722.396259),
    "varied 0 held out": ("c860e6558e841dbc", 5729709.919446, 4633.827923),
    "varied 1": ("2dd0537b7bf66e38", 5808415.100475, 15282.977746),
    "varied 1 held out": ("f779901b9087d228", 6749463.064743, 5731.573936),
    "varied 2": ("b935857f5b6aa6fe", 5091944.611916, 2573.188294),
    "varied 2 held out": ("4b9eed3b1c6992b0", 6208092.331569, 2234.617104),
    "varied 3": ("8b2db6da1a10ffd6", 1064354.021697, 3784.651183),
    "varied 3 held out": ("544202caa865684d", 1466653.125629, 4951.747354),
    "varied 4": ("0d599916f89562cd", 30136445.0, 3212.144381),
    "varied 4 held out": ("85e598e288850a69", 44103038.0, 990.421117),
    "grammar 0": ("7f8bedc956dd2120", 252547.926809, 4907.054132),
    "grammar 0 held out": ("516728e96efbb216", 234290.333934, 1357.448274),
    "grammar 1": ("22e1ae8934ae3fa5", 6697566.063402, 2063.06166),
    "grammar 1 held out": ("91aad1f275a39e5c", 2204323.721716, 12106.380053),
    "grammar 2": ("c3ab5698aab7d793", 3738111.940595, 906.21792),
    "grammar 2 held out": ("547eb1a2a3b0c335", 13221679.122795, 2546.381019),
    "grammar 3": ("c42cd63aa5881e1a", 6162383.757508, 6005.334741),
    "grammar 3 held out": ("daf18534c9de2a71", 1499347.952946, 1318.258464),
    "grammar-unseen 0": ("6427ef6aad6a42e3", 257228.200387, 4920.398275),
    "grammar-unseen 0 held out": ("f68ffd5b3ccee53e", 334635.013309, 6076.177632),
    "grammar-unseen 1": ("6a3be70f0895960c", 3314345.681698, 1622.62238),
    "grammar-unseen 1 held out": ("5072fff557e55961", 2847703.838131, 6357.079191),
    "grammar-unseen 2": ("c80321b6c9966234", 1398013.431148, 1881.27302),
    "grammar-unseen 2 held out": ("6688941155c9f4d6", 3701440.116938, 1331.209482),
    "grammar-unseen 3": ("6aa1936a8316018f", 4485258.687898, 4159.015808),
    "grammar-unseen 3 held out": ("4b3d9cd22907017b", 5282031.257639, 3477.259528),
    "natural 0": ("508a59ee80826d7f", 7326430.3281, 2829.611353),
    "natural 0 held out": ("07d08c803a3e010a", 7333039.41881, 2821.479093),
    "natural 1": ("ad6ff494d50f8d51", 4453551.25, 1635.036631),
    "natural 1 held out": ("a9b7fbcecd1b1ba5", 4449829.5, 1651.261218),
    "natural 2": ("81f95fbf8956d08d", 7326430.3281, 2998.547475),
    "natural 2 held out": ("54daaef870858079", 7333039.41881, 3268.069661),
    "mnist1d 1": ("3ff6d65bfc570f81", 7333039.41881, 2748.971835),
    "mnist1d 1 held out": ("97cbc00b3d3cfc2a", 7372206.3506, 2674.631398),
    "digits 1": ("313579ab068b939b", 4449829.5, 2533.547901),
    "digits 1 held out": ("e2596c519ecf9354", 4445182.75, 2544.448839),
    "stories 1": ("0882bb9a11c234b2", 623677187.0, 5778.206155),
    "stories 1 held out": ("529799bda45453b1", 621772373.0, 5775.899735),
    "mixed+varied 1": ("b5627b1a70fc177d", 5925831.422911, 3583.225629),
    "mixed+varied 1 held out": ("b4df07e1e28cbbf7", 38099091.541072, 2978.298055),
    "varied/text 1": ("a7579d56df796c09", 35901017.0, 7029.340315),
    "varied/text 1 held out": ("aed5de38db0c1c84", 39658353.0, 4159.278559),
    "disguised/image 1": ("fe7e54db017ce4d1", 46030543.938363, 5655.081167),
    "disguised/image 1 held out": ("ff8a9d4f8f7e198d", 28740284.659455, 4136.259722),
}


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize(("name", "draw_id"), DRAWS)
def test_a_draw_id_is_the_same_problem_as_ever(name: str, draw_id: int, held_out: bool) -> None:
    digest, inputs, weights = described(get_family(name).draw(draw_id, held_out=held_out))
    recorded = RECORDED[f"{name} {draw_id}{' held out' if held_out else ''}"]
    assert digest == recorded[0]
    assert (inputs, weights) == pytest.approx(recorded[1:], rel=1e-5)


if __name__ == "__main__":
    for key, row in table().items():
        print(f'    "{key}": {row!r},'.replace("'", '"'))
