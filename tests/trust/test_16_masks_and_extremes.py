"""Trust 16: losses with fully masked rows and large logits, and exact gradients."""

import ast
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overt import losses
from overt.attention import AttentionMap, Layout, grid, words
from overt.attribution.attention_rollout import rollout
from overt.capture import block_scores as block_scores_module
from overt.capture import watch
from overt.capture.block_scores import block_scores, fused_cross_entropy, tap_gradients
from overt.capture.kernels import triton_launch
from overt.losses.grounding import bce_on_log_weights
from overt.losses.head_selection import HeadGates, soft_minimum_over_heads
from overt.nn.hard_attention import triton_launch as hard_launch
from overt.nn.hard_attention.varlen import summed_attention
from overt.nn.learned_attention.attention import attend_parametrised
from overt.nn.mask_perturbation.gradient_scope import _GraphUses, _RestrictedLoss
from overt.nn.wrappers.wrapped_model import tie_gradient
from tests.capture.encoder import Encoder
from tests.nn.hard_attention import slow

PACKAGE = Path(__file__).resolve().parents[2] / "overt"
KEYS = 6

Compare = Callable[[AttentionMap, AttentionMap], losses.Loss]


def _gates(attention: AttentionMap, target: AttentionMap) -> losses.Loss:
    return HeadGates(*attention.values.shape[1:3])(attention, target)


def _adversarial(attention: AttentionMap, target: AttentionMap) -> losses.Loss:
    return losses.generator_loss(losses.Discriminator(KEYS).eval(), attention, target)


LOSSES: dict[str, Compare] = {
    "cross_entropy": losses.cross_entropy,
    "kl": losses.kl,
    "mse": losses.mse,
    "bce_log": bce_on_log_weights,
    "coral": losses.coral,
    "coral_unscaled": losses.coral_unscaled,
    "mmd": losses.mmd,
    "mmd_linear": losses.mmd_linear,
    "mmd_unbiased": losses.mmd_unbiased,
    "emd": losses.emd,
    "any_head": soft_minimum_over_heads(),
    "gates": _gates,
    "deceive": _adversarial,
}


MASKS = ("no mask", "some", "one sample", "all", "one region")
WANTED = ("all rows", "some rows", "no row", "one key", "hidden keys")
CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "dtype": st.sampled_from(["float32", "float16", "bfloat16"]),
        "size": st.sampled_from([1.0, 30.0, 1e4]),
        "axes": st.tuples(*(st.integers(1, most) for most in (3, 2, 2, 2))),
        "keys": st.sampled_from([1, 2, KEYS]),
        "mask": st.sampled_from(MASKS),
        "wanted": st.sampled_from(WANTED),
        "cells": st.booleans(),
        "logs": st.booleans(),
    }
)


