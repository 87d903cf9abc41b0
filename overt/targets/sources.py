"""Target sources: functions from sample ids to target maps.

A source is a `Targets` callable: surrogates from a folder, the ground truth of a dataset, human
attention, or Grad-CAM. Losses and placebos accept any of them, so that the rows of a results table
differ only in the source of their targets.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Form, Kind, Layout, Span
from overt.data.batch import Batch
from overt.geometry import PixelGeometry

Targets = Callable[
    [Sequence[str]], AttentionMap
]  # sample ids -> maps; a row of zeros is not supervised


def dataset_targets(batch_of: Callable[[Sequence[str]], Batch]) -> Targets:
    """Return the normalised ground truth of a dataset: object masks or human attention.

    This is an upper bound for targets that are found without it.

    Args:
        batch_of: Returns the batch of some sample ids.

    Returns:
        A target source; it raises `ValueError` if batches have no target.

    Example:
        >>> from overt import words
        >>> from overt.data.batch import Batch
        >>> truth = AttentionMap.from_cells(torch.tensor([[1.0, 1.0, 0.0, 0.0]]), words(4))
        >>> targets = dataset_targets(lambda ids: Batch(ids=tuple(ids), target=truth))
        >>> targets(["a"]).weights.flatten().tolist()
        [0.5, 0.5, 0.0, 0.0]
    """

    def targets_of(ids: Sequence[str]) -> AttentionMap:
        found = batch_of(ids).target
        if found is None:
            raise ValueError("batches of this dataset have no target")
        return found.normalize()

    return targets_of


def grad_cam_target(
    cells: Float[Tensor, "b k d"],
    keys: Layout,
    score: Callable[[Float[Tensor, "b k d"]], Float[Tensor, " b"]],
    present: Bool[Tensor, "b k"] | None = None,
) -> AttentionMap:
    """Compute a normalised Grad-CAM map of cells or words as a target.

    Features are weighted by the mean of their gradient over the cells, and the positive part is
    kept (Selvaraju et al. 2017, https://arxiv.org/abs/1610.02391, eq. 1 and 2). As a target for
    attention it is the baseline of Patro, Anupriy and Namboodiri, "Explanation vs Attention: A
    Two-Player Game to Obtain Attention for VQA", AAAI 2020, https://arxiv.org/abs/1911.08618. A
    sample without positive evidence has an empty row and is not supervised.

    Args:
        cells: The features of cells or words. Positions are the second axis:
            `features.flatten(2).transpose(1, 2)`, not a view of another shape.
        keys: The layout of the cells.
        score: Returns the score of the right answer for given features, such as
            `lambda x: right(model.decide(replace(features, values=x)).prediction)`.
        present: Which positions are not padding.

    Returns:
        A map of probabilities.

    Example:
        >>> from overt import words
        >>> cells = torch.eye(3)[None]
        >>> target = grad_cam_target(cells, words(3), score=lambda x: x[:, 1].sum(dim=-1))
        >>> target.shape
        (1, 1, 1, 1, 3)
    """
    with torch.enable_grad():
        features = cells.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(score(features).sum(), features)
    valid = torch.ones_like(cells[..., 0], dtype=torch.bool) if present is None else present
    mean = (gradient * valid[..., None]).sum(dim=1) / valid.sum(dim=1, keepdim=True).clamp_min(1)
    found = (features.detach() * mean[:, None]).sum(dim=-1).clamp_min(0)
    return AttentionMap.from_cells(found * valid, keys, present).normalize()


def match_keys(target: AttentionMap, attention: AttentionMap) -> AttentionMap:
    """Pad or cut a target to the keys of the attention, if they were padded differently.

    Args:
        target: The target.
        attention: The attention with the keys to match.

    Returns:
        The target with the keys of the attention.

    Raises:
        ValueError: The target has weight on keys that would be cut.

    Example:
        >>> from overt import grid
        >>> attention = AttentionMap.from_scores(torch.zeros(1, 1, 1, 1, 16), grid(4, 4))
        >>> target = AttentionMap.from_cells(torch.ones(1, 4), grid(2, 2)).normalize()
        >>> match_keys(target, attention).shape
        (1, 1, 1, 1, 16)
    """
    have, want = len(target.keys), len(attention.keys)
    if have == want:
        return replace(target, keys=attention.keys)
    if (target.weights[..., want:] != 0).any():
        raise ValueError(
            f"the target has {have} keys with weight beyond the {want} keys of the attention: use "
            "the target of the same sample, without truncated texts"
        )
    fill = -torch.inf if target.form is Form.LOG else 0.0
    mask = target.mask
    return replace(
        target,
        values=torch.nn.functional.pad(target.values, (0, want - have), value=fill),
        keys=attention.keys,
        mask=None if mask is None else torch.nn.functional.pad(mask, (0, want - have)),
        coverage=None,
    )


def move_target(target: AttentionMap, before: PixelGeometry, after: PixelGeometry) -> AttentionMap:
    """Move a target on a grid with its images: crops, shifts and flips of training data.

    Weight moves by shared area (`PixelGeometry.move_cells`). Probabilities sum to 1 again over what
    is left; a sample whose weight is all cropped away has an empty row and is not supervised. The
    result has neither hidden keys nor `coverage`. This does not synchronize the GPU.

    Args:
        target: The target on the images as they were searched or annotated.
        before: Their geometry then, one row per sample.
        after: The geometry of the same images in training.

    Returns:
        The target with the same keys.

    Raises:
        ValueError: The keys are not one grid of rows and columns, or a geometry has another number
            of rows than the target.

    Example:
        >>> from overt import grid
        >>> target = AttentionMap.from_cells(torch.tensor([[0.75, 0.25]]), grid(1, 2))
        >>> photo = PixelGeometry.identity(1, (4, 4))
        >>> move_target(target, photo, photo.flip()).weights.flatten().tolist()
        [0.25, 0.75]
    """
    spans = target.keys.spans
    if len(spans) != 1 or len(spans[0].shape) != 2:
        shapes = ", ".join(f"{span.name} {span.shape}" for span in spans)
        raise ValueError(f"a target that moves with its image must be on one grid, got {shapes}")
    for view in (before, after):
        if len(view) != len(target):
            raise ValueError(f"the target has {len(target)} rows, its geometry {len(view)}")
    weights = target.weights
    samples, *between, keys = weights.shape
    # one row per layer, head and query, each with the geometry of its sample
    maps = prod(between)
    rows = torch.arange(samples, device=weights.device).repeat_interleave(maps)
    height, width = spans[0].shape
    moved = before[rows].move_cells(weights.reshape(-1, keys), (height, width), after[rows])
    values = moved.reshape(weights.shape)
    found = AttentionMap(values, target.keys, target.queries, kind=target.kind)
    return found.normalize() if found.kind is Kind.PROBABILITY else found


def cached_targets(targets: Targets, ids: Sequence[str], portion: int = 64) -> Targets:
    """Compute targets once and keep them in memory.

    For expensive sources, such as the gradient of a fixed model. Maps have one query. Each is
    stored without padding, and padded to the longest of a batch.

    Args:
        targets: The source.
        ids: The samples to compute.
        portion: How many samples are computed at a time.

    Returns:
        A target source; it raises `ValueError` for other samples.

    Raises:
        ValueError: `ids` is empty, or the maps have several queries or spans.

    Example:
        >>> from overt import words
        >>> calls = []
        >>> def slow(ids):
        ...     calls.append(len(ids))
        ...     return AttentionMap.from_cells(torch.eye(4)[: len(ids)], words(4))
        >>> fast = cached_targets(slow, ["a", "b", "c"])
        >>> fast(["b"]).weights.flatten().tolist(), fast(["c", "a"]).shape[0], calls
        ([0.0, 1.0, 0.0, 0.0], 2, [3])
    """
    if not ids:
        raise ValueError("ids is empty")
    cache: dict[str, tuple[Tensor, Tensor]] = {}
    for start in range(0, len(ids), portion):
        found = targets(ids[start : start + portion])
        span = _only_span(found)
        for one, weights, visible in zip(
            ids[start : start + portion],
            found.weights.detach()[:, :, :, 0].unbind(),
            found.visible[:, 0].unbind(),
            strict=True,
        ):
            length = int(visible.nonzero().amax()) + 1 if visible.any() else 0
            cache[one] = weights[..., :length].clone(), visible[:length].clone()

    def targets_of(ids: Sequence[str]) -> AttentionMap:
        missing = [one for one in ids if one not in cache]
        if missing:
            raise ValueError(
                f"no cached target for {missing[0]!r} ({len(missing)} samples are missing)"
            )
        rows = [cache[one] for one in ids]
        grid = len(span.shape) > 1
        length = len(span) if grid else max(1, *(len(visible) for _, visible in rows))
        pad = torch.nn.functional.pad
        return AttentionMap(
            torch.stack([pad(row, (0, length - row.shape[-1])) for row, _ in rows])[..., None, :],
            Layout((Span(span.name, span.shape if grid else (length,), slice(0, length)),), length),
            mask=torch.stack([pad(visible, (0, length - len(visible))) for _, visible in rows])[
                :, None
            ],
            kind=found.kind,
        )

    return targets_of


def _only_span(target: AttentionMap) -> Span:
    spans = target.keys.spans
    if len(spans) != 1 or len(spans[0]) != len(target.keys) or len(target.queries) != 1:
        raise ValueError(
            "cached targets need one query and one span of keys, got "
            f"{len(target.queries)} queries and the spans {[one.name for one in spans]}"
        )
    return spans[0]
