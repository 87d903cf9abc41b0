"""`Network`: calling, saving, loading, abstract methods."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.errors import UserError
from overt.nn.network import Network
from overt.nn.output import AttentionModel, Output


class TokenCounter(Network[Tensor]):
    """Classify by the number of tokens."""

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


def test_call_equals_encode_and_decide() -> None:
    network = TokenCounter(3)
    assert isinstance(network, AttentionModel)
    seen = network.decide(network.encode(batch()))
    assert torch.equal(network(batch()).prediction, seen.prediction)


def test_loaded_network_is_equal_and_in_eval_mode(tmp_path: Path) -> None:
    network = TokenCounter(3).train()
    network.save_pretrained(tmp_path / "net")
    again = TokenCounter.from_pretrained(tmp_path / "net")
    assert not again.training and type(again) is TokenCounter
    assert torch.equal(again(batch()).prediction, network(batch()).prediction)


def test_folder_without_a_network_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config.*missing"):
        TokenCounter.from_pretrained(tmp_path)


def test_network_without_decide_is_abstract() -> None:
    class WithoutDecide(Network[Tensor]):
        def encode(self, batch: Batch) -> Tensor:
            return torch.zeros(1)

    with pytest.raises(TypeError, match="abstract"):
        WithoutDecide()  # type: ignore[abstract]