def make_case(case: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the scores, the mask of keys and the target."""
    rng = torch.Generator().manual_seed(case["seed"])
    (b, _, _, q), keys = case["axes"], case["keys"]
    scores = torch.randn(*case["axes"], keys, generator=rng) * case["size"]
    mask = torch.ones(b, q, keys, dtype=torch.bool)
    match case["mask"]:
        case "some":
            mask = torch.rand(b, q, keys, generator=rng) < 0.5
        case "one sample":
            mask[0] = False
        case "all":
            mask[:] = False
        case "one region":
            mask[..., 1:] = False
    target = torch.rand(b, 1, 1, q, keys, generator=rng)
    match case["wanted"]:
        case "some rows":
            target = target * (torch.rand(b, 1, 1, q, 1, generator=rng) < 0.5)
        case "no row":
            target = torch.zeros_like(target)
        case "one key":
            target = torch.nn.functional.one_hot(target.argmax(-1), keys).float()
        case "hidden keys":
            target = target * ~mask[:, None, None]
    scores = scores.clamp(-1e4, 1e4).to(getattr(torch, case["dtype"])).requires_grad_()
    return scores, None if case["mask"] == "no mask" else mask, target


def maps(
    scores: Tensor, mask: Tensor | None, target: Tensor, keys: Layout, logs: bool
) -> tuple[AttentionMap, AttentionMap]:
    queries = words(scores.shape[3], "queries")
    attention = AttentionMap.from_scores(scores, keys, queries, mask)
    if not logs:
        attention = AttentionMap(attention.weights, keys, queries, mask)
    return attention, AttentionMap(target, keys, queries, mask).normalize()


def is_finite_or_zero(loss: losses.Loss, scores: Tensor) -> bool:
    """Whether loss and gradient are finite, and zero if the count is zero."""
    if not bool(loss.total.isfinite()):
        return False
    gradient = torch.zeros_like(scores)
    if loss.total.requires_grad:
        (found,) = torch.autograd.grad(loss.total, scores, allow_unused=True)
        gradient = gradient if found is None else found
    if not bool(gradient.isfinite().all()):
        return False
    return bool(loss.count) or (float(loss.total.detach()) == 0 and not bool(gradient.any()))


def naive_is_finite(scores: Tensor, mask: Tensor | None, target: Tensor) -> bool:
    """Whether a plain masked cross-entropy and its gradient are finite."""
    hidden = scores if mask is None else scores.masked_fill(~mask[:, None, None], -torch.inf)
    wanted = target / target.sum(dim=-1, keepdim=True)
    loss = -(wanted * hidden.softmax(dim=-1).log()).sum(dim=-1).mean()
    (gradient,) = torch.autograd.grad(loss, scores)
    return bool(loss.isfinite()) and bool(gradient.isfinite().all())


@pytest.mark.long
def test_losses_are_finite_or_zero_with_zero_gradient(
    full: bool, record_result: Callable[..., None]
) -> None:
    count = {"ours": 0, "naive": 0}

    @settings(max_examples=2_000 if full else 500)
    @given(CASES, st.sampled_from(sorted(LOSSES)))
    def one(case: dict[str, Any], name: str) -> None:
        scores, mask, target = make_case(case)
        cells = case["cells"] and case["keys"] == KEYS
        keys = grid(2, 3) if cells else words(case["keys"])
        found = LOSSES[name](*maps(scores, mask, target, keys, case["logs"]))
        assert is_finite_or_zero(found, scores)
        count["ours"] += 1
        count["naive"] += not naive_is_finite(scores, mask, target)

    one()
    assert count["ours"] >= 500 and count["naive"] > 50
    record_result(
        16,
        "finite, or 0 with zero gradient, in 500 cases",
        f"{count['ours']} of {count['ours']} cases over {len(LOSSES)} losses",
        f"softmax, log and mean are not finite in {count['naive']}",
    )


def test_every_loss_on_maps_is_tested() -> None:
    """A loss that is added to `overt.losses` has to be in the list above."""
    public = {
        name
        for name in losses.__all__
        if callable(getattr(losses, name))
        and list(getattr(getattr(losses, name), "__annotations__", {}))[:2]
        == ["attention", "target"]
    }
    known = {*LOSSES, "fitted"}
    assert public - known == set()


# --- autograd functions of the package


def functions() -> set[str]:
    """Find every subclass of torch.autograd.Function in the source of the package."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)) if "Function" in source else ():
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                if "Function" in bases:
                    module = path.relative_to(PACKAGE.parent).with_suffix("").as_posix()
                    found.add(f"{module.replace('/', '.')}.{node.name}")
    return found


def random_input(*shape: int) -> Tensor:
    rng = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=rng).requires_grad_()


def tie_gradient_case() -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    return lambda x, y: tie_gradient(x.square().sum(), y, y * 2), (
        random_input(3),
        random_input(2, 2),
    )


def varlen_case() -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    counts = [3, 0, 2]
    return (lambda x, y: summed_attention(x, y, counts, 2, 0.7)), (
        random_input(5, 4),
        random_input(5, 8),
    )


def triton_attention_case() -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    kept = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])

    def run(cells: Tensor, layer: Tensor) -> Tensor:
        with (
            patch.object(hard_launch, "_AttentionLaunch", slow.AttentionLaunch),
            patch.object(hard_launch, "list_kept", slow.list_kept),
        ):
            return hard_launch.summed_attention(cells, kept, layer, 2, 0.7)

    return run, (random_input(3, 3, 4), random_input(8, 4))


def tap_gradients_case() -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    rows = torch.tensor([[0, 2], [1, -1]])

    def run(query: Tensor, key: Tensor) -> Tensor:
        taps = tap_gradients(query * 2, key * 2)
        scores = block_scores(taps[:1], taps[1:], rows, slice(1, 4))
        value = torch.ones(2, 2, 4, 3, dtype=torch.float64).cumsum(dim=2)
        out = torch.nn.functional.scaled_dot_product_attention(*(t.tensor for t in taps), value)
        return torch.cat([scores.flatten(), out.flatten()])

    return run, (random_input(2, 2, 3, 3), random_input(2, 2, 4, 3))


class ReferenceLauncher:
    """Replace the GPU kernels, which have no float64, by plain operations."""

    def __init__(self, tensors: Sequence[Tensor], ctx: Any) -> None:
        query, key = tensors[0][:, :, ctx.rows], tensors[1][:, :, ctx.columns]
        self.scores = ctx.scale * query @ key.mT
        self.hidden = ctx.softmax[0]

    def cross_entropy(self, target: Tensor, log_eps: float) -> triton_launch.RowCrossEntropy:
        logs = self.scores.masked_fill(self.hidden, -torch.inf).log_softmax(dim=-1)
        values = -(target[:, None] * logs.masked_fill(self.hidden, log_eps)).sum(dim=-1)[None]
        return triton_launch.RowCrossEntropy(values, values, values, target)


