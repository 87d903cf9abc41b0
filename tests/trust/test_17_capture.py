"""Trust 17: capture with activation checkpointing and torch.compile; empty captures raise."""

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

from overt.capture import Bias, UncapturedAttentionError, watch
from tests.capture.toys import FusedAttention, Stack, WrittenAttention

ROOT = Path(__file__).resolve().parents[2]


class CheckpointedModel(nn.Module):
    """Two layers with or without activation checkpointing."""

    def __init__(
        self, attention: Callable[[], nn.Module], checkpointing: bool, reentrant: bool = False
    ):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([attention(), attention()]).double()
        self.checkpointing, self.reentrant = checkpointing, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            added = (
                checkpoint(layer, x, use_reentrant=self.reentrant)
                if self.checkpointing
                else layer(x)
            )
            x = x + added
        return x


def inputs() -> Tensor:
    dice = torch.Generator().manual_seed(1)
    return torch.randn(2, 6, 16, dtype=torch.float64, generator=dice).requires_grad_()


def square_weights(call: Any, weights: Tensor) -> Tensor:
    squared = weights**2
    return squared / squared.sum(dim=-1, keepdim=True)


def bias_values(call: Any) -> Tensor:
    return torch.arange(6.0).double()


def gradients(model: CheckpointedModel, edit: Any, backward_in_context: bool) -> Tensor:
    """Return all gradients of a loss on the output and on a map, as one vector."""
    x = inputs()
    with watch(model, edit=edit) as trace:
        loss = model(x).square().sum() + trace.map(0).weights.square().sum()
        if backward_in_context:
            loss.backward()
    if not backward_in_context:
        loss.backward()
    return flat_gradients(model, x)


def flat_gradients(model: nn.Module, x: Tensor) -> Tensor:
    found = [one.grad for one in (x, *model.parameters()) if one.grad is not None]
    return torch.cat([one.flatten() for one in found])


class ModeEdit(TorchFunctionMode):
    """An edit in a mode, which does not apply when the backward pass recomputes the layer."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return func(args[0] * 3, *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def naive_edit(checkpointing: bool) -> Tensor:
    model, x = CheckpointedModel(FusedAttention, checkpointing), inputs()
    with ModeEdit():
        loss = model(x).square().sum()
    loss.backward()
    return flat_gradients(model, x)


@pytest.mark.long
def test_gradients_are_equal_with_and_without_checkpointing(
    record_result: Callable[..., None],
) -> None:
    worst, cases = 0.0, 0
    for attention in (FusedAttention, WrittenAttention):
        for edit in (None, square_weights, Bias(bias_values)):
            for backward_in_context in (True, False):
                found = gradients(
                    CheckpointedModel(attention, checkpointing=True), edit, backward_in_context
                )
                expected = gradients(
                    CheckpointedModel(attention, checkpointing=False), edit, backward_in_context
                )
                worst, cases = max(worst, relative_error(found, expected)), cases + 1
    naive_error = relative_error(naive_edit(checkpointing=True), naive_edit(checkpointing=False))
    assert worst < 1e-6 and naive_error > 0.05
    record_result(
        17,
        "gradients with and without activation checkpointing equal to 1e-6",
        f"{worst:.0e} at most, in {cases} cases",
        f"an edit only in a mode is {naive_error:.0%} off, without an error",
    )


def test_reentrant_checkpointing_raises() -> None:
    model = CheckpointedModel(FusedAttention, checkpointing=True, reentrant=True)
    with pytest.raises(NotImplementedError, match="use_reentrant=False"), watch(model):
        model(inputs())


# --- compiled


CHILD = """
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from overt.capture import watch
from tests.capture.toys import FusedAttention, Stack

class ListCapture(torch.overrides.TorchFunctionMode):
    "A capture with a new list for every use."
    def __init__(self):
        super().__init__()
        self.kept = []
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.kept.append(len(self.kept))
        return out

x = torch.randn(2, 6, 16)
for capture in (watch, lambda model: ListCapture()):
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(Stack(FusedAttention(), FusedAttention()).eval(), backend=counter)
    compiled(x)
    for turn in range(20):
        with capture(compiled):
            compiled(x)
    print(counter.frame_count)

import tests.trust.test_17_capture as module
flexible = Stack(module.FlexAttention(), module.FlexAttention()).eval()
with torch.no_grad(), watch(flexible) as trace:
    flexible(x)
print(len(trace))
try:
    with watch(flexible):
        pass
except module.UncapturedAttentionError:
    print("raised")
print(len(module.capture_with_hooks(flexible, x)))
"""


@pytest.mark.long
def test_twenty_captures_of_a_compiled_model_make_two_graphs(
    record_result: Callable[..., None],
) -> None:
    """Runs in a child process, because the shape checks of the tests cannot be compiled."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.split()
    ours, naive = map(int, lines[:2])
    assert ours <= 2 < naive
    assert lines[2:] == [
        "2",
        "raised",
        "0",
    ]  # FlexAttention is captured, or the empty capture raises
    record_result(
        17,
        "20 captures of a compiled model make at most 2 graphs; empty flex raises",
        f"{ours} graphs; flex captured, and an error when not called",
        f"a mode that keeps a list makes {naive}",
    )


# --- empty captures


class FlexAttention(FusedAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FlexAttention warns that it is slow
            out = flex_attention(q, k, v)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).flatten(2)


class _Kernel(torch.autograd.Function):
    """Attention outside PyTorch, like an external kernel."""

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
    """Explicit attention with the softmax over the wrong axis."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        return ((q @ k.mT).softmax(dim=-2) @ v).transpose(1, 2).flatten(2)


def capture_with_hooks(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Collect the outputs of softmax and dropout modules with hooks."""
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


def test_an_empty_capture_raises(record_result: Callable[..., None]) -> None:
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
    captured, raised, missed_by_hooks = [], [], []
    ways: dict[str, tuple[nn.Module, Tensor]] = {
        "sdpa": (Stack(FusedAttention(), FusedAttention()), x),
        "hand-written": (Stack(WrittenAttention(), WrittenAttention()), x),
    }
    for way in ("sdpa", "eager"):
        model = transformers.BertModel._from_config(config, attn_implementation=way)
        ways[f"Hugging Face {way}"] = model, words
    for way, (model, model_input) in ways.items():
        model.eval()
        with torch.no_grad(), watch(model) as trace:
            model(model_input)
        assert len(trace) == 2 and all(float(call.weights().sum()) > 0 for call in trace), way
        captured.append(way)
        if not capture_with_hooks(model, model_input):
            missed_by_hooks.append(way)
        with (
            pytest.raises(UncapturedAttentionError, match=r"inside.*watch"),
            watch(model),
        ):
            pass
    for kind in (HiddenAttention, OverColumnsAttention):
        model = Stack(kind(), kind()).eval()
        with (
            pytest.raises(UncapturedAttentionError, match=rf"{kind.__name__} .*attention"),
            watch(model),
        ):
            model(x)
        raised.append(kind.__name__)
    for plain in (nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 3)):
        with (
            pytest.raises(UncapturedAttentionError, match="has no attention"),
            watch(plain),
        ):
            plain(x)
        raised.append("no attention")
    assert missed_by_hooks
    record_result(
        17,
        "an empty capture raises: sdpa, eager, hand-written attention",
        f"{len(captured)} implementations captured; "
        f"not called: {len(captured)} of {len(captured)} raise; "
        f"not capturable: {len(raised)} of {len(raised)} raise",
        f"hooks on softmax give an empty dictionary in {len(missed_by_hooks)} of {len(captured)}",
    )
