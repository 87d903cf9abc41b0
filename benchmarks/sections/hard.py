"""Section 3: what hard attention saves. Aggregation of kept cells beside that of all, by turns.

Forward and backward passes, the choice of the cells among them. `share` is how much faster it is
over how many fewer floating-point operations there are; for the adaptive rule it is over all cells
/ mean kept. A mask of zeros saves nothing and stands beside it. The dense relation network is the
published one, which sees pairs side by side; ours takes its first layer apart. Equation 7 as it
is printed has a value a cell and torch's fused attention; for samples that keep unequally many
cells it is written with nested tensors on a card. There products of matrices are in TF32, and all
cells are taken by plain operations and by the kernels that take kept ones, whichever is quicker.
"""

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from overt import models
from overt.models.hard import card
from overt.models.hard.aggregate import Pairwise, Relation
from overt.models.hard.selection import (
    Chosen,
    Kept,
    Rule,
    Standing,
    filled_up,
    gather,
    keep_above_uniform,
    keep_top,
    number_kept,
    presence,
)
from overt.models.thinning.cost import encoder_flops

from .clock import Spread, Times, graphed, race, timer, told
from .report import Curve, Goal, Report, Row, Setting, absent, at_least, faster, needs

SHARES = (0.16, 0.25, 0.33, 0.48)
GATHER, ADAPTIVE, CARD = 0.85, 0.9, 0.6
TEMPERATURES = (0.5, 1.0, 2.0)

Run = Callable[[], Tensor]


class Plain(nn.Module):
    """A relation network whose first layer sees every pair side by side: what is factorised."""

    def __init__(self, like: Relation) -> None:
        super().__init__()
        self.like = like

    def forward(self, cells: Tensor, question: Tensor) -> Tensor:
        """All pairs, the question beside each."""
        b, n, _ = cells.shape
        parts = (cells[:, :, None], cells[:, None], question[:, None, None])
        pairs = torch.cat([part.expand(b, n, n, -1) for part in parts], dim=-1)
        return self.like.rest(self.like.first(pairs).relu_()).sum(dim=(1, 2))


class Literal(nn.Module):
    """Equation 7 as it is printed: queries, keys and values of every cell, then a sum."""

    def __init__(self, like: Pairwise) -> None:
        super().__init__()
        self.like = like

    def forward(self, cells: Tensor) -> Tensor:
        """All cells look at all cells."""
        weight = torch.cat([self.like.query_and_key.weight, self.like.value.weight])
        query, key, value = rearrange(
            nn.functional.linear(cells, weight), "b n (t h d) -> t b h n d", t=3, h=self.like.heads
        )
        seen = nn.functional.scaled_dot_product_attention(query, key, value, scale=self.like.scale)
        return rearrange(seen.sum(dim=2), "b h d -> b (h d)")


def nested(like: Pairwise, cells: Tensor, kept: Tensor) -> Tensor:
    """Equation 7 as it is printed over samples of unequal length: PyTorch's nested tensors."""
    counts = kept.sum(dim=-1)
    packed = cells.flatten(0, 1).index_select(0, kept.flatten().nonzero()[:, 0])
    offsets = nn.functional.pad(counts.cumsum(0), (1, 0))
    longest = int(counts.max())
    weight = torch.cat([like.query_and_key.weight, like.value.weight])
    parts = nn.functional.linear(packed, weight).unflatten(1, (3, like.heads, -1)).unbind(1)
    query, key, value = (
        torch.nested.nested_tensor_from_jagged(
            one.contiguous(), offsets, min_seqlen=1, max_seqlen=longest
        ).transpose(1, 2)
        for one in parts
    )
    seen = nn.functional.scaled_dot_product_attention(query, key, value, scale=like.scale)
    rows = seen.transpose(1, 2).values().flatten(1)
    owners = torch.arange(len(cells), device=cells.device).repeat_interleave(
        counts, output_size=len(packed)
    )
    return rows.new_zeros(len(cells), rows.shape[1]).index_add(0, owners, rows)


def chosen(cells: Tensor, rule: Rule) -> Chosen:
    """The kept cells, as a model takes them."""
    kept = rule(presence(cells.detach()))
    return gather(cells, kept, number_kept(rule, cells.shape[1]))


def masked(cells: Tensor, rule: Rule) -> Kept:
    """All cells with 0 and 1: what a mask costs."""
    kept = rule(presence(cells.detach()))
    return Kept(cells, weights=kept.to(cells.dtype))


