"""Small networks for tests of attribution methods, and the state that methods must not change."""

from typing import Any

import torch
from torch import Tensor, nn

TARGET = torch.tensor([1, 3])


class Net(nn.Module):
    """Convolutions, global mean, one linear layer; norm and dropout reveal the training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.last = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.last(self.stem(x).relu()))
        return self.head(self.drop(x.mean(dim=(2, 3))))


class MeanReader(nn.Module):
    """Words, their mean without padding, and a nonlinear head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        shown = attention_mask[..., None].to(self.embed.weight)
        mean = (self.embed(input_ids) * shown).sum(dim=1) / shown.sum(dim=1)
        return self.head(self.mix(mean).tanh().square())


def padded_text(words: int, padding: int) -> dict[str, Tensor]:
    """Return one text with padding at its end."""
    length = words + padding
    there = torch.arange(length) < words
    tokens = (torch.arange(length) * 7 % 49 + 1) * there
    return {"input_ids": tokens[None], "attention_mask": there[None].long()}


def model_state(net: Net) -> dict[str, Any]:
    """Return all state that must be unchanged."""
    return {
        "modes": [module.training for module in net.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for m in net.modules()
        ],
        "gradients": [one.grad for one in net.parameters()],
        "wanting": [one.requires_grad for one in net.parameters()],
        "numbers": [one.clone().tolist() for one in (*net.parameters(), *net.buffers())],
        "random": torch.get_rng_state().tolist(),
    }
