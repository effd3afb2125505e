"""What the loaders of a person's own may give to `esper.grow`, and how long an epoch of them is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_growing import rings
from test_own_data import X, Y, loader, once, refused
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import esper


class Stream(IterableDataset):
    def __init__(self, x: Tensor = X, y: Tensor = Y) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(self.x, self.y, strict=True))


class Noted:
    """A loader that counts the batches it gave."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.given = batches, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.given += 1
            yield batch


# -- epochs ------------------------------------------------------------------------------------------------------


def test_updates_per_epoch_holds_for_loaders() -> None:
    """Four batches in the loader; two epochs of three updates go on in it: 3, then 1 and 2 of the next pass."""
    train = Noted(list(loader(X, Y)))
    once(train, loader(X, Y), updates_per_epoch=3, epochs=2)
    assert train.given == 6
    train = Noted(list(loader(X, Y)))
    once(train, loader(X, Y), epochs=2)
    assert train.given == 8


def test_streams_have_epochs_when_their_length_is_given() -> None:
    stream = DataLoader(Stream(), batch_size=16)
    once(stream, DataLoader(Stream(), batch_size=16), updates_per_epoch=7, epochs=2)
    refused("has no length: pass updates_per_epoch=", lambda: once(stream, loader(X, Y)))


@pytest.mark.parametrize("which", ["train", "val", "test_data"])
def test_what_can_be_read_only_once_is_refused(which: str) -> None:
    data: dict[str, Any] = {"train": loader(X, Y), "val": loader(X, Y), which: (batch for batch in loader(X, Y))}
    refused("can be read only once", lambda: once(**data, updates_per_epoch=2))


# -- batches -----------------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.out = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.out(self.hidden(torch.cat([first, second], 1)).relu())


def test_the_last_of_several_is_the_target() -> None:
    data = DataLoader(TensorDataset(X, X.flip(1), Y), batch_size=16)
    grown = once(data, data, test_data=data, model=Two(), slots=["hidden"])
    pairs = [((x, x.flip(1)), y) for x, y in loader(X, Y)]
    assert grown.validation == once(pairs, pairs, model=Two(), slots=["hidden"]).validation


def test_arrays_in_loaders() -> None:
    arrays = [(x.numpy().astype(np.float64), y.numpy().astype(np.int32)) for x, y in loader(X, Y)]
    assert once(arrays, arrays).validation == once(loader(X, Y), loader(X, Y)).validation


def test_frames_and_series() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": X[:, 0].double().numpy(), "b": X[:, 1].numpy()})
    series = pandas.Series(Y.numpy())
    assert once((frame, series), (frame, series)).validation == once().validation
    parts = [(frame.iloc[i : i + 16], series.iloc[i : i + 16]) for i in range(0, 64, 16)]
    assert once(parts, parts).validation == once(loader(X, Y), loader(X, Y)).validation
    mixed = frame.assign(flag=Y.numpy() > 0)
    once((mixed, series), (mixed, series), model=nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)))
    town = frame.assign(town="Bern")
    refused(
        "train inputs have columns that are not numbers, 'town': encode", lambda: once((town, series), (frame, series))
    )
    missing = frame.assign(a=[None, *frame["a"][1:]])
    refused("NaN", lambda: once((missing, series), (frame, series)))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": X, "y": Y}, "a dict of x, y: put the targets under 'labels'"),
        ({"labels": ["a"]}, "'labels' .*list"),
        ((X, "label"), "Tensor, str$"),
        (X, "gave a Tensor"),
        ((X, np.array(["a"] * 64)), "val targets are an array of"),
    ],
)
def test_batches_that_cannot_be_used_are_named(batch: Any, message: str) -> None:
    refused(message, lambda: once([batch], [batch]))


def test_several_inputs_need_a_loader() -> None:
    refused(r"3 tensors.*TensorDataset", lambda: once((X, X, Y), (X, X, Y)))
    refused(r"\(tuple of inputs, targets\).* give a DataLoader", lambda: once(((X, X), Y), ((X, X), Y)))


# -- a batch of one ----------------------------------------------------------------------------------------------


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x)).relu().mean((2, 3)))


def test_a_last_batch_of_one_in_front_of_a_batch_norm() -> None:
    data = rings(33, 0)
    train = DataLoader(TensorDataset(*data), batch_size=16)
    before = Noted(train)
    refused("last batch .* 1 example.*drop_last=True", lambda: once(train, train, model=normed()))
    refused("a batch of 1 example.*drop_last=True", lambda: once(before, train, model=normed()))
    stream = DataLoader(Stream(*data), batch_size=16)
    refused("a batch of 1 example", lambda: once(stream, train, model=normed(), updates_per_epoch=3))
    refused("batch_size=", lambda: once(model=normed(), batch_size=1))
    once(DataLoader(TensorDataset(*data), batch_size=16, drop_last=True), train, model=normed())
    once(train, train)  # nothing here minds


def test_a_batch_norm_of_images_takes_one_image() -> None:
    x = torch.randn(17, 1, 6, 6)
    train = DataLoader(TensorDataset(x, torch.arange(17) % 3), batch_size=8)
    once(train, train, model=Images(), slots=["conv"])


# -- models of Hugging Face ----------------------------------------------------------------------------------------

SYMBOLS = torch.randint(11, (32, 7), generator=torch.Generator().manual_seed(0))


def classifier(labels: int = 3) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, num_labels=labels,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config)