class Case:
    """A module, cells of unequal norm of which a few stand out, and questions."""

    def __init__(self, module: Any, batch: int, count: int, width: int, device: str) -> None:
        drawn = torch.Generator().manual_seed(0)
        sizes = 1 + 0.1 * torch.randn(batch, count, 1, generator=drawn).abs()
        cells = sizes * torch.randn(batch, count, width, generator=drawn)
        self.module = module.to(device)
        self.cells = cells.to(device).requires_grad_()
        self.question = torch.randn(batch, 128, generator=drawn).to(device)
        self.count = count

    def all(self) -> Tensor:
        """All cells, without a choice."""
        found: Tensor = self.module(Kept(self.cells), self.question)
        return found

    def all_standing(self) -> Tensor:
        """All cells, by the kernels that take kept ones."""
        every = torch.ones(self.cells.shape[:2], dtype=torch.bool, device=self.cells.device)
        found: Tensor = self.module(Standing(self.cells, every), self.question)
        return found

    @property
    def by_kernels(self) -> bool:
        """Whether kernels of our own take the cells where they stand."""
        if not isinstance(self.module, Pairwise):
            return False
        layer = self.module.query_and_key.weight
        return card.can_look(self.cells, layer, self.module.heads)

    def some(self, way: Callable[..., Chosen], rule: Rule) -> Tensor:
        """The cells that a rule keeps, taken in one way or another."""
        found: Tensor = self.module(way(self.cells, rule), self.question)
        return found

    def clear(self) -> None:
        """No gradients."""
        self.cells.grad = None
        self.module.zero_grad(set_to_none=True)

    def slopes(self, run: Run) -> list[Tensor]:
        """The gradients of the cells and of the module."""
        self.clear()
        run().square().sum().backward()
        given = (self.cells, *self.module.parameters())
        found = [one.grad for one in given if one.grad is not None]
        self.clear()
        return found

    def raced(self, runs: dict[str, Run], setting: Setting) -> Times:
        """Seconds of each, forward and backward."""

        def step(run: Run) -> Callable[[], None]:
            return lambda: run().square().sum().backward()

        steps = {name: step(run) for name, run in runs.items()}
        limit = 3.0 if setting.gpu else 9.0
        return race(steps, setting.rounds, timer(setting.device), before=self.clear, limit=limit)

    def replayed(self, runs: dict[str, Run], setting: Setting) -> Times:
        """The same, each as one graph of the card."""

        def step(run: Run) -> Callable[[], None]:
            def once() -> None:
                self.clear()
                run().square().sum().backward()

            return once

        graphs = {name: graphed(step(run)) for name, run in runs.items()}
        return race(graphs, 2 * setting.rounds, timer(setting.device), limit=3.0)


def same(first: Tensor, *others: Tensor) -> None:
    """Assert that ways agree to 1e-4 of the largest value, half of that in bits on a card."""
    for other in others:
        apart = float((first - other).abs().max() / first.abs().max())
        assert apart < (1e-4 if first.is_cpu else 5e-3), f"two ways are {apart:g} apart"


def same_slopes(case: Case, one: Run, other: Run) -> float:
    """Assert that gradients agree, and how far they are apart at most, of the largest of each.

    In TF32 they are rounded several times on their way, and only what is wrong is far off.
    """
    pairs = zip(case.slopes(one), case.slopes(other), strict=True)
    apart = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    assert apart < (1e-3 if case.cells.is_cpu else 0.1), f"gradients are {apart:g} apart"
    return apart


def share_of(ratio: Spread, whole: float) -> Spread:
    """A ratio over the best it could be."""
    return Spread(ratio.median / whole, ratio.low / whole, ratio.high / whole)


def _row(what: str, times: Times, whole: float, unit: str, goal: Goal | None) -> Row:
    peer = _quickest(times)
    ratio = share_of(times.over(peer, "kept cells"), whole)
    ours, theirs = times.of("kept cells"), times.of(peer)
    return Row(what, "kept cells", peer, unit, ratio, goal, ours, theirs)


def _quickest(times: Times) -> str:
    """The better of the ways to take all cells."""
    ways = [name for name in times.seconds if name.startswith("all cells")]
    return min(ways, key=lambda name: times.of(name).median)


def _everything(case: Case) -> dict[str, Run]:
    """The ways to take all cells."""
    plain: dict[str, Run] = {"all cells": case.all}
    return {**plain, "all cells, by kernels": case.all_standing} if case.by_kernels else plain


def tried(case: Case, report: Report) -> None:
    """Try the kernels once; where they fail, say so and go on without them."""
    try:
        for rule in (partial(keep_top, count=2), keep_above_uniform):
            case.some(chosen, rule).square().sum().backward()
    except Exception as error:
        traceback.print_exc()
        card.installed = lambda: False  # type: ignore[assignment]
        report.add(absent("kernels of hard attention", f"plain operations instead; {told(error)}"))
    case.clear()