def fused_cross_entropy_case() -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    visible = torch.tensor([[[True, False, True]] * 2] * 2)
    wanted = torch.rand(2, 2, 3, dtype=torch.float64)

    def run(query: Tensor, key: Tensor) -> Tensor:
        with patch.object(block_scores_module, "_triton_launcher", ReferenceLauncher):
            return fused_cross_entropy(
                [query], [key], slice(0, 2), slice(1, 4), 0.7, visible, wanted, -20.0
            )

    return run, (random_input(2, 2, 3, 3), random_input(2, 2, 4, 3))


def rollout_case(
    fuse: Any, causal: bool = False
) -> Callable[[], tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    def make() -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        torch.manual_seed(0)
        model = Encoder(layers=2, width=4, heads=2, groups=2, causal=causal)

        def run(x: Tensor) -> Tensor:
            with watch(model) as trace:
                model(x)
            return rollout(trace, fuse=fuse, chunk=2).weights

        return run, (random_input(1, 3, 4),)

    return make


def restricted_loss_case() -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A loss whose gradient is confined to one of the two tensors it depends on."""
    other = random_input(3)

    def run(one: Tensor) -> Tensor:
        total = (one.square() * other).sum()
        return _RestrictedLoss.apply([total], _GraphUses(1), one)  # type: ignore[no-any-return]

    return run, (random_input(3),)


CHECKED = {
    "overt.nn.learned_attention.attention._AttendParametrised": lambda: (
        attend_parametrised,
        (random_input(2, 3, 4), random_input(4), random_input()),
    ),
    "overt.nn.wrappers.wrapped_model._TieGradient": tie_gradient_case,
    "overt.nn.hard_attention.varlen._SummedAttention": varlen_case,
    "overt.nn.hard_attention.triton_launch._TritonSummedAttention": triton_attention_case,
    "overt.nn.mask_perturbation.gradient_scope._RestrictedLoss": restricted_loss_case,
    "overt.capture.block_scores._TapGradients": tap_gradients_case,
    "overt.capture.block_scores._BlockScores": tap_gradients_case,
    "overt.capture.block_scores._BlockCrossEntropy": fused_cross_entropy_case,
    "overt.attribution.attention_rollout._RecomputedPropagation": rollout_case(torch.amax),
    "overt.attribution.attention_rollout._MeanPropagation": rollout_case(torch.mean, causal=True),
    "overt.attribution.attention_rollout._UnmaskedMeanPropagation": rollout_case(torch.mean),
}


# They raise in backward: tests/capture/compiled.py, tests/capture/test_autograd_functions.py.
WITHOUT_GRADIENT = {
    "overt.capture.records._DetachedFromGraph",
    "overt.capture.autograd_functions._BlockGradient",
}


# Their gradient is not the derivative, on purpose: tests/train/test_distributed.py,
# tests/nn/learned_attention/test_attention.py, tests/attribution/test_deep_lift.py.
NOT_THE_DERIVATIVE = {
    "overt.attribution.deep_lift._PoolSlope",
    "overt.attribution.deep_lift._Slope",
    "overt.train.distributed._FormerGradients",
    "overt.nn.learned_attention.attention._ScaleGradient",
}


def test_every_autograd_function_is_tested() -> None:
    assert functions() == set(CHECKED) | WITHOUT_GRADIENT | NOT_THE_DERIVATIVE


class WrongGradient(torch.autograd.Function):
    """A square with a gradient that is 1 % too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2.02 * ctx.saved_tensors[0]


@pytest.mark.long
def test_gradients_of_every_autograd_function_are_exact(
    monkeypatch: pytest.MonkeyPatch, record_result: Callable[..., None]
) -> None:
    for name, make in CHECKED.items():
        module, _, kind = name.rpartition(".")
        function = getattr(importlib.import_module(module), kind)
        forward, calls = function.forward, []

        def record_call(*args: Any, forward: Any = forward, calls: list[int] = calls) -> Any:
            calls.append(1)
            return forward(*args)

        monkeypatch.setattr(function, "forward", staticmethod(record_call))
        run, inputs = make()
        assert torch.autograd.gradcheck(run, inputs, fast_mode=False), name
        assert calls, f"{name} was not run"
    assert not torch.autograd.gradcheck(
        WrongGradient.apply, (random_input(3),), raise_exception=False
    )
    record_result(
        16,
        "gradcheck in fp64 for every custom Function",
        f"{len(CHECKED)} of {len(functions() - WITHOUT_GRADIENT - NOT_THE_DERIVATIVE)} exact",
        "a gradient that is 1 % too large is found",
    )
