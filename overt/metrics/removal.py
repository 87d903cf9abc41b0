"""Ways to remove keys from an input: fills (zero, mean, blur, imputation) in pixels or features.

A deletion metric calls a `Decide`, which takes a mask of keys to keep. How keys are removed is
chosen when the `Decide` is made, so that every metric works with every fill:

    decide = pixel_removal(classify, images, (7, 7), fill=blur_fill)
    fill = partial(linear_imputation, generator=generator)
    decide = feature_removal(model.head, features, (7, 7), fill=fill)
    deletion_area(decide, attention, generator)

No fill is neutral. The model has never seen a picture with a mean or a blur in it, and the shape of
the hole may reveal what was there (Rong et al. 2022): a score under one fill alone is weak
evidence.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import interpolate

from overt.errors import require_package
from overt.metrics.argument_checks import check_grid, check_positive
from overt.metrics.faithfulness import Decide
from overt.metrics.rng import sample_normal

Images = Float[Tensor, "b c y x"]
PixelMask = Bool[Tensor, "b y x"]
# (images, mask of removed pixels, mask of visible pixels) -> images to fill the holes with
Fill = Callable[[Images, PixelMask, PixelMask], Images]

_SMALL = 1024  # pixels per image up to which batched conjugate gradients beat sparse factorization
_PULL = 1e-10  # regularization: equations without any known pixel would be singular


# --- fills


def zero_fill(picture: Images, removed: PixelMask, seen: PixelMask) -> Images:
    """Fill with zeros: grey where pixels are centered, black where they are not."""
    return torch.zeros_like(picture)


def mean_fill(picture: Images, removed: PixelMask, seen: PixelMask) -> Images:
    """Fill with the mean of each sample's own picture, per channel.

    The mean is that of all visible pixels, removed ones included, so that the fill is the same at
    every step of a deletion curve.

    Args:
        picture: The images.
        removed: The mask of removed pixels; not used.
        seen: The mask of visible pixels.

    Returns:
        The mean of each image and channel, at every pixel.

    Example:
        >>> picture = torch.tensor([[[[0.0, 1.0, 2.0, 5.0]]]])
        >>> seen = torch.ones(1, 1, 4, dtype=torch.bool)
        >>> mean_fill(picture, ~seen, seen)
        tensor([[[[2., 2., 2., 2.]]]])
    """
    return _masked_mean(picture, seen).expand_as(picture)


def blur_fill(picture: Images, removed: PixelMask, seen: PixelMask, spread: float = 0.1) -> Images:
    """Fill with a Gaussian blur of the same picture.

    Hidden pixels, such as padding after a text, do not run into visible ones.

    Args:
        picture: The images.
        removed: The mask of removed pixels.
        seen: The mask of visible pixels.
        spread: Standard deviation as a share of the longer side; at least one pixel or cell,
            because less would leave a coarse grid unchanged.

    Returns:
        The blurred images.

    Raises:
        ValueError: `spread` is not positive.

    Example:
        >>> picture = torch.tensor([[[[0.0, 0.0, 1.0, 0.0, 0.0]]]])
        >>> seen = torch.ones(1, 1, 5, dtype=torch.bool)
        >>> blur_fill(picture, ~seen, seen)[0, 0, 0]  # deviation 1 pixel; edges renormalized
        tensor([0.0772, 0.2571, 0.4026, 0.2571, 0.0772])
    """
    height, width = picture.shape[-2:]
    deviation = max(1.0, check_positive("spread", spread) * max(height, width))
    rows, columns = (_gaussian_kernel(side, deviation).to(picture) for side in (height, width))
    there = rearrange(seen, "b y x -> b 1 y x").to(picture.dtype)
    total = rows @ there @ columns.T
    smooth = rows @ (picture * there) @ columns.T
    return smooth / torch.where(total > 0, total, 1)


@torch.no_grad()
def linear_imputation(
    picture: Images,
    removed: PixelMask,
    seen: PixelMask,
    generator: torch.Generator,
    noise: float = 0.01,
    tolerance: float = 1e-5,
) -> Images:
    """Fill with noisy linear imputation (ROAD): each removed pixel is the mean of its neighbors.

    Rong, Leemann, Borisov, Kasneci and Kasneci, "A Consistent and Efficient Evaluation Strategy for
    Attribution Methods", ICML 2022, https://arxiv.org/abs/2202.00449, section 5. Neighbors count
    1/6 at the sides and 1/12 at the corners, all equations are solved together, and a little noise
    hides how smooth the result is. On a CPU, SciPy solves one photo after the other, as the
    published code does. Small pictures, and all on a GPU, are solved together by conjugate
    gradients. Where no pixel is left, the fill is the mean of the picture.

    Args:
        picture: The images.
        removed: The mask of removed pixels.
        seen: The mask of visible pixels.
        generator: The source of the noise.
        noise: Standard deviation of the noise, in units of the picture.
        tolerance: Relative residual at which conjugate gradients stop.

    Returns:
        The images with their holes filled; other pixels are unchanged.

    Example:
        >>> picture = torch.arange(3.0).expand(1, 1, 3, 3)  # a ramp from left to right
        >>> seen = torch.ones(1, 3, 3, dtype=torch.bool)
        >>> removed = torch.zeros(1, 3, 3, dtype=torch.bool)
        >>> removed[0, 1, 1] = True
        >>> filled = linear_imputation(picture, removed, seen, torch.Generator(), noise=0.0)
        >>> round(float(filled[0, 0, 1, 1]), 4)  # the mean of its neighbors
        1.0
    """
    noise = check_positive("noise", noise, zero=True)
    tolerance = check_positive("tolerance", tolerance)
    values = picture.detach().double()
    left = ~removed & seen
    start = _masked_mean(values, torch.where(left.any(dim=(1, 2), keepdim=True), left, seen))
    hole, known, all_of = (
        rearrange(one, "b y x -> b 1 y x").double() for one in (removed & seen, left, seen)
    )
    large = values.device.type == "cpu" and removed[0].numel() > _SMALL
    solve = _solve_sparse if large else _solve_conjugate_gradient
    solved = solve(values * known, hole, _neighbor_sum(all_of), start.expand_as(values), tolerance)
    drawn = sample_normal(values.shape, generator)
    return torch.where(hole > 0, solved + noise * drawn.to(values), values).to(picture.dtype)


def _masked_mean(picture: Images, where: PixelMask) -> Float[Tensor, "b c 1 1"]:
    there = rearrange(where, "b y x -> b 1 y x").to(picture.dtype)
    count = there.sum(dim=(-2, -1), keepdim=True).clamp_min(1)
    return (picture * there).sum(dim=(-2, -1), keepdim=True) / count


def _gaussian_kernel(side: int, deviation: float) -> Float[Tensor, "n n"]:
    place = torch.arange(side)
    return (-((place[:, None] - place[None, :]).square()) / (2 * deviation**2)).exp()


def _neighbor_sum(picture: Images) -> Images:
    """Compute the weighted sum of the eight neighbors, with zeros beyond the edge.

    (1, 2, 1) down times (1, 2, 1) across, less the pixel itself: 1/6 at the sides, 1/12 at corners.
    """
    return (_sum_neighbors(_sum_neighbors(picture, -1), -2) - 4 * picture) / 12


def _sum_neighbors(picture: Images, dim: int) -> Images:
    """Compute twice each pixel plus both of its neighbors along an axis."""
    side = picture.shape[dim]
    total = 2 * picture
    total.narrow(dim, 1, side - 1).add_(picture.narrow(dim, 0, side - 1))
    total.narrow(dim, 0, side - 1).add_(picture.narrow(dim, 1, side - 1))
    return total


def _solve_conjugate_gradient(
    known: Images,
    hole: Float[Tensor, "b 1 y x"],
    share: Float[Tensor, "b 1 y x"],
    start: Images,
    tolerance: float,
) -> Images:
    """Solve `share x - neighbors(x) = neighbors(known)` on the hole, by conjugate gradients."""

    def apply(x: Images) -> Images:
        return hole * (share * x - _neighbor_sum(hole * x))

    def dot(one: Images, two: Images) -> Tensor:
        return (one * two).sum(dim=(-2, -1), keepdim=True)

    x = hole * start
    given = hole * _neighbor_sum(known)
    rest = given - apply(x)
    step, left = rest, dot(rest, rest)
    # relative to both sides, not to the first residual: the start may be exact up to rounding
    goal = tolerance**2 * (dot(given, given) + dot(share * x, share * x))
    for _ in range(int(hole.flatten(1).sum(dim=-1).max()) if hole.numel() else 0):
        if bool((left <= goal).all()):
            break
        along = apply(step)
        steep = dot(step, along)
        length = torch.where(steep > 0, left / torch.where(steep > 0, steep, 1), 0)
        x, rest = x + length * step, rest - length * along
        now = dot(rest, rest)
        step = rest + torch.where(left > 0, now / torch.where(left > 0, left, 1), 0) * step
        left = now
    return x


def _solve_sparse(
    known: Images,
    hole: Float[Tensor, "b 1 y x"],
    share: Float[Tensor, "b 1 y x"],
    start: Images,
    tolerance: float,
) -> Images:
    """Solve the same equations per image by sparse LU; a hole without an edge keeps its start."""
    require_package("scipy")
    from scipy.sparse import diags_array

    require_package("scipy")
    from scipy.sparse.linalg import splu

    given = hole * _neighbor_sum(known) + _PULL * start
    solved = start.clone()
    for at, place in enumerate(hole[:, 0] > 0):
        if not place.any():
            continue
        diagonal = share[at, 0][place].numpy() + _PULL
        matrix = (diags_array(diagonal) - _coupling_matrix(place.numpy())).tocsc()
        factors = splu(matrix, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
        found = factors.solve(given[at][:, place].T.contiguous().numpy())
        solved[at][:, place] = torch.from_numpy(found).T
    return solved


def _coupling_matrix(hole: np.ndarray) -> Any:
    """Return the weights between the pixels of a hole as a sparse matrix."""
    from scipy.sparse import coo_array

    height, width = hole.shape
    number = np.cumsum(hole).reshape(hole.shape) - 1
    rows, columns, weights = [], [], []
    for y, x in ((0, 1), (1, 0), (1, 1), (1, -1)):
        first = np.s_[: height - y, max(0, -x) : width - max(0, x)]
        second = np.s_[y:, max(0, x) : width + min(0, x)]
        both = hole[first] & hole[second]
        one, two = number[first][both], number[second][both]
        rows += [one, two]
        columns += [two, one]
        weights += [np.full(2 * len(one), 1 / 12 if x and y else 1 / 6)]
    pair = (np.concatenate(rows), np.concatenate(columns))
    count = int(hole.sum())
    return coo_array((np.concatenate(weights), pair), shape=(count, count))


# --- what is removed


def pixel_removal(
    classify: Callable[[Images], Any],
    images: Images,
    cells: tuple[int, int],
    fill: Fill = mean_fill,
) -> Decide:
    """Make a `Decide` that removes cells of a grid from the pixels of the images.

    The whole model runs on the changed image. In contrast, a mask on features keeps what other
    cells have already received from a removed one.

    Args:
        classify: The model, or a function: returns the logits of images, or an output of Hugging
            Face that has them.
        images: The images.
        cells: Height and width of the grid.
        fill: What to fill removed pixels with.

    Returns:
        A function of a mask of kept cells (b, k) that returns the logits.

    Example:
        >>> images = torch.tensor([[[[0.0, 0.0, 4.0, 4.0]]]])
        >>> decide = pixel_removal(lambda images: images.flatten(1), images, cells=(1, 2))
        >>> decide(torch.tensor([[1.0, 0.0]]))  # the right half is replaced by the mean
        tensor([[0., 0., 2., 2.]])
    """
    cells = check_grid(cells)
    seen = torch.ones(len(images), *images.shape[-2:], dtype=torch.bool, device=images.device)

    def decide(keep: Float[Tensor, "b k"]) -> Float[Tensor, "b c"]:
        _check_keys(keep.shape[-1], cells)
        grid = rearrange(keep, "b (y x) -> b 1 y x", y=cells[0], x=cells[1])
        kept = interpolate(grid, images.shape[-2:], mode="nearest-exact")
        output = classify(_blend(images, kept, seen, fill))
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            raise TypeError(
                f"the model must return logits (b, classes), got {type(output).__name__}: pass a "
                "function of the images that returns them"
            )
        return logits

    return decide


def feature_removal(
    classify: Callable[[Float[Tensor, "b k d"]], Float[Tensor, "b c"]],
    values: Float[Tensor, "b k d"],
    cells: tuple[int, ...],
    fill: Fill = mean_fill,
    present: Bool[Tensor, "b k"] | None = None,
) -> Decide:
    """Make a `Decide` that removes keys from features, or from the embeddings of words.

    Args:
        classify: Returns the logits of features.
        values: The features of the keys.
        cells: The shape of the grid, or the number of words, which are treated as an image of
            height 1.
        fill: What to fill removed features with.
        present: Which keys exist: padding is neither read nor filled.

    Returns:
        A function of a mask of kept keys (b, k) that returns the logits.

    Example:
        >>> values = torch.tensor([[[1.0], [2.0], [6.0]]])  # three words, one feature each
        >>> decide = feature_removal(lambda values: values[..., 0], values, cells=(3,))
        >>> decide(torch.tensor([[1.0, 0.0, 1.0]]))  # the second word is replaced by the mean
        tensor([[1., 3., 6.]])
    """
    # the sides of a text are 1 and its number of words
    one_side = isinstance(cells, Sequence) and len(cells) == 1
    height, width = check_grid((1, *cells) if one_side else cells)
    _check_keys(values.shape[1], (height, width))
    picture = rearrange(values, "b (y x) d -> b d y x", y=height, x=width)
    there = torch.ones_like(values[..., 0], dtype=torch.bool) if present is None else present
    seen = rearrange(there, "b (y x) -> b y x", y=height, x=width)

    def decide(keep: Float[Tensor, "b k"]) -> Float[Tensor, "b c"]:
        kept = rearrange(torch.where(there, keep, 1), "b (y x) -> b 1 y x", y=height, x=width)
        mixed = _blend(picture, kept, seen, fill)
        return classify(rearrange(mixed, "b d y x -> b (y x) d"))

    return decide


def token_removal(
    classify: Callable[[Int[Tensor, "b k"]], Float[Tensor, "b c"]],
    tokens: Int[Tensor, "b k"],
    blank: int,
) -> Decide:
    """Make a `Decide` that replaces tokens by `blank`, such as the mask token.

    Args:
        classify: Returns the logits of token ids.
        tokens: The token ids.
        blank: The id to replace removed tokens with.

    Returns:
        A function of a mask of kept tokens (b, k) that returns the logits.

    Example:
        >>> tokens = torch.tensor([[5, 6, 7]])
        >>> decide = token_removal(lambda tokens: tokens.float(), tokens, blank=0)
        >>> decide(torch.tensor([[1.0, 0.0, 1.0]]))
        tensor([[5., 0., 7.]])
    """

    def decide(keep: Float[Tensor, "b k"]) -> Float[Tensor, "b c"]:
        return classify(torch.where(keep > 0.5, tokens, blank))

    return decide


def _check_keys(keys: int, cells: tuple[int, int]) -> None:
    """Raise unless a grid has as many cells as there are keys."""
    height, width = cells
    if height * width != keys:
        raise ValueError(
            f"a grid of {height} x {width} cells needs {height * width} keys, got {keys}"
        )


def _blend(picture: Images, kept: Float[Tensor, "b 1 y x"], seen: PixelMask, fill: Fill) -> Images:
    """Blend the picture and its fill by the mask, which may be fractional."""
    kept = kept.to(picture.dtype)
    filled = fill(picture, kept[:, 0] < 0.5, seen)
    return kept * picture + (1 - kept) * filled
