"""Pretraining of VL-BERT: masked words, masked regions, and whether a text is of the image.

Su et al., "VL-BERT", ICLR 2020, https://arxiv.org/abs/1908.08530, section 3.3, predict masked words
and the class that a detector gives to a masked region. Without a detector a masked region is
regressed, as in LXMERT (Tan and Bansal, EMNLP 2019, https://arxiv.org/abs/1908.07490): onto its
precomputed features, or onto its pixels where the features are trained. Whether a text is of the
image is a task of ViLBERT (Lu et al. 2019, https://arxiv.org/abs/1908.02265), not of VL-BERT.
"""

from dataclasses import replace

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.losses import Loss, classification
from overt.nn.vlbert.model import ClassificationHead, VLBert, VLBertOutput
from overt.nn.vlbert.regions import normalize_boxes

PATCH = 4  # rows and columns of the pixels that a masked region is regressed onto
PIXEL_MEAN, PIXEL_SCALE = 127.5, 64.0
KEPT, RANDOM = 0.1, 0.1  # shares of chosen words that are not replaced, or by a random word (BERT)


# --- hidden words and regions


def mask_words(
    tokens: Int[Tensor, "b n"],
    words: Bool[Tensor, "b n"],
    mask: int,
    vocabulary: int,
    share: float,
    specials: int = 0,
) -> tuple[Int[Tensor, "b n"], Bool[Tensor, "b n"]]:
    """Choose words to predict: 80 % become the mask token, 10 % a random token, 10 % stay (BERT).

    Args:
        tokens: The tokens.
        words: Which of them are words, not special tokens or padding.
        mask: The id of the mask token.
        vocabulary: The number of tokens.
        share: The probability that a word is chosen.
        specials: Random tokens have at least this id.

    Returns:
        The tokens with some of them replaced, and which words were chosen.

    Example:
        >>> tokens, words = torch.tensor([[3, 7, 8, 4]]), torch.tensor([[False, True, True, False]])
        >>> hidden, chosen = mask_words(tokens, words, mask=2, vocabulary=9, share=1.0)
        >>> hidden[0, [0, 3]].tolist(), chosen.tolist()
        ([3, 4], [[False, True, True, False]])
    """
    draw = torch.rand(2, *tokens.shape, device=tokens.device)
    chosen = words & (draw[0] < share)
    other = torch.randint(specials, vocabulary, tokens.shape, device=tokens.device)
    replaced = torch.where(
        draw[1] < 1 - KEPT - RANDOM, mask, torch.where(draw[1] < 1 - KEPT, other, tokens)
    )
    return torch.where(chosen, replaced, tokens), chosen


def mask_regions(batch: Batch, share: float) -> tuple[Batch, Bool[Tensor, "b m"]]:
    """Hide some regions: their pixels become black, or their precomputed features zero.

    Pixels are hidden in the image, as in VL-BERT, so that overlapping regions do not show them.

    Args:
        batch: A batch with images, or with features of regions.
        share: The probability that a region is hidden.

    Returns:
        The batch with hidden regions, and which ones are hidden.

    Raises:
        ValueError: The batch has no regions, or neither images nor features.

    Example:
        >>> from overt.testing import toy_batch
        >>> boxes = torch.tensor([[0.0, 0.0, 16.0, 16.0], [16.0, 16.0, 32.0, 32.0]]).expand(3, 2, 4)
        >>> hidden, chosen = mask_regions(replace(toy_batch(3), boxes=boxes), share=1.0)
        >>> int(hidden.images[:, :, :16, :16].abs().sum()), chosen.shape
        (0, torch.Size([3, 2]))
    """
    if batch.boxes is None:
        raise ValueError("batch.boxes is None: masked regions need a batch with boxes")
    chosen = torch.rand(batch.boxes.shape[:2], device=batch.boxes.device) < share
    if batch.region_mask is not None:
        chosen = chosen & batch.region_mask
    if batch.features is not None:
        return replace(batch, features=batch.features.masked_fill(chosen[..., None], 0)), chosen
    if batch.images is None or batch.sample_geometry is None:
        raise ValueError("the batch has neither images nor features: no region can be masked")
    # Samples may share an image and hide other regions of it.
    images = batch.images[batch.image_index]
    y, x = images.shape[-2:]
    low, high = normalize_boxes(batch.boxes, batch.sample_geometry).split(2, dim=-1)
    inside = [
        ((centers >= low[..., axis, None]) & (centers < high[..., axis, None])).float()
        for axis, count in ((1, y), (0, x))  # boxes are (x, y)
        for centers in [(torch.arange(count, device=images.device) + 0.5) / count]
    ]
    hidden = einsum(inside[0] * chosen[..., None], inside[1], "b m y, b m x -> b y x") > 0
    order = torch.arange(len(images), device=images.device)
    shown = images.masked_fill(hidden[:, None], 0)
    return replace(batch, images=shown, image_of=order, geometry=batch.sample_geometry), chosen


