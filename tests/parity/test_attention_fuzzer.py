"""Random attention modules compared with slow references: the exact map, or a named error.

Each seed makes one module: an order of axes, copies in between, a mask, in-place changes, a dtype,
and a way to compute attention. A slow reference computes the weights in float64, sample by sample
and head by head. `pytest -m long tests/parity/test_attention_fuzzer.py` runs many seeds and prints
those that fail; `module(seed)` reproduces one of them.
"""

import contextlib
import math
import os
import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.capture import watch

ORDERS = ["b h", "h b", "(b h)", "(h b)", "cat", "b g n", "g n b", "(b g) n", "w b h", "b (w h)"]
ORDERS += ["b h w", "(b w) h"]
ROUTES = ["sdpa", "matmul", "bmm", "einsum", "einsum turned", "baddbmm", "left", "bmm left"]
ROUTES += ["exp", "log_softmax", "modules", "columns"]
MASKS = [None, "bool", "float", "causal", "padding"]
CHANGES = [
    None,
    None,
    None,
    "scale",
    "zero",
    "after",
    "mask after",
    "mixed",
    "drop",
    "perm",
    "half",
]
MODES = ["grad", "no_grad", "inference"]
TYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16]


@dataclass(frozen=True)
class Choice:
    """The random choices of one seed."""

    order: str
    route: str
    mask: str | None
    change: str | None
    mode: str
    dtype: torch.dtype
    copy: str
    sizes: tuple[int, int, int, int, int]  # samples, heads, queries, keys, features
    declared: bool


def choice(seed: int) -> Choice:
    """Draw one module; sizes are often equal, so that they do not identify an axis."""
    dice = random.Random(seed)
    sizes = dice.choice([(4, 4, 4, 4, 4), (2, 4, 6, 6, 4), (4, 2, 6, 6, 6), (2, 2, 4, 8, 8)])
    if dice.random() < 0.3:
        sizes = (
            dice.randint(1, 4),
            dice.choice([2, 4]),
            dice.choice([2, 6]),
            dice.randint(2, 8),
            6,
        )
    change = dice.choice(CHANGES)
    mode = dice.choice(MODES) if change is None else dice.choice(MODES[1:])
    return Choice(
        *(dice.choice(ORDERS), dice.choice(ROUTES), dice.choice(MASKS), change, mode),
        *(dice.choice(TYPES), dice.choice(["none", "contiguous", "clone", "rotate"]), sizes),
        dice.random() < 0.5,
    )


