"""Networks of Learn to Pay Attention built from a config."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overt.errors import UserError
from overt.papers.ltpa.config import LtpaDecision, LtpaModel, LtpaNetwork
from overt.papers.ltpa.model import build_network, load_start_weights, start_folder
from overt.papers.ltpa.resnet import ResNet, ResNetAttention
from overt.papers.ltpa.vgg import VGG, VGGAttention, VGGGap, VGGProgressive
from overt.testing import toy_batch


def test_start_folder_fills_in_row_and_seed() -> None:
    plan = LtpaModel(levels=3, start="runs/cifar100-{row}/seed-{seed}")
    assert start_folder(plan, 2) == Path("runs/cifar100-att3-concat-pc/seed-2")
    assert start_folder(LtpaModel(start="runs/mine"), 2) == Path("runs/mine")
    with pytest.raises(UserError, match=r"\{row\}"):
        start_folder(LtpaModel(decision=LtpaDecision.PRODUCT, start="{row}"), 0)


@pytest.mark.parametrize(
    ("net", "kind"),
    [
        (LtpaNetwork.VGG, VGG),
        (LtpaNetwork.GAP, VGGGap),
        (LtpaNetwork.PAN, VGGProgressive),
        (LtpaNetwork.RESNET, ResNet),
        (LtpaNetwork.VGG_ATTENTION, VGGAttention),
        (LtpaNetwork.RESNET_ATTENTION, ResNetAttention),
    ],
)
def test_build_network_returns_the_configured_class(
    net: LtpaNetwork, kind: type[nn.Module]
) -> None:
    built = build_network(LtpaModel(net, levels=3, width=0.05, blocks=1, dropout=0.1), 7)
    assert isinstance(built, kind)
    assert built(toy_batch()).prediction.shape == (4, 7)
    config: dict[str, Any] = built.config()  # type: ignore[operator]
    if "sizes" in config:
        assert config["sizes"]["dropout"] == {"first": 0.0, "inside": 0.0, "linear": 0.1}
    else:
        assert config["depth"]["blocks"] == 1
    if "levels" in config:
        assert (config["levels"], config["score"], config["decision"]) == (
            3,
            "parametrised",
            "concat",
        )


@pytest.mark.parametrize("kind", list(LtpaNetwork))
def test_start_weights_are_loaded_except_the_decision(kind: LtpaNetwork, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plan = LtpaModel(kind, width=0.05, blocks=1)
    before: Any = build_network(plan, 7)
    before.save_pretrained(tmp_path / "run" / "model")
    torch.manual_seed(1)
    after = build_network(plan, 3)
    own = {name: one.clone() for name, one in after.state_dict().items()}
    load_start_weights(after, tmp_path / "run")
    theirs, kept = before.state_dict(), 0
    for name, one in after.state_dict().items():
        if "decision" in name.split("."):
            assert torch.equal(one, own[name])
            kept += 1
        else:
            assert torch.equal(one, theirs[name]), name
    assert kept == 2
    again = build_network(plan, 3)
    load_start_weights(again, tmp_path / "run" / "model")  # a model folder works too


def test_start_weights_of_another_network_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no network"):
        load_start_weights(build_network(LtpaModel(width=0.05), 3), tmp_path)
    saved: Any = build_network(LtpaModel(width=0.05), 3)
    saved.save_pretrained(tmp_path / "model")
    for other in (
        LtpaModel(width=0.1),
        LtpaModel(LtpaNetwork.VGG, width=0.05),
        LtpaModel(levels=3, width=0.05),
    ):
        with pytest.raises(UserError, match="another network"):
            load_start_weights(build_network(other, 3), tmp_path)