def language_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def dicts(labels: Tensor, **more: Tensor) -> list[dict[str, Tensor]]:
    rows = [slice(i, i + 8) for i in range(0, 32, 8)]
    return [
        {"input_ids": SYMBOLS[r], **{key: value[r] for key, value in more.items()}, "labels": labels[r]} for r in rows
    ]


def grown_language_model(labels: Tensor, **changes: Any) -> esper.Grown:
    train = dicts(labels)
    settings: dict[str, Any] = {"model": language_model(), "slots": ["transformer.h.*"], "epochs": 2}
    return once(train, train, **{**settings, **changes})


def test_a_classifier_of_hugging_face_grows_on_its_own_batches(tmp_path: Any) -> None:
    labels = SYMBOLS[:, 0] % 3
    train = dicts(labels, attention_mask=torch.ones_like(SYMBOLS))
    grown = once(train, train, model=classifier(), slots=["bert.encoder.layer.*"], test_data=train, control=True)
    with torch.no_grad():
        found = grown.model(input_ids=SYMBOLS, labels=labels)
    assert grown.validation.loss == pytest.approx(found.loss.item(), abs=1e-5)
    assert grown.validation.accuracy == pytest.approx(100 * (found.logits.argmax(1) == labels).float().mean().item())
    assert "labels" not in grown.example
    grown.save(tmp_path)


def test_a_language_model_of_hugging_face_shifts_its_labels_itself() -> None:
    labels = SYMBOLS.clone()
    labels[:, 5:] = -100
    grown = grown_language_model(labels)
    with torch.no_grad():
        found = grown.model(input_ids=SYMBOLS, labels=labels)
    logs = found.logits[:, :4].log_softmax(-1).gather(2, labels[:, 1:5, None]).squeeze(2)
    assert grown.validation.loss == pytest.approx(found.loss.item(), abs=1e-5)
    assert grown.validation.accuracy == pytest.approx(100 * logs.mean(1).exp().mean().item(), abs=1e-3)


def test_seeds_grow_in_a_language_model_of_hugging_face() -> None:
    from esper.policy.schedule import FixedSchedule, Planting

    plan = FixedSchedule("test", [Planting(1, 1, {"sequence": "mlp"})])
    grown = grown_language_model(SYMBOLS, controller=plan, epochs=6)
    assert grown.parameters > grown.history.host_parameters
    with torch.no_grad():
        loss = grown.model(input_ids=SYMBOLS, labels=SYMBOLS).loss
    assert grown.validation.loss == pytest.approx(loss.item(), abs=1e-5)


def test_labels_that_nothing_tells_how_to_compare_need_a_metric() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = language_model()

        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            outputs = self.model(input_ids=input_ids, labels=labels)
            if labels is not None:
                outputs.loss = outputs.loss + 1.0
            return outputs

    settings = {"model": Penalised(), "slots": ["model.transformer.h.1"]}
    refused("pass metric=", lambda: grown_language_model(SYMBOLS, **settings))
    of_a_batch = lambda o, t: 100.0 * torch.exp(-o.loss)  # noqa: E731
    refused("only the logits are joined", lambda: grown_language_model(SYMBOLS, metric=of_a_batch, **settings))
    next_right = lambda o, t: 100.0 * (o.logits[:, :-1].argmax(2) == t[:, 1:]).float().mean(1)  # noqa: E731
    assert 0.0 < grown_language_model(SYMBOLS, metric=next_right, **settings).validation.accuracy < 100.0


def test_several_labels_of_hugging_face() -> None:
    model = classifier()
    model.config.problem_type = "multi_label_classification"
    many = F.one_hot(SYMBOLS[:, 0] % 3, 3).float()
    grown = once(dicts(many), dicts(many), model=model, slots=["bert.encoder.layer.*"])
    with torch.no_grad():
        logits = grown.model(input_ids=SYMBOLS).logits
    assert grown.validation.accuracy == pytest.approx(
        100 * ((logits > 0) == (many > 0)).float().mean().item(), abs=1e-3
    )


def test_values_of_hugging_face_are_a_column() -> None:
    model = classifier(labels=1)
    values = SYMBOLS.float().mean(1)
    grown = once(dicts(values), dicts(values), model=model, slots=["bert.encoder.layer.*"])
    with torch.no_grad():
        found = grown.model(input_ids=SYMBOLS).logits[:, 0]
    wanted = 100 * (1 - (found - values).square().mean() / values.var(unbiased=False)).item()
    assert grown.validation.accuracy == pytest.approx(wanted, abs=1e-2)


def test_outputs_with_logits_serve_with_targets_beside_them() -> None:
    labels = SYMBOLS[:, 0] % 3
    pairs = [({"input_ids": batch["input_ids"]}, batch["labels"]) for batch in dicts(labels)]
    grown = once(pairs, pairs, model=classifier(), slots=["bert.encoder.layer.*"])
    with torch.no_grad():
        logits = grown.model(input_ids=SYMBOLS).logits
    assert grown.validation.accuracy == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    right = lambda o, t: 100.0 * (o.logits.argmax(1) == t).float().mean()  # noqa: E731
    whole = once(pairs, pairs, model=classifier(), slots=["bert.encoder.layer.*"], metric=right)
    assert whole.validation.accuracy == pytest.approx(grown.validation.accuracy)


def test_a_plain_model_does_not_get_labels_it_has_no_argument_for() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(11, 8), nn.Linear(8, 3)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.out(self.embedding(input_ids).mean(1))

    labels = SYMBOLS[:, 0] % 3
    grown = once(dicts(labels), dicts(labels), model=Plain(), slots=["embedding"])
    assert 0.0 <= grown.validation.accuracy <= 100.0
