"""Where targets come from: a function from sample ids to the maps that attention should be.

A source is `Targets`: surrogates read from a folder, what is known about a data set, what people
looked at, what a gradient says. Losses and placebos take any of them, so that rows of a table
differ in nothing but where their targets came from.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Form, Layout, Span
from overt.data.batch import Batch

Targets = Callable[[Sequence[str]], AttentionMap]  # by sample id; an empty row is not supervised


def known(batch_of: Callable[[Sequence[str]], Batch]) -> Targets:
    """What a data set says of where to look, normalised: the truth of scenes, or human attention.

    An upper bound for targets that are found without it.
    """

    def give(ids: Sequence[str]) -> AttentionMap:
        found = batch_of(ids).target
        if found is None:
            raise ValueError("this data set does not say where to look: its batches have no target")
        return found.normalize()

    return give


def grad_cam(
    cells: Float[Tensor, "b k d"],
    keys: Layout,
    score: Callable[[Float[Tensor, "b k d"]], Float[Tensor, " b"]],
    present: Bool[Tensor, "b k"] | None = None,
) -> AttentionMap:
    """What the score of the right answer rests on: Grad-CAM of cells or words, normalised.

    `score` is asked with features in the place of those given: `lambda x: right(model.decide(
    replace(features, values=x)).prediction)`. `present` says which are there: padding of a text is
    not. Features are weighed by the mean of their gradient over the cells, and the positive part is
    kept (Selvaraju et al. 2017, https://arxiv.org/abs/1610.02391, eq. 1 and 2). As a target for
    attention it is the baseline of Patro, Anupriy and Namboodiri, "Explanation vs Attention: A
    Two-Player Game to Obtain Attention for VQA", AAAI 2020, https://arxiv.org/abs/1911.08618.

    A sample in which nothing speaks for the answer has an empty row and is not supervised.
    Positions stand on the second axis: `features.flatten(2).transpose(1, 2)`, never a view of
    another shape.
    """
    with torch.enable_grad():
        features = cells.detach().requires_grad_()
        (slope,) = torch.autograd.grad(score(features).sum(), features)
    there = torch.ones_like(cells[..., 0], dtype=torch.bool) if present is None else present
    mean = (slope * there[..., None]).sum(dim=1) / there.sum(dim=1, keepdim=True).clamp_min(1)
    found = (features.detach() * mean[:, None]).sum(dim=-1).clamp_min(0)
    return AttentionMap.from_cells(found * there, keys, present).normalize()


def fitted(target: AttentionMap, attention: AttentionMap) -> AttentionMap:
    """The target on the keys of the attention, where the two were padded to different lengths.

    Only padding is added or cut: keys at the end that the target gives nothing.
    """
    have, want = len(target.keys), len(attention.keys)
    if have == want:
        return replace(target, keys=attention.keys)
    if (target.weights[..., want:] != 0).any():
        raise ValueError(
            f"a target of {have} keys has weight beyond the {want} of the attention: is it the "
            "target of another sample, or were texts cut?"
        )
    nothing = -torch.inf if target.form is Form.LOG else 0.0
    mask = target.mask
    return replace(
        target,
        values=torch.nn.functional.pad(target.values, (0, want - have), value=nothing),
        keys=attention.keys,
        mask=None if mask is None else torch.nn.functional.pad(mask, (0, want - have)),
    )


def remembered(targets: Targets, ids: Sequence[str], portion: int = 64) -> Targets:
    """The same targets, asked for once, `portion` at a time, and kept in memory.

    For sources that are dear, such as the gradient of a model that stays as it is. Maps have one
    query. Each is kept without its padding, and is padded to the longest of those asked for.
    """
    if not ids:
        raise ValueError("there are no samples whose targets could be remembered")
    kept: dict[str, tuple[Tensor, Tensor]] = {}
    for start in range(0, len(ids), portion):
        found = targets(ids[start : start + portion])
        span = _only_span(found)
        for one, weights, seen in zip(
            ids[start : start + portion],
            found.weights.detach()[:, :, :, 0].unbind(),
            found.visible[:, 0].unbind(),
            strict=True,
        ):
            length = int(seen.nonzero().amax()) + 1 if seen.any() else 0
            kept[one] = weights[..., :length].clone(), seen[:length].clone()

    def give(ids: Sequence[str]) -> AttentionMap:
        missing = [one for one in ids if one not in kept]
        if missing:
            raise ValueError(f"no target is kept for {missing[0]!r} (of {len(missing)} samples)")
        rows = [kept[one] for one in ids]
        grid = len(span.shape) > 1
        length = len(span) if grid else max(1, *(len(seen) for _, seen in rows))
        pad = torch.nn.functional.pad
        return AttentionMap(
            torch.stack([pad(row, (0, length - row.shape[-1])) for row, _ in rows])[..., None, :],
            Layout((Span(span.name, span.shape if grid else (length,), slice(0, length)),), length),
            mask=torch.stack([pad(seen, (0, length - len(seen))) for _, seen in rows])[:, None],
            kind=found.kind,
        )

    return give


def _only_span(target: AttentionMap) -> Span:
    spans = target.keys.spans
    if len(spans) != 1 or len(spans[0]) != len(target.keys) or len(target.queries) != 1:
        raise ValueError(
            f"only maps from one query to one kind of key are remembered, not to "
            f"{[one.name for one in spans]} from {len(target.queries)} queries"
        )
    return spans[0]
