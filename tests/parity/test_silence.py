"""Whatever a model does, a watcher gives exact maps or an error that names the remedy."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.capture import Unseen, watch
from overt.capture.call import Call
from tests.capture.families import family, lively, noise


class Layer(nn.Module):
    """Three projections of one sequence, four heads."""

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


class WrittenAttention(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT / math.sqrt(8)).softmax(-1) @ value


class EinsumAttention(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(8)
        return torch.einsum("bhqk,bhkd->bhqd", F.softmax(scores, dim=-1), value)


class SwappedAttention(Layer):
    """Values times weights, the other way round."""

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
    """Softmax and dropout as modules, weights cast on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.soft = nn.Softmax(dim=-1)
        self.drop = nn.Dropout(0.1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = self.drop(self.soft((query @ key.mT / math.sqrt(8)).float()))
        return weights.to(value.dtype) @ value


class PlainBlock(WrittenAttention):
    """Attention in a class that is not named so."""


class ExponentialAttention(Layer):
    """A softmax written as exponentials, which nothing tells from other arithmetic."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT / math.sqrt(8)).exp()
        return (weights / weights.sum(-1, keepdim=True)) @ value


class LogSoftmaxAttention(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT / math.sqrt(8)).log_softmax(-1).exp() @ value


class ColumnAttention(Layer):
    """Scores with keys before queries, the softmax over the first of them."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (key @ query.mT / math.sqrt(8)).softmax(-2).mT @ value


class SigmoidAttention(Layer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT).sigmoid() @ value


class CutAttention(Layer):
    """The first two keys are met apart from the others, as in blocks with global tokens."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT / math.sqrt(8)).softmax(-1)
        return weights[..., :2] @ value[..., :2, :] + weights[..., 2:] @ value[..., 2:, :]


class OtherwiseCutAttention(CutAttention):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT / math.sqrt(8)).softmax(-1)
        return weights[..., 2:] @ value[..., 2:, :] + weights[..., :2] @ value[..., :2, :]


class HeadlessAttention(Layer):
    """A sink that stands in front of the keys."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT / math.sqrt(8)).softmax(-1)[..., 1:] @ value[..., 1:, :]


class LinearAttention(Layer):
    """No map is ever made: keys meet values first."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = F.elu(query) + 1, F.elu(key) + 1
        total = query @ key.sum(-2, keepdim=True).mT
        return query @ (key.mT @ value) / total


class Kernel(torch.autograd.Function):
    """A kernel of somebody's own, with a backward pass of its own."""

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
    """A softmax that chooses experts, and a product with what they say: no attention."""

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
    """All experts, each with its share, in one product."""

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        said = torch.einsum("bnd,edf->bnef", x, self.experts)
        return torch.einsum("bne,bnef->bnf", share, said)


class Model(nn.Module):
    """Layers one after another, and a head that takes a softmax over classes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).softmax(-1)


def by_hand(model: Model, x: Tensor) -> list[Tensor]:
    """The maps of layers with three projections, from those."""
    found = []
    for layer in model.layers:
        if isinstance(layer, Layer):
            query, key, _ = layer.heads(x)
            found.append((query @ key.mT / math.sqrt(8)).softmax(-1))
        x = x + layer(x)
    return found


SEEN = [FusedAttention, WrittenAttention, EinsumAttention, SwappedAttention, FoldedAttention]
SEEN += [ModularAttention, PlainBlock]
HIDDEN = [ExponentialAttention, LogSoftmaxAttention, ColumnAttention, SigmoidAttention]
HIDDEN += [LinearAttention, KernelAttention, HeadlessAttention]


@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize(
    "around", [(), (Experts,), (SoftExperts,)], ids=["alone", "experts", "soft experts"]
)
def test_ways_of_writing_attention_that_are_seen(
    kind: type[Layer], around: tuple[type[nn.Module], ...]
) -> None:
    model = lively(Model(kind(), *(other() for other in around), kind()))
    x = noise(2, 6, 32)
    with watch(model) as seen:
        model(x)
    for call, weights in zip(seen, by_hand(model, x), strict=True):
        torch.testing.assert_close(call.weights(), weights, rtol=0, atol=1e-6)
        assert isinstance(call, Call) and call.shape == (2, 4, 6, 6)


@pytest.mark.parametrize("kind", HIDDEN)
def test_ways_that_are_not_seen_are_named(kind: type[Layer]) -> None:
    model = Model(FusedAttention(), kind(), FusedAttention())
    with pytest.raises(Unseen) as found, watch(model):
        model(noise(2, 6, 32))
    assert re.search(r"1 of 3 attention modules.*'layers\.1'", str(found.value))
    assert kind.__name__ in str(found.value) and "scaled_dot_product_attention" in str(found.value)
    with watch(model, layers=["layers.0", "layers.2"]) as seen:  # the remedy that it names
        model(noise(2, 6, 32))
    assert seen.names == ("layers.0", "layers.2")


@pytest.mark.parametrize("kind", [CutAttention, OtherwiseCutAttention])
def test_weights_that_are_cut_into_parts_are_refused(kind: type[Layer]) -> None:
    model = Model(FusedAttention(), kind())
    with pytest.raises(NotImplementedError, match=f"{kind.__name__} cuts its weights"):  # noqa: SIM117
        with watch(model):
            model(noise(2, 6, 32))
    with watch(model, layers=[0]) as seen:
        model(noise(2, 6, 32))
    assert seen.names == ("layers.0",)


@pytest.mark.parametrize(
    "layers", [[], [Experts()], [SoftExperts()]], ids=["plain", "experts", "soft experts"]
)
def test_a_model_without_attention_is_an_error(layers: list[nn.Module]) -> None:
    with pytest.raises(Unseen, match=r"Model has no attention.*class_activation"):  # noqa: SIM117
        with watch(model := Model(*layers)):
            model(noise(2, 6, 32))


def test_state_space_models_have_none() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 20}
    model = transformers.MambaModel(transformers.MambaConfig(**sizes)).eval()
    with pytest.raises(Unseen, match="MambaModel has no attention"), watch(model):
        model(torch.arange(6)[None])


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "overt"])
def test_a_part_that_did_not_run_is_no_reason_for_alarm(implementation: str) -> None:
    one = family("CLIP")
    model = one.build(implementation)
    with watch(model) as seen:
        model.get_text_features(input_ids=one.inputs()["input_ids"])
    assert len(seen) == 2 and all(call.causal for call in seen)


def test_nothing_called_is_an_error() -> None:
    with pytest.raises(Unseen, match="was not called while it was watched"):  # noqa: SIM117
        with watch(Model(FusedAttention())):
            pass
