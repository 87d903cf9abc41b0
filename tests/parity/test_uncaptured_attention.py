"""`watch` gives exact maps or an error with advice, however a model computes attention."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.capture import UncapturedAttentionError, watch
from overt.capture.call import Call
from tests.capture.families import family, lively, noise


class Layer(nn.Module):
    """Self-attention with four heads; subclasses compute the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def heads(self, x: Tensor) -> list[Tensor]:
        split = self.project(x).chunk(3, dim=-1)
        return [one.unflatten(-1, (4, 8)).transpose(1, 2) for one in split]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.heads(x)).transpose(1, 2).flatten(2)


class FusedAttention(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


class ExplicitAttention(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT / math.sqrt(8)).softmax(-1) @ value


class EinsumAttention(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(8)
        return torch.einsum("bhqk,bhkd->bhqd", F.softmax(scores, dim=-1), value)


class SwappedAttention(Layer):
    """An einsum with the values before the weights."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT / math.sqrt(8)).softmax(-1)
        return torch.einsum("bhkd,bhqk->bhqd", value, weights)


class FoldedAttention(Layer):
    """Heads folded into the batch."""

    num_heads = 4

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (one.flatten(0, 1) for one in (query, key, value))
        weights = torch.baddbmm(torch.zeros(1), query, key.mT, alpha=1 / math.sqrt(8)).softmax(-1)
        return torch.bmm(weights, value).unflatten(0, (-1, 4))


class ModularAttention(Layer):
    """Softmax and dropout as modules, with a cast of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.soft = nn.Softmax(dim=-1)
        self.drop = nn.Dropout(0.1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = self.drop(self.soft((query @ key.mT / math.sqrt(8)).float()))
        return weights.to(value.dtype) @ value


class PlainBlock(ExplicitAttention):
    """Attention in a class without "Attention" in its name."""


class ExponentialAttention(Layer):
    """A softmax computed with exponentials, which cannot be distinguished from other arithmetic."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT / math.sqrt(8)).exp()
        return (weights / weights.sum(-1, keepdim=True)) @ value


class LogSoftmaxAttention(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT / math.sqrt(8)).log_softmax(-1).exp() @ value


class ColumnAttention(Layer):
    """Scores with keys before queries, and the softmax over the keys."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (key @ query.mT / math.sqrt(8)).softmax(-2).mT @ value


class SigmoidAttention(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT).sigmoid() @ value


class SplitAttention(Layer):
    """The first two keys are multiplied separately, as in blocks with global tokens."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT / math.sqrt(8)).softmax(-1)
        return weights[..., :2] @ value[..., :2, :] + weights[..., 2:] @ value[..., 2:, :]


class ReversedSplitAttention(SplitAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT / math.sqrt(8)).softmax(-1)
        return weights[..., 2:] @ value[..., 2:, :] + weights[..., :2] @ value[..., :2, :]


class LeadingSinkAttention(Layer):
    """A sink before the keys."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT / math.sqrt(8)).softmax(-1)[..., 1:] @ value[..., 1:, :]


class LinearAttention(Layer):
    """Keys and values are multiplied first, so there is no map."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = F.elu(query) + 1, F.elu(key) + 1
        total = query @ key.sum(-2, keepdim=True).mT
        return query @ (key.mT @ value) / total


class Kernel(torch.autograd.Function):
    """A custom kernel with a custom backward pass."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            ctx.save_for_backward(query, key, value)
            return (query @ key.mT / math.sqrt(8)).softmax(-1) @ value

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, ...]:
        return ctx.saved_tensors


class KernelAttention(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return Kernel.apply(query, key, value)


class Experts(nn.Module):
    """A softmax over experts and a product with their outputs, which is not attention."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.experts = nn.Parameter(torch.randn(4, 32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        best, which = share.topk(2)
        chosen = torch.einsum("bnd,edf->bnef", x, self.experts).gather(
            2, which[..., None].expand(*which.shape, 32)
        )
        return (best[..., None] * chosen).sum(2)


class SoftExperts(Experts):
    """All experts, weighted in one product."""

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        outputs = torch.einsum("bnd,edf->bnef", x, self.experts)
        return torch.einsum("bne,bnef->bnf", share, outputs)


class Model(nn.Module):
    """A stack of layers, and a head with a softmax over classes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).softmax(-1)


def reference_maps(model: Model, x: Tensor) -> list[Tensor]:
    """Compute the maps of the attention layers from their projections."""
    found = []
    for layer in model.layers:
        if isinstance(layer, Layer):
            query, key, _ = layer.heads(x)
            found.append((query @ key.mT / math.sqrt(8)).softmax(-1))
        x = x + layer(x)
    return found


CAPTURED = [FusedAttention, ExplicitAttention, EinsumAttention, SwappedAttention, FoldedAttention]
CAPTURED += [ModularAttention, PlainBlock]
UNCAPTURED = [ExponentialAttention, LogSoftmaxAttention, ColumnAttention, SigmoidAttention]
UNCAPTURED += [LinearAttention, KernelAttention, LeadingSinkAttention]


@pytest.mark.parametrize("kind", CAPTURED)
@pytest.mark.parametrize(
    "around", [(), (Experts,), (SoftExperts,)], ids=["alone", "experts", "soft experts"]
)
def test_supported_ways_to_compute_attention_are_captured(
    kind: type[Layer], around: tuple[type[nn.Module], ...]
) -> None:
    model = lively(Model(kind(), *(other() for other in around), kind()))
    x = noise(2, 6, 32)
    with watch(model) as trace:
        model(x)
    for call, weights in zip(trace, reference_maps(model, x), strict=True):
        torch.testing.assert_close(call.weights(), weights, rtol=0, atol=1e-6)
        assert isinstance(call, Call) and call.shape == (2, 4, 6, 6)


@pytest.mark.parametrize("kind", UNCAPTURED)
def test_unsupported_ways_to_compute_attention_raise_with_the_module(kind: type[Layer]) -> None:
    model = Model(FusedAttention(), kind(), FusedAttention())
    with pytest.raises(UncapturedAttentionError) as found, watch(model):
        model(noise(2, 6, 32))
    assert re.search(r"1 of 3 attention modules.*'layers\.1'", str(found.value))
    assert kind.__name__ in str(found.value) and "scaled_dot_product_attention" in str(found.value)
    with watch(model, layers=["layers.0", "layers.2"]) as trace:  # the advice of the error
        model(noise(2, 6, 32))
    assert trace.names == ("layers.0", "layers.2")


@pytest.mark.parametrize("kind", [SplitAttention, ReversedSplitAttention])
def test_weights_split_into_slices_are_rejected(kind: type[Layer]) -> None:
    model = Model(FusedAttention(), kind())
    with pytest.raises(NotImplementedError, match=rf"{kind.__name__} .*slices"):  # noqa: SIM117
        with watch(model):
            model(noise(2, 6, 32))
    with watch(model, layers=[0]) as trace:
        model(noise(2, 6, 32))
    assert trace.names == ("layers.0",)


@pytest.mark.parametrize(
    "layers", [[], [Experts()], [SoftExperts()]], ids=["plain", "experts", "soft experts"]
)
def test_a_model_without_attention_is_an_error(layers: list[nn.Module]) -> None:
    with pytest.raises(UncapturedAttentionError, match=r"Model.*class_activation"):  # noqa: SIM117
        with watch(model := Model(*layers)):
            model(noise(2, 6, 32))


def test_state_space_models_are_rejected() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 20}
    model = transformers.MambaModel(transformers.MambaConfig(**sizes)).eval()
    with pytest.raises(UncapturedAttentionError, match="MambaModel"), watch(model):
        model(torch.arange(6)[None])


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "overt"])
def test_an_encoder_that_did_not_run_is_not_an_error(implementation: str) -> None:
    one = family("CLIP")
    model = one.build(implementation)
    with watch(model) as trace:
        model.get_text_features(input_ids=one.inputs()["input_ids"])
    assert len(trace) == 2 and all(call.causal for call in trace)


def test_a_model_that_is_not_called_is_an_error() -> None:
    with pytest.raises(UncapturedAttentionError, match="was not called"):  # noqa: SIM117
        with watch(Model(FusedAttention())):
            pass
