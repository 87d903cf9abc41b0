"""Building blocks of experiments: attention monitoring, limits, validation, augmentation."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from overt import io
from overt.errors import UserError
from overt.experiments import builders, evaluate
from overt.experiments.baselines import build_vqa_model
from overt.experiments.builders import attention_monitor, fit_config
from overt.experiments.recipe import Precision, RunContext, TrainConfig
from overt.experiments.scenes_recipes import ScenesVqaModel
from overt.testing import toy_batch
from tests.experiments import tiny

# Attention monitoring


def logged_layers(out: Path) -> list[dict[str, Any]]:
    """Return the lines of the log with attention statistics."""
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [one for one in rows if "layers" in one]


@pytest.mark.long
def test_watching_attention_logs_it_and_does_not_change_training(
    finished_run: Callable[..., tuple[Path, dict[str, Any]]],
) -> None:
    (plain, _), (watched, _) = (
        finished_run("scenes-soft"),
        finished_run("scenes-soft", "train.watch=1"),
    )
    assert not logged_layers(plain)
    found = logged_layers(watched)
    assert [one["step"] for one in found] == [1, 2]
    assert {*found[0]["layers"]["entropy"]} == {"0 image", "1 text"}
    one, other = (run / "model/model.safetensors" for run in (plain, watched))
    assert one.read_bytes() == other.read_bytes()
    assert "attention entropy by layer" in (watched / "report.html").read_text()


def test_watching_a_model_without_attention_raises(
    few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny.use_small_readers(monkeypatch)
    recipe = tiny.recipe("cifar10-cnn", "train.watch=5")
    with pytest.raises(UserError, match=r"train\.watch=5.*=0"):
        tiny.run(recipe, tmp_path / "run", data_root=few)


def test_watching_restores_the_model() -> None:
    net = build_vqa_model(ScenesVqaModel(width=0.1), 12, 3)
    monitor = attention_monitor(TrainConfig(watch=1))
    assert monitor is not None and attention_monitor(TrainConfig()) is None
    batch = toy_batch(2)
    for forward in (lambda: net(batch), lambda: net.decide(net.encode(batch))):
        with monitor.observe(net) as stats:
            forward()
        assert {*stats.compute()["entropy"]} == {"0 image", "1 text"}
    assert "decide" not in vars(net)


@pytest.mark.long
@pytest.mark.parametrize("family", ["ltpa", "ssa", "han", "vgp", "a2"])
def test_every_model_family_can_be_watched(family: str, tmp_path: Path) -> None:
    sets = ("train.watch=1", "train.steps=1", "data.limit=4")
    tiny.run(tiny.recipe(f"{family}-scenes", *sets), tmp_path / "run")
    found = logged_layers(tmp_path / "run")
    assert found and all(one["layers"]["entropy"] for one in found)


# Parts


def test_fit_config_gets_every_limit() -> None:
    plan = TrainConfig(3, 7, 5, 2, patience=4, save_every=9, workers=1, precision=Precision.BF16)
    found = fit_config(plan)
    assert (found.epochs, found.steps, found.batch, found.accumulate) == (3, 7, 5, 2)
    assert (found.patience, found.save_every, found.workers, found.bf16) == (4, 9, 1, True)
    assert not fit_config(TrainConfig()).bf16


@pytest.mark.long
def test_early_stopping_uses_validation_accuracy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With patience, the weights with the best validation accuracy are tested."""
    values = iter([0.5, 0.9, 0.1, 0.1, 0.1])
    monkeypatch.setattr(evaluate.Evaluator, "accuracy", lambda *args: next(values))
    sets = ("train.patience=1", "train.steps=9", "train.epochs=9")
    results = tiny.run(tiny.recipe("scenes-none", *sets), tmp_path / "a")
    assert results["steps"] == 4  # stopped after two steps without a new best value
    best = io.read_tensors(tmp_path / "a/checkpoints/train/best/model.safetensors")
    last = io.read_tensors(tmp_path / "a/model/model.safetensors")
    assert all(torch.equal(best[name], last[name]) for name in last)


def test_augmentation_uses_the_gpu_generator_only_in_a_cuda_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CUDA graph would repeat numbers drawn on the CPU."""

    class OnGpu(torch.Tensor):
        is_cuda = True

        def get_device(self) -> int:
            return 1

    here = toy_batch()
    assert here.images is not None
    there = replace(here, images=here.images.as_subclass(OnGpu))
    streams = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", streams)
    before = torch.get_rng_state()
    assert builders.augmentation_generator(there, graphed=True) is streams[1]
    assert torch.equal(torch.get_rng_state(), before), "the CPU generator must not advance"
    for batch, graphed in ((here, True), (here, False), (there, False)):
        torch.manual_seed(3)
        seed = int(torch.randint(2**31, ()))
        torch.manual_seed(3)
        assert builders.augmentation_generator(batch, graphed).initial_seed() == seed


# What the user's model and dataset need


def test_a_model_or_a_dataset_without_the_needed_members_raises() -> None:
    class Rows:
        """A complete dataset."""

        name, split = "rows", "train"

        def __len__(self) -> int:
            return 3

        def batch(self, indices: Any) -> Any:
            return toy_batch(3)

        def digest(self) -> str:
            return "rows"

    test = evaluate.Evaluator(Rows(), ("a", "b"))
    context = RunContext(Path("none"), device="cpu")
    with pytest.raises(UserError, match="Linear .*encode"):
        builders.classification_experiment(
            torch.nn.Linear(2, 2), Rows(), None, test, TrainConfig(), context
        )
    with pytest.raises(UserError, match="lacks version"):
        builders.check_members(Rows(), "a dataset", ("name", "version"), "see data.Dataset")
    builders.check_members(Rows(), "a dataset", ("name", "digest"), "see data.Dataset")