def fixed(name: str, case: Case, setting: Setting, report: Report, dense: dict[str, Run]) -> Curve:
    """A fixed number of cells, gathered and masked, beside all of them."""
    lines: dict[str, list[float]] = {}
    shares = (0.25,) if setting.quick else SHARES
    for share in shares:
        count = round(share * case.count)
        rule = partial(keep_top, count=count)
        runs: dict[str, Run] = {
            "all cells": case.all,
            "kept cells": partial(case.some, chosen, rule),
            "a mask": partial(case.some, masked, rule),
            **(dense if share == 0.25 else {}),
        }
        what = f"{name}, {count} of {case.count}"
        with torch.no_grad():
            same(runs["a mask"](), runs["kept cells"]())
        report.facts[f"{what}: gradients off those of a mask"] = same_slopes(
            case, runs["a mask"], runs["kept cells"]
        )
        times = case.raced(runs, setting)
        flops = case.module.flops(torch.tensor([case.count, count], dtype=torch.float64))
        fewer = float(flops[0] / flops[1])
        goal = None if setting.gpu else at_least(GATHER, "cpu")  # a card: as a graph, below
        report.add(_row(what, times, fewer, "of the ratio of operations", goal))
        if setting.gpu:
            ours = {**_everything(case), "kept cells": runs["kept cells"]}
            run = partial(as_graph, what, case, ours, fewer, setting, report)
            report.part(f"{what}, recorded", run)
        lines.setdefault("all cells", []).append(times.of("all cells").median)
        lines.setdefault("a mask", []).append(times.of("a mask").median)
        lines.setdefault("kept cells", []).append(times.of("kept cells").median)
        if share == 0.25:
            report.add(faster(f"{what}", times, "kept cells", "all cells"))
            report.add(*(faster(f"{what}", times, "kept cells", other) for other in dense))
            report.add(faster(f"{what}", times, "kept cells", "a mask"))
    title = f"{name}: {case.count} cells, {len(case.cells)} samples"
    sizes = [round(share * case.count) / case.count for share in shares]
    return Curve(title, "share of the cells kept", "seconds", sizes, lines, logarithmic=False)


def as_graph(what: str, case: Case, runs: dict[str, Run], fewer: float,
             setting: Setting, report: Report) -> None:  # fmt: skip
    """The same with both as one graph of the card: how many cells are kept is known before."""
    times = case.replayed(runs, setting)
    goal = at_least(CARD, "cuda")
    report.add(_row(f"{what}, recorded", times, fewer, "of the ratio of operations", goal))


def adaptive(name: str, case: Case, setting: Setting, report: Report) -> None:
    """As many cells as are above uniform, beside all of them."""
    for temperature in (1.0,) if setting.quick else TEMPERATURES:
        rule = partial(keep_above_uniform, temperature=temperature)
        runs: dict[str, Run] = {
            "all cells": case.all,
            "kept cells": partial(case.some, chosen, rule),
        }
        counts = rule(presence(case.cells.detach())).sum(dim=-1).double()
        mean, most = float(counts.mean()), int(counts.max())
        what = f"{name}, mean {mean:.1f}, most {most} of {case.count}"
        with torch.no_grad():
            same(case.some(masked, rule), runs["kept cells"]())
        report.facts[f"{what}: gradients off those of a mask"] = same_slopes(
            case, partial(case.some, masked, rule), runs["kept cells"]
        )
        times = case.raced(runs, setting)
        goal = None if setting.gpu else at_least(ADAPTIVE, "cpu")  # a card: as a graph, below
        report.add(_row(what, times, case.count / mean, "of all / mean kept", goal))
        if setting.gpu:
            report.add(faster(what, times, "kept cells", "all cells"))
            run = partial(unasked, what, case, rule, most, mean, setting, report)
            report.part(f"{what}, recorded", run)
        if setting.gpu and isinstance(case.module, Pairwise):
            run = partial(beside_nested, what, case, rule, setting, report)
            report.part(f"{what}: nested", run)


def unasked(what: str, case: Case, rule: Rule, most: int, mean: float,
            setting: Setting, report: Report) -> None:  # fmt: skip
    """As graphs of the card, which is not asked how many cells its samples keep.

    Kernels of our own need not know it; where there are none, how many the fullest sample keeps is
    known before.
    """

    def roomy(cells: Tensor, rule: Rule) -> Kept:
        return filled_up(cells, rule(presence(cells.detach())), most)

    way, told = (chosen, "") if case.by_kernels else (roomy, ", the fullest sample known")
    runs: dict[str, Run] = {**_everything(case), "kept cells": partial(case.some, way, rule)}
    with torch.no_grad():
        same(case.some(masked, rule), runs["kept cells"]())
    times = case.replayed(runs, setting)
    what = f"{what}, recorded{told}"
    goal = at_least(ADAPTIVE, "cuda")
    report.add(_row(what, times, case.count / mean, "of all / mean kept", goal))
    report.add(faster(what, times, "kept cells", _quickest(times)))


