"""Which modules may attend, by the names in their code."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import softmax as imported

from overt.capture.code_inspection import may_attend
from tests.capture.families import family
from tests.capture.toys import FusedAttention, Stack, WrittenAttention


def helper(x: Tensor) -> Tensor:
    return x.softmax(-1)


def decorated(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def around(x: Tensor) -> Tensor:
        return function(x) * 2

    return around


nested = decorated(helper)
renamed = partial(helper)


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.mT


class Method(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.weigh(x) @ x

    def weigh(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class Inherited(Method):
    def forward(self, x: Tensor) -> Tensor:
        return self.weigh(x)


class Helper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return helper(x) @ x


class Decorated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nested(x) @ x


class Partial(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return renamed(x) @ x


class Imported(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return imported(x, -1) @ x


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function = F.softmax

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, -1) @ x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weigh = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.weigh(x) @ x


@pytest.mark.parametrize(
    "kind",
    [
        Method,
        Inherited,
        Helper,
        Decorated,
        Partial,
        Imported,
        Attribute,
        Layer,
        FusedAttention,
        WrittenAttention,
    ],
)
def test_softmax_and_attention_are_found_in_code(kind: type[nn.Module]) -> None:
    assert may_attend(kind())


def test_other_code_does_not_attend() -> None:
    for module in (Plain(), nn.Linear(2, 2), Stack(Plain()), nn.LayerNorm(2)):
        assert not may_attend(module)


def test_torchscript_may_attend() -> None:
    assert may_attend(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)))


@pytest.mark.parametrize("name", ["BERT", "ViT"])
def test_few_modules_of_a_transformer_may_attend(name: str) -> None:
    model = family(name).build("sdpa")
    found = {type(one).__name__ for one in model.modules() if may_attend(one)}
    assert all("Attention" in name for name in found), found
