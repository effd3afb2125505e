"""Two ranks with half of the rows each learn exactly what one process learns from all of them.

Covers: R153
"""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from test_ppo import random_rollout, weights

from esper.agent.distributed import ProcessGroup

ROWS, SEED = 6, 4
SETTINGS = {"minibatches": 1, "epochs": 2, "target_kl": None}


def learn_on_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    agent = random_rollout(SEED, rows=ROWS, **SETTINGS)
    agent.reducer = ProcessGroup()
    agent._batch = agent._batch.select(torch.arange(rank, ROWS, 2))  # uneven numbers of valid steps
    metrics = agent.update()
    torch.save({"weights": weights(agent), "kl": metrics["kl_max"]}, f"{folder}/rank{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_equal_one_process(tmp_path):
    multiprocessing.spawn(learn_on_a_rank, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}", weights_only=True) for rank in (0, 1))
    alone = random_rollout(SEED, rows=ROWS, **SETTINGS)
    metrics = alone.update()
    assert torch.equal(first["weights"], second["weights"])
    assert torch.allclose(first["weights"], weights(alone), atol=1e-5)
    assert first["kl"] == pytest.approx(metrics["kl_max"], rel=1e-3)


def test_a_process_group_must_exist():
    with pytest.raises(RuntimeError, match="init_process_group"):
        ProcessGroup()
