"""Small runs of every task of Self Supervision for Attention Networks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overt import io, nn
from overt.errors import UserError
from overt.targets import Surrogates

RunFixture = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ssa-trec", nn.TextClassifier),
        ("ssa-cifar10", nn.AttentiveCNN),
        ("ssa-easyvqa", nn.VQA),
        ("ssa-scenes", nn.VQA),
        ("ssa-shapes", nn.AttentiveCNN),
    ],
)
def test_each_task_runs_and_reports_its_metrics(run: RunFixture, name: str, kind: Any) -> None:
    scenes = name in ("ssa-scenes", "ssa-shapes")
    more = ("data.train=4", "data.val=4", "data.test=4") if name == "ssa-scenes" else ()
    out, results = run(name, *more)
    assert results["status"] == "done" and results["steps"] == 4
    assert [one["split"] for one in results["data"]] == ["train", "val", "test"]
    ours = results["ours"]
    assert {"accuracy", "accuracy_before", "base_score", "best_score", "improved"} <= set(ours)
    assert ours["best_score"]["value"] >= ours["base_score"]["value"]
    assert 0 <= ours["improved"]["value"] <= 1
    assert ours[f"gamma_{'text' if name == 'ssa-trec' else 'image'}"]["value"] > 0
    assert ("pointing_before" in ours) is scenes
    assert ("deletion_overwritten" in ours) is (name == "ssa-trec")
    assert isinstance(kind.from_pretrained(out / "model"), kind)


@pytest.mark.long
def test_cropped_training_images_keep_the_targets_of_whole_images(run: RunFixture) -> None:
    out, results = run("ssa-cifar10", "data.vary=true", "supervise.loss=mse")
    assert results["status"] == "done" and results["ours"]["gamma_image"]["value"] > 0
    found = Surrogates(out / "surrogates")
    assert found.plan.key.data == results["data"][0]["hash"]


@pytest.mark.long
def test_supervision_over_both_reports_image_and_text(run: RunFixture) -> None:
    ours = run("ssa-easyvqa", "supervise.over=both")[1]["ours"]
    assert {"gamma_image", "gamma_text", "improved_image", "improved_text"} <= set(ours)
    assert {"whole_text_score", "two_words_score"} <= set(ours)


def test_targets_missing_from_a_task_are_rejected(run: RunFixture) -> None:
    with pytest.raises(UserError, match="truth over text"):
        run("ssa-trec", "supervise.target=truth")


@pytest.mark.long
def test_the_baseline_does_not_depend_on_the_loss(run: RunFixture, tmp_path: Path) -> None:
    found = []
    for loss in ("mse", "adversarial"):
        out, _ = run("ssa-trec", f"supervise.loss={loss}")
        found.append(io.read_tensors(out / "baseline/model.safetensors"))
        out.rename(tmp_path / loss)
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())
