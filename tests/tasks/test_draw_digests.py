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
        "task": [task.name, task.slots, task.labels, task.batch_size, task.updates_per_epoch, task.learning_rate],
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
    "mixed 0": ("8c3aefa9fade1e1a", 2558038.940201, 3105.2585),
    "mixed 0 held out": ("77fd3f3ca31e9e28", 26893102.364106, 3437.560252),
    "mixed 5": ("19e18f1814f1c5f7", 622951.019154, 5775.606866),
    "mixed 5 held out": ("155c5291a4149edd", 9953639.132602, 5325.148614),
    "mixed 11": ("4dafbad2491723a5", 700336.728812, 5240.048972),
    "mixed 11 held out": ("2ce6e15284c29fd4", 15007130.249653, 3270.133497),
    "mixed 17": ("b8c46b94b91cabf8", 2017121.679413, 4043.545163),
    "mixed 17 held out": ("51adee0d644bfc3a", 4811420.383791, 3364.813035),
    "disguised 0": ("7125b03620694d4a", 9463868.76014, 5097.557275),
    "disguised 0 held out": ("e043647dad6383b6", 17959383.559415, 4958.811498),
    "disguised 5": ("036fe32ae789666b", 8948177.518091, 2768.72642),
    "disguised 5 held out": ("8575789a32b8b81b", 11431199.653269, 4815.363958),
    "disguised 11": ("cd1e3f924f012c46", 8001015.881548, 3479.566764),
    "disguised 11 held out": ("409618e999fe8706", 40157379.977316, 4027.719527),
    "disguised 17": ("ed2eca792066ddab", 12299766.170174, 6388.479604),
    "disguised 17 held out": ("44212d94dc4e1e1f", 850629.699749, 6068.567082),
    "varied 0": ("2f2b82622118b8d7", 8142427.347514, 3722.396259),
    "varied 0 held out": ("265a8738b83a3691", 5729709.919446, 4633.827923),
    "varied 1": ("10b4b26c8e746099", 5808415.100475, 15282.977746),
    "varied 1 held out": ("aaa88003c684945f", 6749463.064743, 5731.573936),
    "varied 2": ("da91e01d781aff9b", 5091944.611916, 2573.188294),
    "varied 2 held out": ("80fbba10f15ac1a1", 6208092.331569, 2234.617104),
    "varied 3": ("855551e2990c3052", 1064354.021697, 3784.651183),
    "varied 3 held out": ("6b4b8decedd9b1a0", 1466653.125629, 4951.747354),
    "varied 4": ("78aa147fa02b0119", 30136445.0, 3212.144381),
    "varied 4 held out": ("8f4e0294a666b74c", 44103038.0, 990.421117),
    "grammar 0": ("4224b8a2c57647c9", 252547.926809, 4907.054132),
    "grammar 0 held out": ("578234c8026fa78a", 234290.333934, 1357.448274),
    "grammar 1": ("ac15590748efd190", 6697566.063402, 2063.06166),
    "grammar 1 held out": ("a86d896ecafb66fb", 2204323.721716, 12106.380053),
    "grammar 2": ("6e305f99a5e91562", 3738111.940595, 906.21792),
    "grammar 2 held out": ("c1cf07d27d2d102f", 13221679.122795, 2546.381019),
    "grammar 3": ("3d55bbfc752a620a", 6162383.757508, 6005.334741),
    "grammar 3 held out": ("0fad058bac842aed", 1499347.952946, 1318.258464),
    "grammar-unseen 0": ("199bd1d74cf22620", 257228.200387, 4920.398275),
    "grammar-unseen 0 held out": ("09ee51d0d601d941", 334635.013309, 6076.177632),
    "grammar-unseen 1": ("68f92db6df87312f", 3314345.681698, 1622.62238),
    "grammar-unseen 1 held out": ("254e63316eba0746", 2847703.838131, 6357.079191),
    "grammar-unseen 2": ("0df3ece0e562acae", 1398013.431148, 1881.27302),
    "grammar-unseen 2 held out": ("a7a0adac75dbdf91", 3701440.116938, 1331.209482),
    "grammar-unseen 3": ("6f114981f891da51", 4485258.687898, 4159.015808),
    "grammar-unseen 3 held out": ("6de0c3ed27ebf7a0", 5282031.257639, 3477.259528),
    "natural 0": ("009456c6b316d49b", 7326430.3281, 2829.611353),
    "natural 0 held out": ("7dc61dbbb4c53e8e", 7333039.41881, 2821.479093),
    "natural 1": ("d6817267ab7fae16", 4453551.25, 1635.036631),
    "natural 1 held out": ("6e67bb5a6c5e44ab", 4449829.5, 1651.261218),
    "natural 2": ("a25b36f167d41672", 7326430.3281, 2998.547475),
    "natural 2 held out": ("884c091999014d4c", 7333039.41881, 3268.069661),
    "mnist1d 1": ("92484782c0531db0", 7333039.41881, 2748.971835),
    "mnist1d 1 held out": ("a2a56c37e7a27f8b", 7372206.3506, 2674.631398),
    "digits 1": ("83736bd2fd23ca86", 4449829.5, 2533.547901),
    "digits 1 held out": ("9bd5944c8c8d3c7a", 4445182.75, 2544.448839),
    "stories 1": ("a144837f47f5b74d", 623677187.0, 5778.206155),
    "stories 1 held out": ("ca056b18bb8b1d34", 621772373.0, 5775.899735),
    "mixed+varied 1": ("ccf1dca6de7c33c9", 5925831.422911, 3583.225629),
    "mixed+varied 1 held out": ("e40437134cf61589", 38099091.541072, 2978.298055),
    "varied/text 1": ("83ccf5e5683d2629", 35901017.0, 7029.340315),
    "varied/text 1 held out": ("20bd3dea11fc34fc", 39658353.0, 4159.278559),
    "disguised/image 1": ("cfb60e3a43ac215a", 46030543.938363, 5655.081167),
    "disguised/image 1 held out": ("f3b19dba2316dac4", 28740284.659455, 4136.259722),
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
