"""What a trained VL-BERT is asked afterwards: questions about images, and which region is meant.

The last columns of the table of Samaran et al. 2021: a network that was tuned with or without
supervision of its attention starts a new task, and what it reaches there is compared. VQA is a
choice of answers; referring-expression comprehension a choice of regions, each scored by its final
state, right where the chosen box overlaps the one that is meant by half (`measure.located`).

A batch of expressions has its candidates in `boxes`, and `labels` name the true box of what is
meant. That box may be hidden by `region_mask`: then no network sees it or can choose it, and it is
there to be judged by alone. So true boxes, proposals and detected boxes are batches of one kind.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from overt.attention import AttentionMap, Kind, regions
from overt.data.batch import Batch
from overt.geometry import PixelGeometry, RegionGeometry
from overt.models.vlbert.model import Classify, Point, VLBert, answering

ENOUGH = 0.5  # a box with this overlap is taken for the one that is meant


# --- networks


def for_questions(net: VLBert, classes: int, dropout: float = 0.1) -> VLBert:
    """A copy of the network that answers questions: one logit a class, from the class token.

    What was learned of pooling the class token stays where there is any; the decision is new.
    VL-BERT's code reads the answer from a mask token behind the question instead.
    """
    answer = Classify(net.sizes.width, classes, dropout)
    if isinstance(net.answer, Classify):
        answer.pool.load_state_dict(net.answer.pool.state_dict())
    return answering(net, answer)


def for_expressions(net: VLBert) -> VLBert:
    """A copy of the network that finds what is meant: one logit a region, from its final state.

    One linear layer. VL-BERT's code has another before it, with a norm and dropout.
    """
    return answering(net, Point(net.sizes.width))


# --- regions for questions


def boxed(batch: Batch, boxes: Sequence[Float[Tensor, "_ 4"]]) -> Batch:
    """The batch with regions: one list of boxes a sample, in pixels of its photo.

    The target stays as it is: it may be about cells and not about regions.
    """
    if len(boxes) != len(batch):
        raise ValueError(f"{len(boxes)} lists of boxes for {len(batch)} samples")
    most = max([1, *map(len, boxes)])
    stacked = torch.zeros(len(boxes), most, 4)
    for row, some in enumerate(boxes):
        stacked[row, : len(some)] = some
    there = torch.arange(most) < torch.tensor([len(some) for some in boxes])[:, None]
    at = batch.image_index.device
    return replace(batch, boxes=stacked.to(at), region_mask=there.to(at))


def gridded(batch: Batch, shape: tuple[int, int]) -> Batch:
    """The batch with the cells of a grid for regions: for photos on which nothing was detected.

    The grid lies on what the model sees; cells that show nothing of the photo are not there. Where
    features of cells were cached and no photo is read, the cells are placed on a photo of one pixel
    a cell: where they are among each other is all that a network is told.
    """
    geometry = batch.sample_geometry
    count = shape[0] * shape[1]
    if batch.features is not None and batch.features.shape[1] != count:
        raise ValueError(
            f"features of {batch.features.shape[1]} cells do not fill a grid of "
            f"{shape[0]} x {shape[1]}"
        )
    if geometry is None:
        if batch.features is None:
            raise ValueError("a batch without images or features has nothing to lay a grid on")
        geometry = PixelGeometry.identity(len(batch), shape).to(batch.features.device)
        batch = replace(batch, geometry=geometry, image_of=None)
    boxes = geometry.cells(shape).float()
    there = (boxes[..., 2:] > boxes[..., :2]).all(dim=-1)
    return replace(batch, boxes=boxes, region_mask=there)


# --- candidates for expressions


def meant(batch: Batch) -> Float[Tensor, "b 4"]:
    """The true box of what each expression means, whether it is a candidate or not."""
    boxes, labels = _asked(batch)
    return boxes.gather(1, labels[:, None, None].expand(-1, 1, 4))[:, 0]


def fitting(batch: Batch, overlap: float = ENOUGH) -> Bool[Tensor, "b m"]:
    """Which candidates would be right: those that are there and overlap what is meant enough.

    VL-BERT's code teaches with these, too. A sample that has none cannot be answered: the share of
    samples with one is what accuracy can be at most.
    """
    boxes, _ = _asked(batch)
    found = RegionGeometry(boxes).overlap(meant(batch)[:, None])[:, 0] >= overlap
    return found if batch.region_mask is None else found & batch.region_mask


def proposed(batch: Batch, detected: Sequence[Float[Tensor, "_ 4"]]) -> Batch:
    """The batch with detected boxes for candidates, one list a sample; true boxes are hidden.

    They stand behind the true ones, in pixels of the photo, and words should look evenly at all
    that fit the true box of their thing; words of things that were not found lose their target.
    """
    boxes, _ = _asked(batch)
    given = boxed(batch, detected)
    assert given.boxes is not None and given.region_mask is not None
    m = boxes.shape[1]
    there = torch.nn.functional.pad(given.region_mask, (m, 0), value=False)
    both = torch.cat([boxes, given.boxes], dim=1)
    target = None if batch.target is None else _moved(batch.target, boxes, given)
    return replace(batch, boxes=both, region_mask=there, target=target)


def _moved(target: AttentionMap, boxes: Tensor, detected: Batch) -> AttentionMap:
    """A target over true boxes as one over the detected boxes that fit them."""
    assert detected.boxes is not None and detected.region_mask is not None
    fits = RegionGeometry(boxes).overlap(detected.boxes) >= ENOUGH  # b, detected, true
    fits = fits & detected.region_mask[..., None]
    wanted = ((target.weights > 0) & target.visible[:, None, None]).to(fits.device)
    reached = torch.einsum("blhqm,bnm->blhqn", wanted.float(), fits.float()) > 0
    values = torch.nn.functional.pad(reached, (boxes.shape[1], 0)).to(target.values.dtype)
    both = torch.cat([boxes, detected.boxes], dim=1)
    seen = (values > 0).any(dim=1).any(dim=1).any(dim=-1, keepdim=True)
    keys = regions(both.shape[1], geometry=RegionGeometry(both))
    mask = seen.expand(-1, -1, both.shape[1])
    return AttentionMap(values, keys, target.queries, mask, Kind.AMOUNT).normalize()


def _asked(batch: Batch) -> tuple[Float[Tensor, "b m 4"], Tensor]:
    if batch.boxes is None or batch.labels is None:
        raise ValueError("expressions need a batch with boxes and labels that name the true ones")
    return batch.boxes, batch.labels
