"""`GrowthCallback` in a real Trainer of transformers, on small models with random first weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import esper
from esper.errors import RefusedError
from esper.growth.graft import SEEDS
from esper.growth.plain import grafted
from esper.lifecycle import Rules, Stage
from esper.policy.schedule import FixedSchedule, Planting

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which the Trainer needs")
from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.modeling_outputs import SequenceClassifierOutput  # noqa: E402

from esper.integrations.huggingface import GrowthCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

QUICK = Rules(training_epochs=1, blending_epochs=1, gradient_activity=0.0, shadow_benefit=-100.0, contribution=-100.0)
LONG = Rules(training_epochs=99)
"""A seed that incubates to the end."""
WORDS, LENGTH = 12, 8


class Sentences(Dataset[dict[str, Tensor]]):
    """Whether the first word comes again."""

    def __init__(self, count: int, seed: int, language: bool = False) -> None:
        words = torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
        self.words, self.labels = words, words if language else (words[:, 1:] == words[:, :1]).any(1).long()

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[row], "labels": self.labels[row]}


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=LENGTH, num_labels=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


class Bag(nn.Module):
    """No model of transformers: the Trainer divides its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(torch.relu(self.layer(self.embed(input_ids).mean(1))))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def bag() -> Any:
    torch.manual_seed(0)
    return Bag()


SLOTS = {bag: ["layer"], bert: ["bert.encoder.layer.*"], gpt2: ["transformer.h.*"]}


def callback(make: Any = bert, rules: Rules = QUICK, **settings: Any) -> GrowthCallback:
    held_out = DataLoader(Sentences(24, 1, make is gpt2), batch_size=24, collate_fn=collate)
    schedule = FixedSchedule("all", [Planting(1, "*", {"sequence": "mlp", "dense": "mlp"})])
    given = {"slots": SLOTS[make], "validate": held_out, "controller": schedule, "rules": rules, **settings}
    return GrowthCallback(**given)


def trainer(folder: Path, *callbacks: Any, make: Any = bert, epochs: int = 5, **settings: Any) -> Trainer:
    given: dict[str, Any] = {"save_strategy": "no", "per_device_train_batch_size": 8, "learning_rate": 0.01, **settings}
    args = TrainingArguments(
        str(folder), num_train_epochs=epochs, use_cpu=True, report_to=[], disable_tqdm=True, seed=3,
        logging_strategy="no", **given,
    )  # fmt: skip
    language = make is gpt2
    return Trainer(
        make(), args, data_collator=collate, train_dataset=Sentences(48, 0, language),
        eval_dataset=Sentences(24, 1, language), callbacks=list(callbacks),
    )  # fmt: skip


class Watch(TrainerCallback):  # type: ignore[misc, valid-type]
    """The first seed, and the optimizer's groups, after every epoch."""

    def __init__(self, grows: GrowthCallback) -> None:
        self.grows = grows
        self.weights: list[list[Tensor]] = []
        self.groups: list[int] = []
        self.stages: list[Stage] = []
        self.outputs: list[Tensor] = []
        self.norms: list[float] = []
        self.host_norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model = self.grows._growth.learner.model
        for slot in model.incubating:
            self.norms.append(float(torch.stack([p.grad.norm() for p in slot.trained]).norm()))
            host = [p.grad.norm() for p in model.host.parameters() if p.grad is not None]
            self.host_norms.append(float(torch.stack(host).norm()))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        slot = self.grows._growth.learner.model.slots[0]
        self.stages.append(slot.stage)
        self.weights.append([p.detach().clone() for p in slot.trained])
        self.groups.append(len(given["optimizer"].param_groups))
        self.outputs.append(outputs(given["model"]))


def outputs(model: Any) -> Tensor:
    was = model.training
    with torch.no_grad():
        found = model.eval()(Sentences(24, 1).words)
    model.train(was)
    logits: Tensor = found["logits"]
    return logits


@pytest.mark.parametrize("make", [pytest.param(bert, marks=pytest.mark.slow), gpt2])
def test_seeds_are_planted_trained_and_kept_while_the_trainer_trains(make: Any, tmp_path: Path) -> None:
    grows = callback(make)
    watch = Watch(grows)
    train = trainer(tmp_path, grows, watch, make=make)
    train.train()
    assert watch.stages[:2] == [Stage.DORMANT, Stage.BLENDING]
    assert max(watch.groups) == watch.groups[0] + 2
    assert any(not torch.equal(a, b) for a, b in zip(watch.weights[1], watch.weights[3], strict=True))
    assert grows.grown is not None
    assert grows.grown.model is train.model
    assert len(grafted(train.model)) == 2
    assert {story.fate for story in grows.grown.history.seeds()} == {Stage.FOSSILIZED}
    # Saved and loaded as ever, and the seeds put back.
    train.save_model(str(tmp_path / "end"))
    again = type(train.model).from_pretrained(tmp_path / "end")
    esper.load_seeds(again, tmp_path / "end")
    torch.testing.assert_close(outputs(again), outputs(train.model), rtol=0, atol=1e-6)
    assert train.evaluate()["eval_loss"] > 0.0


