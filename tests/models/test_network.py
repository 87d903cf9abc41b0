"""What all our networks share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.errors import BadInput
from overt.models.network import Network
from overt.models.output import Model, Output


class Counted(Network[Tensor]):
    """Classes from how many tokens there are."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.decision = nn.Linear(1, classes)

    def encode(self, batch: Batch) -> Tensor:
        assert batch.token_mask is not None
        return batch.token_mask.sum(dim=1, keepdim=True).float()

    def decide(self, features: Tensor, mask: Mapping[str, Tensor] | None = None) -> Output:
        return Output(self.decision(features))

    def config(self) -> dict[str, Any]:
        return {"classes": self.decision.out_features}


def batch() -> Batch:
    tokens = torch.tensor([[3, 4, 0], [5, 6, 7]])
    return Batch(ids=("a", "b"), tokens=tokens, token_mask=tokens > 0)


def test_calling_a_network_is_to_see_and_decide() -> None:
    network = Counted(3)
    assert isinstance(network, Model)
    seen = network.decide(network.encode(batch()))
    assert torch.equal(network(batch()).prediction, seen.prediction)


def test_a_network_is_read_as_it_was_written_and_in_eval_mode(tmp_path: Path) -> None:
    network = Counted(3).train()
    network.save_pretrained(tmp_path / "net")
    again = Counted.from_pretrained(tmp_path / "net")
    assert not again.training and type(again) is Counted
    assert torch.equal(again(batch()).prediction, network(batch()).prediction)


def test_a_folder_without_a_network_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"config\.json is missing"):
        Counted.from_pretrained(tmp_path)


def test_a_network_that_leaves_a_step_out_cannot_be_made() -> None:
    class Blind(Network[Tensor]):
        def encode(self, batch: Batch) -> Tensor:
            return torch.zeros(1)

    with pytest.raises(TypeError, match="abstract"):
        Blind()  # type: ignore[abstract]
