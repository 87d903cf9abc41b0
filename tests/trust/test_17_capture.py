"""Trust 17: what is captured survives recomputation and compiling, and is never silently empty."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from overt.capture import Bias, Unseen, watch
from tests.capture.toys import FusedAttention, Stack, WrittenAttention

ROOT = Path(__file__).resolve().parents[2]


class Saving(nn.Module):
    """Two layers, each behind a checkpoint or not."""

    def __init__(self, attention: Callable[[], nn.Module], on: bool, reentrant: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([attention(), attention()]).double()
        self.on, self.reentrant = on, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            added = checkpoint(layer, x, use_reentrant=self.reentrant) if self.on else layer(x)
            x = x + added
        return x


def inputs() -> Tensor:
    dice = torch.Generator().manual_seed(1)
    return torch.randn(2, 6, 16, dtype=torch.float64, generator=dice).requires_grad_()


def sharpened(call: Any, weights: Tensor) -> Tensor:
    squared = weights**2
    return squared / squared.sum(dim=-1, keepdim=True)


def towards(call: Any) -> Tensor:
    return torch.arange(6.0).double()


def gradients(model: Saving, edit: Any, inside: bool) -> Tensor:
    """All gradients of a loss on the output and on a map, as one vector."""
    x = inputs()
    with watch(model, edit=edit) as seen:
        loss = model(x).square().sum() + seen.map(0).weights.square().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return gathered(model, x)


def gathered(model: nn.Module, x: Tensor) -> Tensor:
    found = [one.grad for one in (x, *model.parameters()) if one.grad is not None]
    return torch.cat([one.flatten() for one in found])


class OnlyAMode(TorchFunctionMode):
    """An edit that lives in a mode: gone when the backward pass computes the layer again."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return func(args[0] * 3, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def off(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm())


def naive_edit(on: bool) -> Tensor:
    model, x = Saving(FusedAttention, on), inputs()
    with OnlyAMode():
        loss = model(x).square().sum()
    loss.backward()
    return gathered(model, x)


def test_gradients_are_equal_with_and_without_checkpointing(reached: Callable[..., None]) -> None:
    worst, cases = 0.0, 0
    for attention in (FusedAttention, WrittenAttention):
        for edit in (None, sharpened, Bias(towards)):
            for inside in (True, False):
                mine = gradients(Saving(attention, on=True), edit, inside)
                theirs = gradients(Saving(attention, on=False), edit, inside)
                worst, cases = max(worst, off(mine, theirs)), cases + 1
    lost = off(naive_edit(on=True), naive_edit(on=False))
    assert worst < 1e-6 and lost > 0.05
    reached(
        17,
        "gradients with and without activation checkpointing equal to 1e-6",
        f"{worst:.0e} at most, in {cases} cases",
        f"an edit in a mode alone is {lost:.0%} off, without an error",
    )


def test_reentrant_checkpointing_is_refused() -> None:
    model = Saving(FusedAttention, on=True, reentrant=True)
    with pytest.raises(NotImplementedError, match="use_reentrant=False"), watch(model):
        model(inputs())


# --- compiled


CHILD = """
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from overt.capture import watch
from tests.capture.toys import FusedAttention, Stack

class Keeping(torch.overrides.TorchFunctionMode):
    "A capture that keeps a list of its own, made anew for every use."
    def __init__(self):
        super().__init__()
        self.kept = []
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.kept.append(len(self.kept))
        return out

x = torch.randn(2, 6, 16)
for capture in (watch, lambda model: Keeping()):
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(Stack(FusedAttention(), FusedAttention()).eval(), backend=counter)
    compiled(x)
    for turn in range(20):
        with capture(compiled):
            compiled(x)
    print(counter.frame_count)

import tests.trust.test_17_capture as here
flexible = Stack(here.Flexible(), here.Flexible()).eval()
with torch.no_grad(), watch(flexible) as seen:
    flexible(x)
print(len(seen))
try:
    with watch(flexible):
        pass
except here.Unseen:
    print("raised")
print(len(here.hooked(flexible, x)))
"""


@pytest.mark.long
def test_twenty_uses_of_a_compiled_model_make_two_graphs_and_flex_is_seen(
    reached: Callable[..., None],
) -> None:
    """In a process of its own: the shape checks of these tests cannot be compiled."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout.split()
    ours, naive = map(int, told[:2])
    assert ours <= 2 < naive
    assert told[2:] == ["2", "raised", "0"]  # FlexAttention is seen, or said not to be
    reached(
        17,
        "20 uses on a compiled model make at most 2 graphs; empty flex raises",
        f"{ours} graphs; flex seen, and raised when not called",
        f"a mode that keeps a list makes {naive}",
    )


# --- never silently empty


class Flexible(FusedAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of being slow
            out = flex_attention(q, k, v)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).flatten(2)


class _Kernel(torch.autograd.Function):
    """Attention that torch does not see, as a foreign kernel is."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q.detach().numpy() @ k.detach().numpy().swapaxes(-1, -2)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return torch.from_numpy(weights / weights.sum(-1, keepdims=True) @ v.detach().numpy())

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Any:
        return None, None, None


class HiddenAttention(FusedAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        return _Kernel.apply(q, k, v).transpose(1, 2).flatten(2)


class OverColumnsAttention(WrittenAttention):
    """Written out, but the softmax is over the wrong axis: not attention as anybody knows it."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        return ((q @ k.mT).softmax(dim=-2) @ v).transpose(1, 2).flatten(2)


def hooked(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What extractors by hooks do: keep what modules called softmax or dropout give."""
    found: dict[str, Tensor] = {}
    handles = [
        part.register_forward_hook(lambda m, a, out, name=name: found.update({name: out}))
        for name, part in model.named_modules()
        if isinstance(part, nn.Softmax | nn.Dropout)
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return found


def test_an_empty_capture_raises(reached: Callable[..., None]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    x = torch.randn(2, 6, 16)
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=16,
    )
    words = torch.tensor([[1, 2, 3, 4]])
    seen_ways, raised, empty = [], [], []
    ways: dict[str, tuple[nn.Module, Tensor]] = {
        "sdpa": (Stack(FusedAttention(), FusedAttention()), x),
        "hand-written": (Stack(WrittenAttention(), WrittenAttention()), x),
    }
    for way in ("sdpa", "eager"):
        model = transformers.BertModel._from_config(config, attn_implementation=way)
        ways[f"Hugging Face {way}"] = model, words
    for way, (model, given) in ways.items():
        model.eval()
        with torch.no_grad(), watch(model) as seen:
            model(given)
        assert len(seen) == 2 and all(float(call.weights().sum()) > 0 for call in seen), way
        seen_ways.append(way)
        if not hooked(model, given):
            empty.append(way)
        with pytest.raises(Unseen, match="call it inside the block"), watch(model):
            pass
    for kind in (HiddenAttention, OverColumnsAttention):
        model = Stack(kind(), kind()).eval()
        with pytest.raises(Unseen, match=f"{kind.__name__} attends in a way"), watch(model):
            model(x)
        raised.append(kind.__name__)
    for plain in (nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 3)):
        with pytest.raises(Unseen, match="no attention that could be seen"), watch(plain):
            plain(x)
        raised.append("no attention")
    assert empty
    reached(
        17,
        "an empty capture raises: sdpa, eager, hand-written attention",
        f"{len(seen_ways)} ways seen; not called: {len(seen_ways)} of {len(seen_ways)} raise; "
        f"not to be seen: {len(raised)} of {len(raised)} raise",
        f"hooks on softmax give an empty dictionary in {len(empty)} of {len(seen_ways)}",
    )