def region_content(batch: Batch) -> Float[Tensor, "b m f"]:
    """Return what masked regions are regressed onto, of about size 1.

    These are the precomputed features, each region normalised, or the pixels at `PATCH` x `PATCH`
    points of the box.

    Args:
        batch: A batch with regions, none of them hidden.

    Returns:
        One vector per region.

    Raises:
        ValueError: The batch has no regions, or neither images nor features.

    Example:
        >>> from overt.testing import toy_batch
        >>> boxes = torch.tensor([[0.0, 0.0, 16.0, 16.0], [16.0, 16.0, 32.0, 32.0]]).expand(3, 2, 4)
        >>> region_content(replace(toy_batch(3), boxes=boxes)).shape
        torch.Size([3, 2, 48])
    """
    if batch.boxes is None:
        raise ValueError("batch.boxes is None: masked regions need a batch with boxes")
    if batch.features is not None:
        return nn.functional.layer_norm(batch.features, batch.features.shape[-1:])
    if batch.images is None or batch.sample_geometry is None:
        raise ValueError("the batch has neither images nor features: no region can be masked")
    low, high = normalize_boxes(batch.boxes, batch.sample_geometry).split(2, dim=-1)
    steps = (torch.arange(PATCH, device=low.device) + 0.5) / PATCH
    down, across = torch.meshgrid(steps, steps, indexing="ij")
    parts = torch.stack([across, down], dim=-1).flatten(0, 1)  # the centers, as shares of a box
    places = low[:, :, None] + (high - low)[:, :, None] * parts
    pixels = (batch.images[batch.image_index].float() - PIXEL_MEAN) / PIXEL_SCALE
    # grid_sample counts positions from -1 to 1
    found = nn.functional.grid_sample(
        pixels, 2 * places - 1, padding_mode="border", align_corners=False
    )
    return rearrange(found, "b c m p -> b m (p c)")


def content_size(batch: Batch) -> int:
    """Return the length of the vectors of `region_content`.

    Args:
        batch: A batch with regions.

    Example:
        >>> from overt.testing import toy_batch
        >>> content_size(replace(toy_batch(3), features=torch.rand(3, 2, 5)))
        5
    """
    return 3 * PATCH**2 if batch.features is None else batch.features.shape[-1]


def exchange_texts(batch: Batch, share: float = 0.5) -> tuple[Batch, Bool[Tensor, " b"]]:
    """Give some samples the text of the next sample, unless both are of one image.

    The target of a sample that lost its text is hidden.

    Args:
        batch: A batch with tokens and images or features.
        share: The probability that a sample gets another text.

    Returns:
        The batch, and which samples kept their own text.

    Raises:
        ValueError: The batch has no tokens.

    Example:
        >>> from overt.testing import toy_batch
        >>> batch = toy_batch(3)
        >>> other, own = exchange_texts(batch, share=1.0)  # the last two share an image
        >>> torch.equal(other.tokens, batch.tokens), own.tolist()
        (False, [False, True, False])
    """
    if batch.tokens is None or batch.token_mask is None:
        raise ValueError("batch.tokens is None: texts can be exchanged in a batch with tokens")
    pictures = batch.image_index
    other = torch.rand(len(batch), device=batch.tokens.device) < share
    other = other & (pictures != pictures.roll(-1, 0)).to(other.device)
    tokens = torch.where(other[:, None], batch.tokens.roll(-1, 0), batch.tokens)
    there = torch.where(other[:, None], batch.token_mask.roll(-1, 0), batch.token_mask)
    return replace(batch, tokens=tokens, token_mask=there, text=None, target=None), ~other


