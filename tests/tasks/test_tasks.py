"""The registry, and what each task promises: disjoint splits, stable for a seed, balanced, and a host that learns."""

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.tasks import Task, load_task, percent_correct, registry, task, task_names, task_options
from esper.tasks.cifar10 import CLASSES, MEAN, STD
from esper.tasks.feed import TensorFeed
from esper.tasks.mnist1d import LENGTH, TEMPLATES, _interpolate, _smooth
from esper.tasks.stories import write_stories
from esper.tasks.text import MOST_SYMBOLS, UNKNOWN, encode_text, window_splits
from small_worlds import stages_of

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
GENERATED = ("mnist1d", "digits", "stories")  # tasks that need no file


def rows(x: torch.Tensor) -> set[bytes]:
    return {row.tobytes() for row in x.numpy()}


@pytest.mark.parametrize("name", GENERATED)
def test_splits_share_no_example(name):
    splits = load_task(name).splits
    train, val, test = rows(splits.train.x), rows(splits.val.x), rows(splits.test.x)
    assert not train & val
    assert not train & test
    assert not val & test


@pytest.mark.parametrize("name", GENERATED)
def test_the_seed_alone_decides_the_data(name):
    state, numpy_state = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    first = load_task(name, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    torch.rand(3)
    again, other = load_task(name, seed=3), load_task(name, seed=4)
    for part in ("train", "val", "test"):
        a, b, c = (getattr(t.splits, part) for t in (first, again, other))
        assert torch.equal(a.x, b.x)
        assert torch.equal(a.y, b.y)
        assert not torch.equal(a.y[:200], c.y[:200])


@pytest.mark.parametrize("name", GENERATED)
def test_the_host_fits_the_data_and_learns(name):
    loaded = load_task(name)
    torch.manual_seed(0)
    host = loaded.make_host()
    assert list(loaded.slots) == stages_of(host)
    optimizer = torch.optim.AdamW(host.parameters(), lr=loaded.learning_rate, weight_decay=loaded.weight_decay)
    feed = TensorFeed(loaded.splits.train, loaded.splits.val, batch_size=loaded.batch_size)
    losses = []
    for _ in range(40):
        x, y = feed.next_batch()
        assert len(x) == loaded.batch_size
        loss = loaded.loss(host(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # Untrained, a host is near chance: log(classes).
    assert losses[0] == pytest.approx(np.log(len(loaded.labels)), rel=0.15)
    assert np.mean(losses[-5:]) < losses[0] - 0.2
    outputs = host(loaded.splits.val.x[:8])
    assert outputs.shape[-1] == len(loaded.labels)
    assert loaded.score(outputs, loaded.splits.val.y[:8]).shape == (8,)


def test_scores_worked_by_hand():
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert percent_correct(outputs, torch.tensor([1, 1, 1])).tolist() == [100.0, 0.0, 100.0]
    sequences = torch.nn.functional.one_hot(torch.tensor([[0, 1, 1, 0]]), 2).float()
    assert percent_correct(sequences, torch.tensor([[0, 1, 0, 0]])).tolist() == [75.0]


def test_loss_worked_by_hand():
    # −log softmax: of equal logits log 2; of (0, log 3) with the second as target log(4/3)
    outputs = torch.tensor([[0.0, 0.0], [0.0, np.log(3.0)]])
    expected = (np.log(2.0) + np.log(4.0 / 3.0)) / 2
    assert registry.cross_entropy(outputs, torch.tensor([0, 1])).item() == pytest.approx(expected)
    assert registry.cross_entropy(outputs[None], torch.tensor([[0, 1]])).item() == pytest.approx(expected)


class TestRegistry:
    def test_all_tasks_are_known(self):
        assert task_names() == ("cifar10", "digits", "mnist1d", "stories", "text")
        assert task_options("cifar10") == ("data_dir", "widths", "kernels", "augment")

    def test_a_misspelt_name_is_answered_with_the_nearest(self):
        with pytest.raises(
            ValueError, match=r"unknown task 'minst1d' \(did you mean 'mnist1d'\?\); the tasks are cifar10"
        ):
            load_task("minst1d")

    def test_an_option_that_the_task_does_not_have_is_refused(self):
        with pytest.raises(ValueError, match=r"'mnist1d' has no option 'width' \(did you mean 'widths'\?\)"):
            load_task("mnist1d", width=3)
        with pytest.raises(ValueError, match="'digits' has no option 'data_dir'"):
            load_task("digits", data_dir="somewhere")
        with pytest.raises(ValueError, match="'cifar10' has no option 'text_file'"):
            load_task("cifar10", text_file="a.txt")

    def test_a_new_task_is_one_function(self, monkeypatch):
        monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

        @task("tiny")
        def tiny(seed: int, *, size: int = 4) -> Task:
            """A task for this test."""
            return load_task("mnist1d", seed=seed, widths=[size] * 3)

        assert "tiny" in task_names()
        assert load_task("tiny", size=5).make_host().config["widths"] == [5, 5, 5]
        with pytest.raises(ValueError, match="registered already"):
            task("tiny")(tiny)

    def test_augmenting_what_is_no_image_is_refused(self):
        import dataclasses

        with pytest.raises(ValueError, match="not images"):
            dataclasses.replace(load_task("mnist1d"), augment=True)
        with pytest.raises(ValueError, match="at least 1"):
            dataclasses.replace(load_task("mnist1d"), batch_size=0)


class TestMnist1d:
    def test_sizes_and_balance(self):
        splits = load_task("mnist1d").splits
        for split, size in ((splits.train, 3_000), (splits.val, 1_000), (splits.test, 1_000)):
            assert split.x.shape == (size, 1, LENGTH)
            assert split.x.dtype == torch.float32
            assert torch.bincount(split.y).tolist() == [size // 10] * 10

    def test_interpolation_worked_by_hand(self):
        curve = np.array([[2.0, 4.0, 3.0]])
        at = np.array([[-9.0, -0.5, 0.0, 0.25, 1.5, 2.0, 2.5, 3.0, 50.0]])
        # zero outside; half way from 0 to 2; …; half way from 3 to 0
        assert _interpolate(curve, at).tolist() == [[0.0, 1.0, 2.0, 2.5, 3.5, 3.0, 1.5, 0.0, 0.0]]

    def test_smooth_noise_has_unit_variance_and_correlated_neighbours(self):
        noise = _smooth(np.random.default_rng(0).standard_normal((4_000, LENGTH)))
        assert noise.std() == pytest.approx(1.0, abs=0.02)
        neighbours = (noise[:, 1:] * noise[:, :-1]).mean()
        assert neighbours == pytest.approx(np.exp(-1 / 16), abs=0.03)  # exp(−d²/4σ²) for d = 1, σ = 2
        assert abs((noise[:, 20:] * noise[:, :20]).mean()) < 0.03

    def test_templates_differ_by_more_than_the_noise(self):
        distances = np.linalg.norm(TEMPLATES[:, None] - TEMPLATES[None], axis=2) + 9 * np.eye(10)
        assert distances.min() > 1.0


class TestDigits:
    def test_all_images_are_used_once_and_balanced(self):
        splits = load_task("digits").splits
        assert len(splits.train) + len(splits.val) + len(splits.test) == 1_797
        for split in (splits.train, splits.val, splits.test):
            share = torch.bincount(split.y, minlength=10) / len(split)
            assert float((share - 0.1).abs().max()) < 0.01


class TestText:
    TEXT = "the quick brown fox jumps over the lazy dog. " * 3 + "0123456789" * 2

    def test_targets_are_the_inputs_shifted_by_one(self, tmp_path):
        file = tmp_path / "a.txt"
        file.write_text("".join(chr(97 + (i * i + i // 7) % 26) for i in range(4_000)), encoding="utf-8")
        loaded = load_task("text", text_file=file, context=16)
        for split in (loaded.splits.train, loaded.splits.val, loaded.splits.test):
            assert split.x.shape[1] == 16
            assert split.x.dtype == torch.int64
            assert torch.equal(split.x[:, 1:], split.y[:, :-1])
        text = file.read_text(encoding="utf-8")
        x, y = loaded.splits.val.x[0], loaded.splits.val.y[0]
        window = "".join(loaded.labels[i] for i in [*x.tolist(), int(y[-1])])
        assert window in text
        assert not rows(loaded.splits.train.x) & rows(loaded.splits.val.x)

    def test_encoding_can_be_read_back(self):
        indices, symbols = encode_text(self.TEXT)
        assert "".join(symbols[i] for i in indices) == self.TEXT
        assert symbols == tuple(sorted(set(self.TEXT)))

    def test_rare_characters_become_one_symbol(self):
        common = "".join(chr(0x4E00 + i) for i in range(400))
        indices, symbols = encode_text(common * 2 + "ab" * 50 + "\N{GRINNING FACE}")
        assert len(symbols) == MOST_SYMBOLS
        assert {"a", "b", UNKNOWN} <= set(symbols)
        assert int(indices.max()) < MOST_SYMBOLS
        assert symbols[indices[-1]] == UNKNOWN

    def test_repeated_windows_are_kept_once(self):
        indices = np.concatenate([np.arange(30), np.tile([1, 2, 3], 5), np.arange(30, 60)])
        splits = window_splits(indices, 2, 0, "x")
        everything = torch.cat([splits.train.x, splits.val.x, splits.test.x])
        assert len(everything) == len(rows(everything)) == 21  # 20 windows of 3 in 0…59, and one of the five repeats

    @pytest.mark.parametrize(
        ("content", "message"),
        [(b"short", "at least 10 are needed"), (b"\xff\xfe\x00abc" * 99, "is not UTF-8 text"), (b"", "at least 10")],
    )
    def test_unusable_files_are_refused(self, tmp_path, content, message):
        file = tmp_path / "a.txt"
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            load_task("text", text_file=file)
        assert str(file) in str(error.value)

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nowhere\.txt cannot be read"):
            load_task("text", text_file=tmp_path / "nowhere.txt")
        with pytest.raises(ValueError, match="--text-file"):
            load_task("text")

    @pytest.mark.skipif(not (SHARED / "tinyshakespeare.txt").exists(), reason="shared/data is not on this machine")
    def test_a_real_text(self):
        loaded = load_task("text", text_file=SHARED / "tinyshakespeare.txt")
        assert len(loaded.labels) == 65
        assert len(loaded.splits.val) == len(loaded.splits.test) == 512

    def test_stories_are_stable_and_refer_back(self):
        assert write_stories(5, 1) == write_stories(5, 1) != write_stories(5, 2)
        assert "{" not in write_stories(500, 0)
        story = write_stories(1, 7)
        names = [word.strip('.,!"') for word in story.split() if word[0].isupper()]
        assert len(set(names)) < len(names)


def write_cifar(folder: Path, counts: dict[str, int]) -> None:
    """Files of the standard layout: image i of a file has label i % 10 and all pixels i % 256, red plane + 1."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in counts.items():
        planes = (bytes([(i + 1) % 256]) * 1024 + bytes([i % 256]) * 2048 for i in range(count))
        records = (struct.pack("B", i % 10) + pixels for i, pixels in enumerate(planes))
        (folder / name).write_bytes(b"".join(records))


class TestCifar10:
    def test_reads_the_standard_layout(self, tmp_path):
        write_cifar(
            tmp_path / "cifar-10-batches-bin", {"data_batch_1.bin": 60, "data_batch_2.bin": 40, "test_batch.bin": 20}
        )
        for data_dir in (tmp_path, tmp_path / "cifar-10-batches-bin"):
            loaded = load_task("cifar10", data_dir=data_dir)
            assert [len(s) for s in (loaded.splits.train, loaded.splits.val, loaded.splits.test)] == [90, 10, 20]
            assert loaded.labels == CLASSES
        x, y = loaded.splits.test.x, loaded.splits.test.y
        assert y.tolist() == [i % 10 for i in range(20)]
        assert x.shape == (20, 3, 32, 32)
        assert x[7, 0, 5, 5].item() == pytest.approx((8 / 255 - MEAN[0]) / STD[0], rel=1e-5)
        assert x[7, 2, 31, 0].item() == pytest.approx((7 / 255 - MEAN[2]) / STD[2], rel=1e-5)
        assert torch.bincount(loaded.splits.val.y, minlength=10).tolist() == [1] * 10
        outputs = loaded.make_host()(loaded.splits.train.x[:1].expand(128, -1, -1, -1))
        assert outputs.shape == (128, 10)

    def test_the_variable_names_the_folder(self, tmp_path, monkeypatch):
        write_cifar(tmp_path, {"data_batch_1.bin": 100, "test_batch.bin": 10})
        monkeypatch.setenv("ESPER_DATA_DIR", str(tmp_path))
        assert len(load_task("cifar10").splits.test) == 10

    def test_absent_files_are_an_error_that_says_where_and_whence(self, tmp_path, monkeypatch):
        monkeypatch.delenv("ESPER_DATA_DIR", raising=False)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(FileNotFoundError, match=r"cifar-10-binary\.tar\.gz") as error:
            load_task("cifar10")
        assert str(tmp_path / "data") in str(error.value)
        assert "\n" not in str(error.value)

    def test_damaged_files_are_refused(self, tmp_path):
        write_cifar(tmp_path, {"data_batch_1.bin": 20, "test_batch.bin": 10})
        file = tmp_path / "data_batch_1.bin"
        good = file.read_bytes()
        file.write_bytes(good[:-1])
        with pytest.raises(ValueError, match=r"data_batch_1\.bin has 61459 bytes"):
            load_task("cifar10", data_dir=tmp_path)
        file.write_bytes(b"\x0b" + good[1:])
        with pytest.raises(ValueError, match="labels above 9"):
            load_task("cifar10", data_dir=tmp_path)

    @pytest.mark.skipif(not (SHARED / "cifar10-jpeg.npz").exists(), reason="shared/data is not on this machine")
    def test_real_images(self, tmp_path):
        pytest.importorskip("PIL", reason="the images are packed as JPEG")
        script = [sys.executable, str(SHARED / "unpack_cifar10.py"), str(tmp_path), "--train", "1000", "--test", "200"]
        subprocess.run(script, check=True, capture_output=True)
        loaded = load_task("cifar10", data_dir=tmp_path)
        assert [len(s) for s in (loaded.splits.train, loaded.splits.val, loaded.splits.test)] == [900, 100, 200]
        # Real photographs, normalised by the data set's own statistics.
        assert loaded.splits.train.x.mean((0, 2, 3)).abs().max() < 0.15
        assert (loaded.splits.train.x.std((0, 2, 3)) - 1).abs().max() < 0.1
