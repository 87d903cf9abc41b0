"""Section 3: savings of hard attention; aggregation of kept cells compared with all cells.

Forward and backward passes, including the selection of cells. `share` is the speedup divided by the
ratio of floating-point operations; for the adaptive rule divided by all cells / mean kept. A mask
of zeros saves nothing and is also measured. The dense relation network is the published one, which
concatenates pairs; ours splits its first layer. Equation 7 as printed has one value per cell and
uses PyTorch's fused attention; for samples with unequal numbers of kept cells it uses nested
tensors on a GPU. There, matrix products are in TF32, and all cells are processed by plain
operations and by our kernels for kept cells, whichever is faster.
"""

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from overt import nn as overt_nn
from overt.nn.hard_attention import triton_launch
from overt.nn.hard_attention.aggregate import NonLocalAggregation, RelationAggregation
from overt.nn.hard_attention.selection import (
    CellsInPlace,
    PaddedCells,
    Rule,
    SelectedCells,
    count_kept,
    gather_cells,
    keep_above_uniform,
    keep_top,
    pad_cells,
    presence,
)
from overt.nn.token_pruning.flops import encoder_flops

from .clock import Spread, Times, capture_graph, describe_error, device_clock, time_variants
from .report import Curve, Goal, Report, Row, Setting, at_least, gpu_row, missing_row, speedup_row

SHARES = (0.16, 0.25, 0.33, 0.48)
GATHER_GOAL, ADAPTIVE_GOAL, GPU_GOAL = 0.85, 0.9, 0.6
TEMPERATURES = (0.5, 1.0, 2.0)

Run = Callable[[], Tensor]


class DenseRelation(nn.Module):
    """Relation network whose first layer takes concatenated pairs, before factorization."""

    def __init__(self, aggregation: RelationAggregation) -> None:
        super().__init__()
        self.aggregation = aggregation

    def forward(self, cells: Tensor, question: Tensor) -> Tensor:
        """Process all pairs, each concatenated with the question."""
        b, n, _ = cells.shape
        parts = (cells[:, :, None], cells[:, None], question[:, None, None])
        pairs = torch.cat([part.expand(b, n, n, -1) for part in parts], dim=-1)
        return self.aggregation.rest(self.aggregation.first(pairs).relu_()).sum(dim=(1, 2))


class Equation7(nn.Module):
    """Equation 7 as printed: queries, keys and values of every cell, then a sum."""

    def __init__(self, aggregation: NonLocalAggregation) -> None:
        super().__init__()
        self.aggregation = aggregation

    def forward(self, cells: Tensor) -> Tensor:
        """Attend from all cells to all cells."""
        weight = torch.cat([self.aggregation.query_and_key.weight, self.aggregation.value.weight])
        query, key, value = rearrange(
            nn.functional.linear(cells, weight),
            "b n (t h d) -> t b h n d",
            t=3,
            h=self.aggregation.heads,
        )
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, scale=self.aggregation.scale
        )
        return rearrange(attended.sum(dim=2), "b h d -> b (h d)")


def nested_attention(aggregation: NonLocalAggregation, cells: Tensor, kept: Tensor) -> Tensor:
    """Compute equation 7 as printed over samples of unequal length, with nested tensors."""
    counts = kept.sum(dim=-1)
    packed = cells.flatten(0, 1).index_select(0, kept.flatten().nonzero()[:, 0])
    offsets = nn.functional.pad(counts.cumsum(0), (1, 0))
    longest = int(counts.max())
    weight = torch.cat([aggregation.query_and_key.weight, aggregation.value.weight])
    parts = nn.functional.linear(packed, weight).unflatten(1, (3, aggregation.heads, -1)).unbind(1)
    query, key, value = (
        torch.nested.nested_tensor_from_jagged(
            one.contiguous(), offsets, min_seqlen=1, max_seqlen=longest
        ).transpose(1, 2)
        for one in parts
    )
    attended = nn.functional.scaled_dot_product_attention(
        query, key, value, scale=aggregation.scale
    )
    rows = attended.transpose(1, 2).values().flatten(1)
    owners = torch.arange(len(cells), device=cells.device).repeat_interleave(
        counts, output_size=len(packed)
    )
    return rows.new_zeros(len(cells), rows.shape[1]).index_add(0, owners, rows)