def beside_nested(what: str, case: Case, rule: Rule, setting: Setting, report: Report) -> None:
    """Cells where they stand, or filled up to the fullest, beside nested tensors."""
    module = case.module
    runs: dict[str, Run] = {
        "kept cells": partial(case.some, chosen, rule),
        "nested tensors": lambda: nested(module, case.cells, rule(presence(case.cells.detach()))),
    }
    with torch.no_grad():
        same(runs["kept cells"](), runs["nested tensors"]())
    report.add(faster(what, case.raced(runs, setting), "kept cells", "nested tensors"))


# --- tokens of a ViT


def tokens(setting: Setting, report: Report) -> None:
    """Tokens that go between the layers of a ViT: latency, beside how much less it computes."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    # on a card one that is large enough to keep it busy
    name, heads, samples = ("ViT-base", 12, 512) if setting.gpu else ("ViT-tiny", 3, 4)
    layers, width, inner = 12, 64 * heads, 256 * heads
    config = ViTConfig(
        image_size=224, patch_size=16, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=heads, intermediate_size=inner, num_labels=10,
    )  # fmt: skip
    vit = ViTForImageClassification(config).eval().to(setting.device)
    drawn = torch.Generator().manual_seed(0)
    size = (setting.some(samples, 1), 3, 224, 224)
    pixels = torch.randn(size, generator=drawn).to(setting.device)
    for share in (0.5,) if setting.quick else (0.7, 0.5):
        keep = partial(models.keep_share, share=share)
        found: list[list[int]] = []

        @torch.inference_mode()
        def thin(keep: Any = keep, found: list[list[int]] = found) -> None:
            with models.thin(vit, after=(3, 6, 9), keep=keep) as thinned:
                vit(pixel_values=pixels)
            found.append(list(thinned.lengths))

        @torch.inference_mode()
        def whole() -> None:
            vit(pixel_values=pixels)

        ways: dict[str, Callable[[], None]] = {"thin": thin, "all tokens": whole}
        times = race(ways, setting.rounds, timer(setting.device))
        assert found[0][0] == 197 and found[0][-1] < 197 * share, "no token went"
        fewer = encoder_flops([197] * layers, width, inner) / encoder_flops(found[0], width, inner)
        what = f"{name}, {share:g} of the tokens after 3, 6, 9 layers"
        ratio = times.over("all tokens", "thin")
        report.add(
            faster(what, times, "thin", "all tokens"),
            Row(what, "", "", "of the ratio of operations", share_of(ratio, fewer)),
        )


def section(setting: Setting, report: Report) -> None:
    """Non-local operator, relation network, adaptive rule, tokens."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if setting.gpu else before)
    try:
        _section(setting, report)
    finally:
        torch.set_float32_matmul_precision(before)


def _section(setting: Setting, report: Report) -> None:
    device = setting.device
    cells = setting.some(196 if setting.gpu else 100, 20)
    pairs = Case(Pairwise(512), 256 if setting.gpu else 32, cells, 512, device)
    samples, places = (128, 100) if setting.gpu else (8, 64)
    relation = Case(Relation(256, 128), samples, setting.some(places, 12), 256, device)
    literal, dense = Literal(pairs.module), Plain(relation.module)
    if setting.gpu:
        tried(pairs, report)
        tried(relation, report)
    with torch.no_grad():
        same(literal(pairs.cells), pairs.all())
        if pairs.by_kernels:
            same(pairs.all_standing(), pairs.all())
        same(dense(relation.cells, relation.question), relation.all())
    printed: dict[str, Run] = {"eq. 7 as printed": lambda: literal(pairs.cells)}
    side: dict[str, Run] = {
        "dense relation network": lambda: dense(relation.cells, relation.question)
    }
    for name, case, dense_ways in (("non-local", pairs, printed), ("relation", relation, side)):
        run = partial(fixed, name, case, setting, report, dense_ways)
        report.part(name, lambda run=run: report.curves.append(run()))
        report.part(f"AdaHAN {name}", partial(adaptive, f"AdaHAN {name}", case, setting, report))
    if setting.gpu:  # enough of them to keep a card busy
        many = Case(Pairwise(512), setting.some(2048, 8), cells, 512, device)
        named = f"AdaHAN non-local, {len(many.cells)} samples"
        report.part(named, partial(adaptive, named, many, setting, report))
    report.part("tokens of a ViT", partial(tokens, setting, report))
    if not setting.gpu:
        report.add(needs("kept cells, H200, 256 samples of 196", at_least(CARD, "cuda")))