class FuzzedAttention(nn.Module):
    """Attention as drawn in `one`; the weights used are stored in `truth`."""

    def __init__(self, one: Choice, seed: int) -> None:
        super().__init__()
        _, h, _, _, d = one.sizes
        self.one, self.soft, self.drop = one, nn.Softmax(dim=-1), nn.Dropout(0.3)
        self.query, self.key, self.value = (nn.Linear(12, h * d) for _ in range(3))
        self.truth = torch.empty(0)
        if one.declared:
            self.num_heads = h
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(torch.randn(weight.shape, generator=draw) / 2)

    # --- the slow reference

    def bias(self) -> Tensor | None:
        """Return the bias that the mask adds to the scores, (b, 1, q, k)."""
        b, _, q, k, _ = self.one.sizes
        draw = torch.Generator().manual_seed(q * k)
        if self.one.mask is None:
            return None
        if self.one.mask == "float":
            return torch.randn(b, 1, q, k, generator=draw)
        allowed = torch.rand(b, 1, q, k, generator=draw) > 0.4
        if self.one.mask == "causal":
            allowed = torch.ones(q, k, dtype=torch.bool).tril().expand(b, 1, q, k).clone()
        elif self.one.mask == "padding":
            allowed = (torch.arange(k) < 1 + torch.arange(b)[:, None] % k)[:, None, None]
            allowed = allowed.expand(b, 1, q, k).clone()
        allowed[..., 0] = True
        return torch.zeros(b, 1, q, k).masked_fill(~allowed, -torch.inf)

    def slow(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the true weights (b, h, q, k) in float64, computed per sample and head."""
        b, h, q, k, d = self.one.sizes
        query, key = self.query(x).double(), self.key(y).double()
        bias, found = self.bias(), torch.zeros(b, h, q, k, dtype=torch.float64)
        for sample in range(b):
            for head in range(h):
                part = slice(head * d, (head + 1) * d)
                scores = query[sample, :, part] @ key[sample, :, part].T / math.sqrt(d)
                if bias is not None:
                    added = (
                        bias[sample, 0]
                        if self.one.dtype != torch.bfloat16
                        else (bias[sample, 0].bfloat16())
                    )
                    scores = scores + added.double()
                found[sample, head] = scores.softmax(-1)
        w = self.windows()
        if w > 1:  # queries of a window attend to its keys only, and windows are samples
            found = torch.stack(
                [
                    self._window(query, key, bias, sample, at)
                    for sample in range(b)
                    for at in range(w)
                ]
            )
        return found

    def _window(self, query: Tensor, key: Tensor, bias: Tensor | None, sample: int, at: int):
        _, h, q, k, d = self.one.sizes
        rows, keys = slice(at * q // 2, (at + 1) * q // 2), slice(at * k // 2, (at + 1) * k // 2)
        found = []
        for head in range(h):
            part = slice(head * d, (head + 1) * d)
            scores = query[sample, rows, part] @ key[sample, keys, part].T / math.sqrt(d)
            found.append(scores.softmax(-1))
        return torch.stack(found)

    def windows(self) -> int:
        _, _, q, k, _ = self.one.sizes
        return 2 if "w" in self.one.order and q % 2 == k % 2 == 0 else 1

    # --- the module itself

    def arranged(self, given: Tensor, mask: bool = False) -> Tensor:
        """Return (b, n, h, d) in the axis order of this module."""
        given = given.unflatten(-1, (self.one.sizes[1], -1))
        if (
            self.one.copy == "rotate" and not mask
        ):  # like rotary positions, without a change of values
            half = given.shape[-1] // 2
            turned = torch.cat((given[..., half:], given[..., :half]), dim=-1)
            given = given * 1.0 + turned * 0.0
        order = self.one.order if self.windows() > 1 or "w" not in self.one.order else "b h"
        if order == "cat":
            return torch.cat(given.flatten(2).split(given.shape[-1], dim=2), dim=0)
        if "w" in order:
            given = given.unflatten(1, (2, -1)).permute(0, 1, 3, 2, 4)  # b w h n d
            names = "b w h"
        elif "g" in order:
            given = given.unflatten(2, (2, -1)).permute(0, 2, 3, 1, 4)
            names = "b g n"
        else:
            given, names = given.permute(0, 2, 1, 3), "b h"
        places = [
            names.split().index(one) for one in order.replace("(", "").replace(")", "").split()
        ]
        given = given.permute(*places, given.ndim - 2, given.ndim - 1)
        if self.one.copy in ("contiguous", "clone"):
            given = getattr(given, self.one.copy)()
        if "(" in order:
            at = next(at for at, one in enumerate(order.split()) if "(" in one)
            given = given.flatten(at, at + 1)
        return given

    def lead(self, given: Tensor) -> Tensor:
        """Return a mask (b, 1, q, k) in the same order."""
        _, h, _, _, _ = self.one.sizes
        wide = given.expand(-1, h, -1, -1).permute(0, 2, 1, 3)  # b q h k
        return self.arranged(wide.flatten(2), mask=True).to(given.dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (
            self.arranged(part(given))
            for part, given in ((self.query, x), (self.key, y), (self.value, y))
        )
        bias = None if self.windows() > 1 else self.bias()
        if bias is not None:
            bias = self.lead(bias).to(q.dtype)
        if self.one.route == "sdpa":
            boolean = self.one.mask not in (None, "float") and bias is not None
            mask = bias == 0 if boolean else bias
            out = F.scaled_dot_product_attention(q, k, v, mask)
            if self.one.change == "mask after" and mask is not None:
                mask.fill_(1)
            return out.mul_(2) if self.one.change == "after" else out
        weights = self.changed(self.weights(self.scores(q, k, bias)))
        out = self.product(weights, v)
        if self.one.change == "after":
            weights.zero_()
        return out

    def scores(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1])
        if self.one.route == "baddbmm" and q.ndim == 3:
            scores = torch.baddbmm(torch.zeros(1, dtype=q.dtype), q, k.mT, beta=0, alpha=scale)
        elif self.one.route.startswith("einsum"):
            scores = torch.einsum("...qd,...kd->...qk", q, k) * scale
        else:
            scores = q @ k.mT * scale
        return scores if bias is None else scores + bias

    def weights(self, scores: Tensor) -> Tensor:
        if self.one.route == "exp":
            weights = (scores - scores.amax(-1, keepdim=True)).exp()
            return weights / weights.sum(-1, keepdim=True)
        if self.one.route == "log_softmax":
            return scores.log_softmax(-1).exp()
        if self.one.route == "columns":
            return scores.mT.softmax(-2).mT
        if self.one.route == "modules":
            wide = torch.promote_types(scores.dtype, torch.float32)
            return self.soft(scores.to(wide)).to(scores.dtype)
        return scores.softmax(-1)

    def changed(self, weights: Tensor) -> Tensor:
        if self.one.change == "scale":
            weights.mul_(0.5)
        elif self.one.change == "zero":
            weights[..., 0] = 0
        elif self.one.change == "mixed":
            weights = weights * torch.linspace(-1, 1, weights.shape[-1], dtype=weights.dtype)
        elif self.one.change == "drop":
            weights = self.drop(weights)
        return weights

    def product(self, weights: Tensor, value: Tensor) -> Tensor:
        if self.one.change == "perm":
            order = torch.arange(value.shape[-2]).flip(0)
            weights, value = weights[..., order], value[..., order, :]
        elif self.one.change == "half" and value.shape[-2] > 1:
            half = value.shape[-2] // 2
            first = weights[..., :half] @ value[..., :half, :]
            return first + weights[..., half:] @ value[..., half:, :]
        if self.one.route == "einsum" and weights.ndim == 4:
            return torch.einsum("xyqk,xykd->xyqd", weights, value)
        if self.one.route == "einsum turned" and weights.ndim == 4:
            return torch.einsum("xykd,xyqk->qxdy", value, weights).permute(1, 3, 0, 2)
        if self.one.route == "left":
            return (value.mT @ weights.mT).mT
        if "bmm" in self.one.route:
            lead = weights.shape[:-2]
            weights, value = (one.reshape(-1, *one.shape[-2:]) for one in (weights, value))
            if self.one.route == "bmm left":
                return torch.bmm(value.mT, weights.mT).mT.unflatten(0, lead)
            return torch.bmm(weights, value).unflatten(0, lead)
        return weights @ value


class Model(nn.Module):
    """The attention of one seed, and a second module that is always captured."""

    def __init__(self, one: Choice, seed: int) -> None:
        super().__init__()
        self.fuzzed = FuzzedAttention(one, seed)
        self.other = nn.MultiheadAttention(12, 2, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fuzzed(x, y), self.other(x, x, x, need_weights=False)[0]


def module(seed: int) -> tuple[Model, Tensor, Tensor]:
    """Return the model of one seed and its inputs."""
    one = choice(seed)
    b, _, q, k, _ = one.sizes
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(b, n, 12, generator=draw) for n in (q, k))
    dtype = torch.float32 if one.dtype == torch.bfloat16 else one.dtype
    return Model(one, seed).eval().to(dtype), x.to(dtype), y.to(dtype)


def expected(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """Return the weights that multiply the values."""
    one, weights = model.fuzzed.one, model.fuzzed.slow(x, y)
    if one.route == "sdpa":
        return weights
    if one.change == "scale":
        return weights * 0.5
    if one.change == "zero":
        return torch.cat([torch.zeros_like(weights[..., :1]), weights[..., 1:]], dim=-1)
    if one.change == "mixed":
        return weights * torch.linspace(-1, 1, weights.shape[-1], dtype=torch.float64)
    return weights.flip(-1) if one.change == "perm" else weights


def outcome(seed: int) -> str:
    """Return the result of one seed: "exact", "rejected", or the problem."""
    model, x, y = module(seed)
    one = model.fuzzed.one
    mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    low = torch.autocast("cpu", torch.bfloat16) if one.dtype == torch.bfloat16 else None
    with mode[one.mode](), low or contextlib.nullcontext():
        plain = model(x, y)[0]
        truth = expected(model, x, y).detach()
        try:
            with watch(model) as trace:
                out = model(x, y)[0]
        except (NotImplementedError, ValueError) as problem:
            named = "FuzzedAttention" in str(problem) or "fuzzed" in str(problem)
            return "rejected" if named else f"an error without a name: {problem}"
    if one.change != "drop" and not torch.allclose(out, plain, rtol=1e-4, atol=1e-5):
        return "the output was changed"
    calls = [call for call in trace if call.name == "fuzzed"]
    if not calls:
        return "missing without an error"
    if len(calls) != 1:
        return f"{len(calls)} calls"
    most = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 4e-2}[one.dtype]
    weights = calls[0].weights().double().detach()
    if tuple(weights.shape) != tuple(truth.shape):
        return f"shape {tuple(weights.shape)} for {tuple(truth.shape)}"
    if float((weights - truth).abs().max()) > most:
        return f"off by {float((weights - truth).abs().max())}"
    return _other_readings(calls[0], truth, most)


def _other_readings(call, truth: Tensor, most: float) -> str:
    """Check the same call read as logarithms and as a block."""
    rows, keys = slice(call.shape[2] // 2, None), slice(0, 1)
    part = call.weights(rows, keys).double().detach()
    if float((part - truth[:, :, rows, keys]).abs().max()) > most:
        return "a block is off"
    try:
        logs = call.log_weights().double().detach().exp()
    except ValueError:
        return "exact"
    return "exact" if float((logs - truth).abs().max()) <= most else "logarithms are off"


def run(seeds: range) -> Counter[str]:
    """Try many seeds; print each problem with its seed."""
    found = Counter[str]()
    for seed in seeds:
        result = outcome(seed)
        found[
            "exact" if result == "exact" else "rejected" if result == "rejected" else "wrong"
        ] += 1
        if result not in ("exact", "rejected"):
            print(f"seed {seed}: {result}: {choice(seed)}")
    return found


@pytest.mark.long
def test_random_modules_are_exact_or_rejected() -> None:
    found = run(range(60))
    assert not found["wrong"] and found["exact"] >= 30, found


@pytest.mark.long
def test_many_random_modules_are_exact_or_rejected() -> None:
    first = int(os.environ.get("OVERT_FUZZ_SEED", "1000"))
    print(f"seeds {first} to {first + 1499} (OVERT_FUZZ_SEED={first})")
    found = run(range(first, first + 1500))
    assert not found["wrong"] and found["exact"] >= 700, found
