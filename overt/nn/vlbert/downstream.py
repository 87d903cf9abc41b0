"""Downstream tasks of a trained VL-BERT: VQA and referring expressions.

The last columns of the table of Samaran et al. 2021: a network fine-tuned with or without attention
supervision starts a new task, and the results are compared. VQA is a choice of answers.
Referring-expression comprehension is a choice of regions, each scored from its final state, and
correct if the chosen box overlaps the target by half (`metrics.located`).

A batch of expressions has its candidates in `boxes`, and `labels` is the index of the true box.
`region_mask` may hide that box: then no network sees it or can choose it, and it is used for
evaluation only. So true boxes, proposals and detections use the same kind of batch.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Kind, regions
from overt.data.batch import Batch
from overt.geometry import PixelGeometry, RegionGeometry
from overt.nn.vlbert.model import (
    ClassificationHead,
    MaskTokenHead,
    RegionHead,
    VLBert,
    with_head,
)

MIN_IOU = 0.5  # a box with this overlap counts as the target


# --- networks


def for_vqa(net: VLBert, classes: int, dropout: float = 0.1) -> VLBert:
    """Return a copy of the network with a classification head for answers, on the class token.

    The pooling layer of an existing classification head is kept; the classifier is new. VL-BERT's
    code reads the answer from a mask token after the question instead.

    Args:
        net: a trained network.
        classes: number of answers.
        dropout: dropout of the head.
    """
    head = ClassificationHead(net.sizes.width, classes, dropout)
    if isinstance(net.answer, ClassificationHead):
        head.pool.load_state_dict(net.answer.pool.state_dict())
    return with_head(net, head)


def for_masked_vqa(net: VLBert, classes: int, dropout: float = 0.1) -> VLBert:
    """Return a copy of the network that reads an answer from a mask token after the question.

    As in VL-BERT's code; `caption_tokens.add_mask_token` adds the token to the questions.

    Args:
        net: a trained network.
        classes: number of answers.
        dropout: dropout of the head.
    """
    return with_head(net, MaskTokenHead(net.sizes.width, classes, dropout))


def for_referring_expressions(net: VLBert) -> VLBert:
    """Return a copy of the network with a head that scores each region from its final state.

    One linear layer. VL-BERT's code has another layer before it, with norm and dropout.

    Args:
        net: a trained network.
    """
    return with_head(net, RegionHead(net.sizes.width))


# --- regions for questions


def add_boxes(batch: Batch, boxes: Sequence[Float[Tensor, "_ 4"]]) -> Batch:
    """Add boxes to the batch as regions: one list per sample, in pixels of its photo.

    The target is kept: it may be about cells instead of regions.
    """
    if len(boxes) != len(batch):
        raise ValueError(f"got {len(boxes)} lists of boxes for {len(batch)} samples")
    most = max([1, *map(len, boxes)])
    stacked = torch.zeros(len(boxes), most, 4)
    for row, some in enumerate(boxes):
        stacked[row, : len(some)] = some
    there = torch.arange(most) < torch.tensor([len(some) for some in boxes])[:, None]
    at = batch.image_index.device
    return replace(batch, boxes=stacked.to(at), region_mask=there.to(at))


def add_grid_boxes(batch: Batch, shape: tuple[int, int]) -> Batch:
    """Add grid cells to the batch as regions, for photos without detections.

    The grid covers the model's input; cells outside the photo are marked absent. With cached
    features and no photo, the photo is taken to have one pixel per cell: only relative positions
    matter.
    """
    geometry = batch.sample_geometry
    count = shape[0] * shape[1]
    if batch.features is not None and batch.features.shape[1] != count:
        raise ValueError(
            f"batch.features has {batch.features.shape[1]} cells, expected a grid of "
            f"{shape[0]} x {shape[1]}"
        )
    if geometry is None:
        if batch.features is None:
            raise ValueError("the batch has neither images nor features: no grid can be added")
        geometry = PixelGeometry.identity(len(batch), shape).to(batch.features.device)
        batch = replace(batch, geometry=geometry, image_of=None)
    boxes = geometry.cells(shape).float()
    # a cell in the padding of the canvas has an empty box in the photo
    there = (boxes[..., 2:] > boxes[..., :2]).all(dim=-1)
    return replace(batch, boxes=boxes, region_mask=there)


# --- candidates for expressions


def target_boxes(batch: Batch) -> Float[Tensor, "b 4"]:
    """Return the true box of each expression, whether it is a candidate or not."""
    boxes, labels = _require_boxes(batch)
    return boxes.gather(1, labels[:, None, None].expand(-1, 1, 4))[:, 0]


def matching_candidates(batch: Batch, overlap: float = MIN_IOU) -> Bool[Tensor, "b m"]:
    """Return which candidates count as correct: present, with enough overlap with the target.

    VL-BERT's code also trains with these. A sample without one cannot be solved: the share of
    samples with one is an upper bound on accuracy.
    """
    boxes, _ = _require_boxes(batch)
    found = RegionGeometry(boxes).overlap(target_boxes(batch)[:, None])[:, 0] >= overlap
    return found if batch.region_mask is None else found & batch.region_mask


def add_proposals(batch: Batch, detected: Sequence[Float[Tensor, "_ 4"]]) -> Batch:
    """Add detected boxes as candidates, one list per sample; the true boxes are hidden.

    They follow the true boxes, in pixels of the photo. The target of a word becomes uniform over
    the proposals that match its true box; words without a match lose their target.
    """
    boxes, _ = _require_boxes(batch)
    added = add_boxes(batch, detected)
    assert added.boxes is not None and added.region_mask is not None
    m = boxes.shape[1]
    # true boxes keep their indices, so `labels` still points to them
    there = torch.nn.functional.pad(added.region_mask, (m, 0), value=False)
    both = torch.cat([boxes, added.boxes], dim=1)
    target = None if batch.target is None else _target_on_proposals(batch.target, boxes, added)
    return replace(batch, boxes=both, region_mask=there, target=target)


def _target_on_proposals(target: AttentionMap, boxes: Tensor, detected: Batch) -> AttentionMap:
    """Convert a target over true boxes to one over matching proposals."""
    assert detected.boxes is not None and detected.region_mask is not None
    fits = RegionGeometry(boxes).overlap(detected.boxes) >= MIN_IOU  # b, detected, true
    fits = fits & detected.region_mask[..., None]
    wanted = ((target.weights > 0) & target.visible[:, None, None]).to(fits.device)
    # "m" true boxes, "n" proposals: a proposal is a target if it matches any true box of the word
    reached = torch.einsum("blhqm,bnm->blhqn", wanted.float(), fits.float()) > 0
    values = torch.nn.functional.pad(reached, (boxes.shape[1], 0)).to(target.values.dtype)
    both = torch.cat([boxes, detected.boxes], dim=1)
    seen = (values > 0).any(dim=1).any(dim=1).any(dim=-1, keepdim=True)
    keys = regions(both.shape[1], geometry=RegionGeometry(both))
    mask = seen.expand(-1, -1, both.shape[1])
    return AttentionMap(values, keys, target.queries, mask, Kind.AMOUNT).normalize()


def _require_boxes(batch: Batch) -> tuple[Float[Tensor, "b m 4"], Tensor]:
    if batch.boxes is None or batch.labels is None:
        raise ValueError("expressions need a batch with boxes, and labels that index the true box")
    return batch.boxes, batch.labels