def gather_kept(cells: Tensor, rule: Rule) -> SelectedCells:
    """Return the kept cells in the format of the models."""
    kept = rule(presence(cells.detach()))
    return gather_cells(cells, kept, count_kept(rule, cells.shape[1]))


def mask_cells(cells: Tensor, rule: Rule) -> PaddedCells:
    """Return all cells with weights 0 and 1."""
    kept = rule(presence(cells.detach()))
    return PaddedCells(cells, weights=kept.to(cells.dtype))


class Case:
    """A module, cells of unequal norm, and questions."""

    def __init__(self, module: Any, batch: int, count: int, width: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = 1 + 0.1 * torch.randn(batch, count, 1, generator=generator).abs()
        cells = sizes * torch.randn(batch, count, width, generator=generator)
        self.module = module.to(device)
        self.cells = cells.to(device).requires_grad_()
        self.question = torch.randn(batch, 128, generator=generator).to(device)
        self.count = count

    def all(self) -> Tensor:
        """Process all cells, without a selection."""
        found: Tensor = self.module(PaddedCells(self.cells), self.question)
        return found

    def all_in_place(self) -> Tensor:
        """Process all cells with our kernels for kept cells."""
        everything = torch.ones(self.cells.shape[:2], dtype=torch.bool, device=self.cells.device)
        found: Tensor = self.module(CellsInPlace(self.cells, everything), self.question)
        return found

    @property
    def has_kernels(self) -> bool:
        """Whether our kernels can read the cells in place."""
        if not isinstance(self.module, NonLocalAggregation):
            return False
        layer = self.module.query_and_key.weight
        return triton_launch.supports_attention(self.cells, layer, self.module.heads)

    def select(self, variant: Callable[..., SelectedCells], rule: Rule) -> Tensor:
        """Process the cells that a rule keeps, with one of the implementations."""
        found: Tensor = self.module(variant(self.cells, rule), self.question)
        return found

    def zero_grad(self) -> None:
        """Remove the gradients."""
        self.cells.grad = None
        self.module.zero_grad(set_to_none=True)

    def gradients(self, run: Run) -> list[Tensor]:
        """Return the gradients of the cells and of the module."""
        self.zero_grad()
        run().square().sum().backward()
        tensors = (self.cells, *self.module.parameters())
        found = [one.grad for one in tensors if one.grad is not None]
        self.zero_grad()
        return found

    def time(self, runs: dict[str, Run], setting: Setting) -> Times:
        """Time forward and backward of each variant."""

        def step(run: Run) -> Callable[[], None]:
            return lambda: run().square().sum().backward()

        steps = {name: step(run) for name, run in runs.items()}
        limit = 3.0 if setting.gpu else 9.0
        return time_variants(
            steps, setting.rounds, device_clock(setting.device), before=self.zero_grad, limit=limit
        )

    def time_graphs(self, runs: dict[str, Run], setting: Setting) -> Times:
        """Time the same in CUDA graphs."""

        def step(run: Run) -> Callable[[], None]:
            def run_step() -> None:
                self.zero_grad()
                run().square().sum().backward()

            return run_step

        graphs = {name: capture_graph(step(run)) for name, run in runs.items()}
        return time_variants(graphs, 2 * setting.rounds, device_clock(setting.device), limit=3.0)


def assert_same(first: Tensor, *others: Tensor) -> None:
    """Assert that variants agree to 1e-4 of the largest value (CPU) or 5e-3 (GPU)."""
    for other in others:
        difference = float((first - other).abs().max() / first.abs().max())
        assert difference < (1e-4 if first.is_cpu else 5e-3), f"variants differ by {difference:g}"


def assert_same_gradients(case: Case, one: Run, other: Run) -> float:
    """Assert that gradients agree; return the largest relative difference.

    In TF32 they are rounded several times, so that only large differences are errors.
    """
    pairs = zip(case.gradients(one), case.gradients(other), strict=True)
    difference = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
    assert difference < (1e-3 if case.cells.is_cpu else 0.1), f"gradients differ by {difference:g}"
    return difference


def divide_spread(ratio: Spread, best_ratio: float) -> Spread:
    """Divide a spread by the best possible ratio."""
    return Spread(ratio.median / best_ratio, ratio.low / best_ratio, ratio.high / best_ratio)


def _row(label: str, times: Times, best_ratio: float, unit: str, goal: Goal | None) -> Row:
    peer = _fastest(times)
    ratio = divide_spread(times.ratio(peer, "kept cells"), best_ratio)
    ours, theirs = times.spread("kept cells"), times.spread(peer)
    return Row(label, "kept cells", peer, unit, ratio, goal, ours, theirs)


def _fastest(times: Times) -> str:
    """Return the fastest variant for all cells."""
    variants = [name for name in times.seconds if name.startswith("all cells")]
    return min(variants, key=lambda name: times.spread(name).median)


def _all_cell_variants(case: Case) -> dict[str, Run]:
    """Return the variants for all cells."""
    plain: dict[str, Run] = {"all cells": case.all}
    return {**plain, "all cells, by kernels": case.all_in_place} if case.has_kernels else plain


def try_kernels(case: Case, report: Report) -> None:
    """Run the kernels once; if they fail, report it and continue without them."""
    try:
        for rule in (partial(keep_top, count=2), keep_above_uniform):
            case.select(gather_kept, rule).square().sum().backward()
    except Exception as error:
        traceback.print_exc()
        triton_launch.triton_installed = lambda: False  # type: ignore[assignment]
        report.add(
            missing_row(
                "kernels of hard attention", f"plain operations instead; {describe_error(error)}"
            )
        )
    case.zero_grad()


def compare_fixed(
    name: str, case: Case, setting: Setting, report: Report, dense: dict[str, Run]
) -> Curve:
    """Compare a fixed number of cells, gathered and masked, with all cells."""
    lines: dict[str, list[float]] = {}
    shares = (0.25,) if setting.quick else SHARES
    for share in shares:
        count = round(share * case.count)
        rule = partial(keep_top, count=count)
        runs: dict[str, Run] = {
            "all cells": case.all,
            "kept cells": partial(case.select, gather_kept, rule),
            "masking": partial(case.select, mask_cells, rule),
            **(dense if share == 0.25 else {}),
        }
        label = f"{name}, {count} of {case.count}"
        with torch.no_grad():
            assert_same(runs["masking"](), runs["kept cells"]())
        report.facts[f"{label}: gradient difference from masking"] = assert_same_gradients(
            case, runs["masking"], runs["kept cells"]
        )
        times = case.time(runs, setting)
        flops = case.module.flops(torch.tensor([case.count, count], dtype=torch.float64))
        operation_ratio = float(flops[0] / flops[1])
        goal = None if setting.gpu else at_least(GATHER_GOAL, "cpu")  # GPU: in a CUDA graph, below
        report.add(_row(label, times, operation_ratio, "share of the operation ratio", goal))
        if setting.gpu:
            ours = {**_all_cell_variants(case), "kept cells": runs["kept cells"]}
            run = partial(compare_fixed_graph, label, case, ours, operation_ratio, setting, report)
            report.part(f"{label}, CUDA graph", run)
        lines.setdefault("all cells", []).append(times.spread("all cells").median)
        lines.setdefault("masking", []).append(times.spread("masking").median)
        lines.setdefault("kept cells", []).append(times.spread("kept cells").median)
        if share == 0.25:
            report.add(speedup_row(f"{label}", times, "kept cells", "all cells"))
            report.add(*(speedup_row(f"{label}", times, "kept cells", other) for other in dense))
            report.add(speedup_row(f"{label}", times, "kept cells", "masking"))
    title = f"{name}: {case.count} cells, {len(case.cells)} samples"
    sizes = [round(share * case.count) / case.count for share in shares]
    return Curve(title, "share of the cells kept", "seconds", sizes, lines, logarithmic=False)


def compare_fixed_graph(
    label: str,
    case: Case,
    runs: dict[str, Run],
    operation_ratio: float,
    setting: Setting,
    report: Report,
) -> None:
    """Time both in CUDA graphs: the number of kept cells is known in advance."""
    times = case.time_graphs(runs, setting)
    goal = at_least(GPU_GOAL, "cuda")
    report.add(
        _row(f"{label}, CUDA graph", times, operation_ratio, "share of the operation ratio", goal)
    )


def compare_adaptive(name: str, case: Case, setting: Setting, report: Report) -> None:
    """Compare the cells above uniform with all cells."""
    for temperature in (1.0,) if setting.quick else TEMPERATURES:
        rule = partial(keep_above_uniform, temperature=temperature)
        runs: dict[str, Run] = {
            "all cells": case.all,
            "kept cells": partial(case.select, gather_kept, rule),
        }
        counts = rule(presence(case.cells.detach())).sum(dim=-1).double()
        mean, most = float(counts.mean()), int(counts.max())
        label = f"{name}, mean {mean:.1f}, max {most} of {case.count}"
        with torch.no_grad():
            assert_same(case.select(mask_cells, rule), runs["kept cells"]())
        report.facts[f"{label}: gradient difference from masking"] = assert_same_gradients(
            case, partial(case.select, mask_cells, rule), runs["kept cells"]
        )
        times = case.time(runs, setting)
        goal = (
            None if setting.gpu else at_least(ADAPTIVE_GOAL, "cpu")
        )  # GPU: in a CUDA graph, below
        report.add(_row(label, times, case.count / mean, "share of all / mean kept", goal))
        if setting.gpu:
            report.add(speedup_row(label, times, "kept cells", "all cells"))
            run = partial(compare_adaptive_graph, label, case, rule, most, mean, setting, report)
            report.part(f"{label}, CUDA graph", run)
        if setting.gpu and isinstance(case.module, NonLocalAggregation):
            run = partial(compare_nested, label, case, rule, setting, report)
            report.part(f"{label}: nested", run)


def compare_adaptive_graph(
    label: str, case: Case, rule: Rule, most: int, mean: float, setting: Setting, report: Report
) -> None:
    """Time the adaptive rule in CUDA graphs, without synchronizing for the number of kept cells.

    Our kernels do not need that number. Without them, the maximum over samples is known in advance.
    """

    def pad_to_maximum(cells: Tensor, rule: Rule) -> PaddedCells:
        return pad_cells(cells, rule(presence(cells.detach())), most)

    variant, suffix = (gather_kept, "") if case.has_kernels else (pad_to_maximum, ", known maximum")
    runs: dict[str, Run] = {
        **_all_cell_variants(case),
        "kept cells": partial(case.select, variant, rule),
    }
    with torch.no_grad():
        assert_same(case.select(mask_cells, rule), runs["kept cells"]())
    times = case.time_graphs(runs, setting)
    label = f"{label}, CUDA graph{suffix}"
    goal = at_least(ADAPTIVE_GOAL, "cuda")
    report.add(_row(label, times, case.count / mean, "share of all / mean kept", goal))
    report.add(speedup_row(label, times, "kept cells", _fastest(times)))


def compare_nested(label: str, case: Case, rule: Rule, setting: Setting, report: Report) -> None:
    """Compare cells in place, or padded to the maximum, with nested tensors."""
    module = case.module
    runs: dict[str, Run] = {
        "kept cells": partial(case.select, gather_kept, rule),
        "nested tensors": lambda: nested_attention(
            module, case.cells, rule(presence(case.cells.detach()))
        ),
    }
    with torch.no_grad():
        assert_same(runs["kept cells"](), runs["nested tensors"]())
    report.add(speedup_row(label, case.time(runs, setting), "kept cells", "nested tensors"))


# --- tokens of a ViT


def vit_tokens(setting: Setting, report: Report) -> None:
    """Measure the latency of a ViT with token pruning, and its operations."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    # large enough to use a GPU fully
    name, heads, samples = ("ViT-base", 12, 512) if setting.gpu else ("ViT-tiny", 3, 4)
    layers, width, mlp_width = 12, 64 * heads, 256 * heads
    config = ViTConfig(
        image_size=224, patch_size=16, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=heads, intermediate_size=mlp_width, num_labels=10,
    )  # fmt: skip
    vit = ViTForImageClassification(config).eval().to(setting.device)
    generator = torch.Generator().manual_seed(0)
    size = (setting.size(samples, 1), 3, 224, 224)
    pixels = torch.randn(size, generator=generator).to(setting.device)
    for share in (0.5,) if setting.quick else (0.7, 0.5):
        keep = partial(overt_nn.keep_share, share=share)
        found: list[list[int]] = []

        @torch.inference_mode()
        def run_pruned(keep: Any = keep, found: list[list[int]] = found) -> None:
            with overt_nn.prune_tokens(vit, after=(3, 6, 9), keep=keep) as session:
                vit(pixel_values=pixels)
            found.append(list(session.lengths))

        @torch.inference_mode()
        def unpruned() -> None:
            vit(pixel_values=pixels)

        variants: dict[str, Callable[[], None]] = {"pruned": run_pruned, "all tokens": unpruned}
        times = time_variants(variants, setting.rounds, device_clock(setting.device))
        assert found[0][0] == 197 and found[0][-1] < 197 * share, "no token was pruned"
        operation_ratio = encoder_flops([197] * layers, width, mlp_width) / encoder_flops(
            found[0], width, mlp_width
        )
        label = f"{name}, {share:g} of the tokens after 3, 6, 9 layers"
        ratio = times.ratio("all tokens", "pruned")
        report.add(
            speedup_row(label, times, "pruned", "all tokens"),
            Row(
                label, "", "", "share of the operation ratio", divide_spread(ratio, operation_ratio)
            ),
        )


def section(setting: Setting, report: Report) -> None:
    """Measure non-local operator, relation network, adaptive rule and token pruning."""
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
    cells = setting.size(196 if setting.gpu else 100, 20)
    pairs = Case(NonLocalAggregation(512), 256 if setting.gpu else 32, cells, 512, device)
    samples, relation_cells = (128, 100) if setting.gpu else (8, 64)
    relation = Case(
        RelationAggregation(256, 128), samples, setting.size(relation_cells, 12), 256, device
    )
    literal, dense = Equation7(pairs.module), DenseRelation(relation.module)
    if setting.gpu:
        try_kernels(pairs, report)
        try_kernels(relation, report)
    with torch.no_grad():
        assert_same(literal(pairs.cells), pairs.all())
        if pairs.has_kernels:
            assert_same(pairs.all_in_place(), pairs.all())
        assert_same(dense(relation.cells, relation.question), relation.all())
    equation_7: dict[str, Run] = {"eq. 7 as printed": lambda: literal(pairs.cells)}
    dense_variant: dict[str, Run] = {
        "dense relation network": lambda: dense(relation.cells, relation.question)
    }
    for name, case, dense_ways in (
        ("non-local", pairs, equation_7),
        ("relation", relation, dense_variant),
    ):
        run = partial(compare_fixed, name, case, setting, report, dense_ways)
        report.part(name, lambda run=run: report.curves.append(run()))
        report.part(
            f"AdaHAN {name}", partial(compare_adaptive, f"AdaHAN {name}", case, setting, report)
        )
    if setting.gpu:  # enough samples to use a GPU fully
        large = Case(NonLocalAggregation(512), setting.size(2048, 8), cells, 512, device)
        large_name = f"AdaHAN non-local, {len(large.cells)} samples"
        report.part(large_name, partial(compare_adaptive, large_name, large, setting, report))
    report.part("tokens of a ViT", partial(vit_tokens, setting, report))
    if not setting.gpu:
        report.add(gpu_row("kept cells, H200, 256 samples of 196", at_least(GPU_GOAL, "cuda")))