# --- predictions


class PretrainingHeads(nn.Module):
    """Predictions of pretraining beside the network: a masked region, and whether a text fits.

    A masked word is predicted by the word embeddings of the network itself, see `word_logits`.

    Args:
        width: Features of a state.
        content: Length of the vectors of `region_content`.

    Example:
        >>> heads = PretrainingHeads(8, content=48)
        >>> heads.region(torch.rand(5, 8)).shape
        torch.Size([5, 48])
    """

    def __init__(self, width: int, content: int) -> None:
        super().__init__()
        self.region = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, content)
        )
        self.fits = nn.Linear(width, 2)

    def match(self, net: VLBert, output: VLBertOutput) -> Float[Tensor, "b 2"]:
        """Return the logits of a text of another image and of this one, from the class token.

        Args:
            net: The network, whose pooling layer of the class token is trained with it.
            output: The output of the network.
        """
        assert output.states is not None
        state = output.states[:, 0]
        if isinstance(net.answer, ClassificationHead):
            state = torch.tanh(net.answer.pool(state))
        return self.fits(state)


def word_logits(net: VLBert, states: Float[Tensor, "s d"]) -> Float[Tensor, "s v"]:
    """Return a logit per token: the product with its embedding, which is shared with the input.

    Without BERT's additional layer, so that the prediction needs no weights but the network's.

    Args:
        net: The network.
        states: Final states of masked words.

    Example:
        >>> from overt.nn import PrecomputedRegionEncoder, VLBert, VLBertSizes
        >>> sizes = VLBertSizes(vocabulary=10, width=8, layers=1, heads=2, inner=16)
        >>> net = VLBert(sizes, PrecomputedRegionEncoder(4), ClassificationHead(8, 3))
        >>> word_logits(net, torch.rand(5, 8)).shape
        torch.Size([5, 10])
    """
    return states @ net.word.weight.mT


def pretraining_losses(
    net: VLBert, heads: PretrainingHeads, batch: Batch, mask: int, share: float, specials: int = 0
) -> dict[str, Loss]:
    """Compute the losses of masked words, masked regions, and of the match of text and image.

    Half of the samples get the text of another; words and regions of these are masked too, and not
    predicted.

    Args:
        net: The network.
        heads: The predictions beside the network.
        batch: A batch of texts of images, one text per sample.
        mask: The id of the mask token.
        share: The probability that a word or a region is masked.
        specials: Random tokens have at least this id.

    Returns:
        The losses "match", "words" and "regions"; without a masked word or region, its loss has a
        count of zero.
    """
    content = region_content(batch)
    mixed, own = exchange_texts(batch)
    assert mixed.tokens is not None and mixed.token_mask is not None
    marks = (mixed.tokens == net.sizes.begin) | (mixed.tokens == net.sizes.end)
    words = mixed.token_mask & ~marks
    # Every sample is masked: otherwise a mask token would reveal that the text is its own.
    tokens, said = mask_words(mixed.tokens, words, mask, net.sizes.vocabulary, share, specials)
    hidden, shown = mask_regions(replace(mixed, tokens=tokens), share)
    said, shown = said & own[:, None], shown & own[:, None]
    output = net(hidden)
    logits = word_logits(net, output.text()[said])
    far = (heads.region(output.regions()[shown]).float() - content[shown]).square()
    return {
        "match": classification(heads.match(net, output), own.long()),
        "words": classification(logits, mixed.tokens[said]),
        "regions": Loss(far.mean(dim=-1).sum(), shown.sum()),
    }
