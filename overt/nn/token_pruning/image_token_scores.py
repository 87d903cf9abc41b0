"""Scores of image tokens in the decoder of a vision-language model, for `prune_image_tokens`.

A score is a function of `ImageTokens`: the tokens between two layers with the attention that was
captured before them. Attention scores are logarithms of weights, so that `keep_above_uniform` keeps
the tokens whose share of the attention on the image exceeds the uniform one (AdaHAN's rule, eq. 6
of https://arxiv.org/abs/1808.00300). A score that needs attention raises an error if none was
captured or if it is the same for all tokens: it never ranks tokens by a constant.

- Chen, Zhao, Liu, Yuan, Bai, Lin, Chang, "An Image is Worth 1/2 Tokens After Layer 2" (FastV), ECCV
  2024, https://arxiv.org/abs/2403.06764.
- Xing et al., "PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual
  Redundancy Reduction", CVPR 2025, https://arxiv.org/abs/2410.17247.
- Yang et al., "VisionZip: Longer is Better but Not Necessary in Vision Language Models", CVPR 2025,
  https://arxiv.org/abs/2412.04467.

Axis letters:  b batch  k token between two layers  n position in the prompt
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.capture.call import Call
from overt.nn.hard_attention.selection import Rule, apply_rule
from overt.nn.token_pruning.merge import merge_into
from overt.nn.token_pruning.selection import TokenScore
from overt.nn.token_pruning.token_tracker import span_positions
from overt.nn.token_pruning.tokens import PruningStep, TokenReducer, TokenSequence


@dataclass(frozen=True, eq=False)
class ImageTokens(TokenSequence):
    """Tokens between two layers of a decoder; only image tokens are `free`.

    Args:
        last: index, among the current tokens, of the last token of the prompt: of the text before
            the first label in training. None if it is unknown, in training without labels.
        vision: attention of a layer of the image encoder, of all images; None if not captured.
        images: positions of image tokens in the prompt, in the order in which the image encoder
            makes them.
    """

    last: Int[Tensor, " b"] | None = None
    vision: Call | None = None
    images: Bool[Tensor, "b n"] | None = None


def by_last_query(tokens: TokenSequence) -> Float[Tensor, "b k"]:
    """Score tokens by the attention of the last token of the prompt in the previous layer (FastV).

    The logarithm of the mean weight over heads. In training the last token is the one before the
    first label, so that the answer does not choose the tokens that it is predicted from. With
    several steps that keep a share each, this is the rule of PyramidDrop; it scores by the query of
    the next layer, here it is that of the layer before.

    Args:
        tokens: tokens between two layers of a decoder.

    Returns:
        One score per token.

    Raises:
        ValueError: no attention was captured, or the last token of the prompt is unknown or does
            not see an image token.
    """
    found = _image_tokens(tokens, "by_last_query")
    if found.call is None:
        raise ValueError(
            "by_last_query needs the attention of the layer before: start with after=1 or later, "
            "and leave out capture=False"
        )
    if found.last is None:
        raise ValueError(
            "by_last_query needs to know where the prompt ends, and the last token of a sample may "
            "be its answer in training: pass labels= to the model, with -100 for the prompt, and "
            "an attention_mask with one number per token"
        )
    seen = found.call.visible(rows=found.last[:, None])
    if seen is not None and bool((found.free & ~seen[:, 0]).any()):
        raise ValueError(
            f"the last token of a prompt does not see all image tokens in {found.call.name}: a "
            "sliding window, packed samples, or images after the first label; choose a layer with "
            "full attention, or use one sample per row"
        )
    weights = found.call.weights(rows=found.last[:, None]).mean(dim=1)[:, 0]
    return _log_scores(weights, found, "by_last_query")


def by_image_encoder(tokens: TokenSequence) -> Float[Tensor, "b k"]:
    """Score tokens by attention in a layer of the image encoder, before any text (VisionZip).

    The logarithm of the mean weight over heads: of the class token if there is one, else the mean
    over all queries. The layer is `vision_layer` of `prune_image_tokens`.

    Args:
        tokens: tokens between two layers of a decoder.

    Returns:
        One score per token.

    Raises:
        ValueError: no attention was captured, or a token of the decoder is not one of the encoder.
    """
    found = _image_tokens(tokens, "by_image_encoder")
    if found.vision is None or found.images is None:
        raise ValueError(
            "by_image_encoder needs the attention of the image encoder: pass vision_layer=-2, the "
            "last layer but one, and leave out capture=False"
        )
    weights = found.vision.weights().mean(dim=1)  # (images, queries, keys)
    count, (pictures, queries, _) = int(found.images.sum()), weights.shape
    if count == pictures * queries:
        each = weights.mean(dim=1)
    elif count == pictures * (queries - 1):  # the first token of the encoder is its class token
        each = weights[:, 0, 1:]
    else:
        raise ValueError(
            f"the image encoder has {pictures} x {queries} tokens and the decoder {count} image "
            "tokens, so they are not the same ones (pooled, shuffled or resampled); use "
            "by_last_query"
        )
    at_place = torch.zeros(found.images.shape, dtype=each.dtype, device=each.device)
    at_place[found.images] = each.flatten()
    at_place = at_place.gather(1, found.places.clamp_min(0))
    return _log_scores(at_place, found, "by_image_encoder")


def by_centre(tokens: TokenSequence) -> Float[Tensor, "b k"]:
    """Score cells by their distance to the centre of the image: a control that sees nothing.

    Photographers put what matters in the centre, so a rule has to beat it.

    Args:
        tokens: tokens between two layers; the layout needs exactly one grid.

    Returns:
        One score per token, the largest in the centre.

    Raises:
        ValueError: the layout has no grid, or several.

    Example:
        >>> from overt.attention import grid
        >>> there, places = torch.ones(1, 9, dtype=torch.bool), torch.arange(9)[None]
        >>> cells = TokenSequence(
        ...     torch.rand(1, 9, 8), there, there, torch.ones(1, 9), places, grid(3, 3)
        ... )
        >>> by_centre(cells).argmax()
        tensor(4)
    """
    grids = [span for span in tokens.layout.spans if len(span.shape) == 2]
    if len(grids) != 1:
        names = [span.name for span in tokens.layout.spans]
        raise ValueError(f"by_centre needs a layout with exactly one grid, got spans {names}")
    rows, columns = grids[0].shape
    device, n = tokens.places.device, len(tokens.layout)
    down = (torch.arange(rows, device=device) + 0.5) / rows - 0.5
    across = (torch.arange(columns, device=device) + 0.5) / columns - 0.5
    near = -(down[:, None].square() + across[None].square()).flatten()
    index = span_positions(grids[0], n, tokens.places)
    # last column: tokens without a position, which are never kept
    at_place = torch.full((len(index), n + 1), -torch.inf, device=device)
    at_place.scatter_(1, index, near.expand(len(index), -1))
    at_place[:, n] = -torch.inf
    return at_place.gather(1, torch.where(tokens.places >= 0, tokens.places, n))


def make_zipper(keep: Rule, score: TokenScore, context: int) -> TokenReducer:
    """Return a step that keeps the tokens selected by `keep` and merges the others into `context`.

    As in VisionZip, evenly spaced tokens of the others are targets, and each remaining one is
    merged into the most similar target. Departures: similarity is that of hidden states instead of
    keys of the image encoder, and a merged token is the mean of its members, which counts by their
    number in later attention.
    """
    if context < 1:
        raise ValueError(f"context must be 1 or more, got {context}; use prune_image_tokens")

    def plan(tokens: TokenSequence) -> PruningStep:
        free = score(tokens).detach().masked_fill(~tokens.free, -torch.inf)
        chosen = apply_rule(keep, free, ragged=True) & tokens.free
        rest = tokens.free & ~chosen
        # Of r others, numbered from 0, those where (number x context) // r grows are targets.
        number, total = rest.cumsum(dim=1) - 1, rest.sum(dim=1, keepdim=True).clamp_min(1)
        grown = (number * context) // total != ((number - 1) * context).div(
            total, rounding_mode="floor"
        )
        target = rest & grown
        alike = F.normalize(tokens.states.detach().float(), dim=-1)
        similar = (alike @ alike.transpose(1, 2)).masked_fill(~target[:, None], -torch.inf)
        own = torch.arange(rest.shape[1], device=rest.device).expand_as(number)
        into = torch.where(rest & ~target, similar.argmax(dim=-1), own)
        return merge_into(tokens, into)

    return plan


def _image_tokens(tokens: TokenSequence, who: str) -> ImageTokens:
    if not isinstance(tokens, ImageTokens):
        raise ValueError(f"{who} scores image tokens in a decoder: use it in prune_image_tokens")
    return tokens


def _log_scores(weights: Float[Tensor, "b k"], tokens: ImageTokens, who: str) -> Tensor:
    """Return log-weights of the free tokens; raise if every sample has only equal ones."""
    found = weights.detach().float()
    if not bool(found.isfinite().all()):
        raise ValueError(f"{who} got attention weights that are not finite")
    high = found.masked_fill(~tokens.free, -torch.inf).amax(dim=1)
    low = found.masked_fill(~tokens.free, torch.inf).amin(dim=1)
    several = tokens.free.sum(dim=1) > 1
    if bool((several & (high <= low)).any()):
        raise ValueError(
            f"{who} got the same attention for every image token of a sample, which ranks nothing: "
            "check the model; for a control, use by_random"
        )
    return weights.clamp_min(torch.finfo(weights.dtype).tiny).log()