CLIPPED = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.01}


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (bert, CLIPPED),
        (gpt2, {}),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((bert, {}), (gpt2, CLIPPED))),
    ],
)
def test_incubation_does_not_show(make: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    plain = trainer(tmp_path, make=make, epochs=3, **settings)
    plain.train()
    grows = callback(make, LONG)
    watch = Watch(grows)
    grown = trainer(tmp_path, grows, watch, make=make, epochs=3, **settings)
    grown.train()
    assert watch.stages[-1] is Stage.TRAINING
    assert any(not torch.equal(a, b) for a, b in zip(watch.weights[1], watch.weights[2], strict=True))
    if "max_grad_norm" in settings:  # 6 batches in updates of 4 and 2, two epochs, two seeds
        assert len(watch.norms) == 2 + 4
        assert max(watch.norms) <= 0.01 * 1.001
    for (name, ours), theirs in zip(grown.model.state_dict().items(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("make", [bag, pytest.param(bert, marks=pytest.mark.slow), gpt2])
def test_the_shadow_gradient_is_that_of_the_accumulated_batch(make: Any, tmp_path: Path) -> None:
    """Batches of 4, two to an update, give a seed what they give the host: what a batch of 8 gives.

    Of BERT, twice as much: its classifier takes the number of examples, and does not divide by it (transformers 5.23).
    """

    def norms(batch: int, accumulate: int) -> tuple[list[float], list[float]]:
        grows = callback(make, LONG)
        watch = Watch(grows)
        settings = {
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": accumulate,
            "max_grad_norm": 0.0,
        }
        run = trainer(tmp_path, grows, watch, make=make, epochs=2, **settings)
        for part in run.model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        run.train()
        return watch.norms, watch.host_norms

    (seed, host), (seed_parts, host_parts) = norms(8, 1), norms(4, 2)
    assert len(seed) == 6
    ratio = host_parts[0] / host[0]
    assert ratio == pytest.approx(2.0 if make is bert else 1.0, rel=1e-3) or make is bert  # if they mend it
    assert seed_parts == pytest.approx([ratio * norm for norm in seed], rel=1e-2)


def test_a_checkpoint_reloads_the_network_and_the_training_goes_on(tmp_path: Path) -> None:
    grows = callback()
    watch = Watch(grows)
    whole = trainer(tmp_path, grows, watch, save_strategy="epoch")
    whole.train()
    for epoch in range(1, 5):  # 6 updates an epoch; the last one is saved before the seeds are settled
        folder = tmp_path / f"checkpoint-{6 * (epoch + 1)}"
        host = type(whole.model).from_pretrained(folder)
        assert not [key for key in host.state_dict() if SEEDS in key]
        esper.load_seeds(host, folder)
        torch.testing.assert_close(outputs(host), watch.outputs[epoch], rtol=0, atol=1e-6)
    again = callback()
    resumed = trainer(tmp_path, again, save_strategy="epoch")
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-18"))
    assert again.grown is not None
    assert len(again.grown.history.records) == 5
    for (name, ours), theirs in zip(whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    elsewhere = trainer(tmp_path / "elsewhere", callback(), save_strategy="epoch")
    with pytest.raises(RefusedError, match=r"there is no .*growth.pt.*resume_from=folder"):
        elsewhere.train(resume_from_checkpoint=str(tmp_path / "checkpoint-18"))
    moved = callback(resume_from=tmp_path / "checkpoint-24")
    trainer(tmp_path / "moved", moved).train(resume_from_checkpoint=str(tmp_path / "checkpoint-24"))
    assert moved.grown is not None
    assert (tmp_path / "checkpoint-24" / "growth.pt").exists()


def test_max_steps_and_bfloat16(tmp_path: Path) -> None:
    grows = callback()
    trainer(tmp_path, grows, max_steps=15, bf16=True).train()
    assert grows.grown is not None
    assert len(grows.grown.history.records) == 3  # two epochs of 6, and 3 updates


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"save_strategy": "steps"}, "saved between epochs only, and save_strategy is 'steps'"),
        ({"label_smoothing_factor": 0.1}, "leave label_smoothing_factor out"),
        ({"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}, "seeds of another"),
    ],
)
def test_settings_that_growth_cannot_follow_are_refused(settings: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=match) as caught:
        trainer(tmp_path, callback(), **settings).train()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("deepspeed", "ds.json", "DeepSpeed or FSDP"),
        ("fsdp", ["full_shard"], "DeepSpeed or FSDP"),
        ("_n_gpu", 2, "the Trainer uses 2"),
        ("fp16", True, "use bf16=True"),
        ("torch_compile", True, "cannot grow a compiled model"),
        ("auto_find_batch_size", True, "begins the training again"),
    ],
)
def test_devices_that_growth_cannot_follow_are_refused(name: str, value: Any, match: str, tmp_path: Path) -> None:
    """Written into the arguments: this computer has no such devices, or the Trainer would take long to begin."""
    grows, run = callback(), trainer(tmp_path)
    object.__setattr__(run.args, name, value)
    with pytest.raises(RefusedError, match=match):
        grows.on_train_begin(run.args, run.state, run.control, model=run.model)


class OtherLoss(Trainer):  # type: ignore[misc, valid-type]
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).logits.square().mean()


def test_a_loss_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    other = OtherLoss(
        bert(), run.args, data_collator=collate, train_dataset=Sentences(48, 0), callbacks=[callback()]
    )  # fmt: skip
    with pytest.raises(RefusedError, match="minimised something else than the model's own loss"):
        other.train()


def test_an_average_of_none_is_none(tmp_path: Path) -> None:
    grows = callback(bag, average=None)
    trainer(tmp_path, grows, make=bag).train()
    assert grows.averaged is None
    assert grows.grown is not None


def test_slots_are_chosen_where_none_are_named() -> None:
    assert GrowthCallback(validate=[])._settings["slots"] == "auto"
    with pytest.raises(TypeError, match="GrowthCallback: validate= is missing: pass data"):
        GrowthCallback(["h.*"])
