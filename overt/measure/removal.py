"""What stands where something was removed? Three answers, in the picture or in its features.

A deletion measure asks a `Decide`, which takes a mask over the keys. What it means to remove a key
is settled when the `Decide` is made, so that every measure can be had with every baseline:

    decide = in_pixels(classify, images, (7, 7), fill=blurred)
    decide = in_features(model.head, features, (7, 7), fill=partial(imputed, generator=generator))
    deletion_area(decide, attention, generator)

No baseline is neutral. A mean or a blur is a picture that the model was never shown, and the shape
of the hole may tell what was there (Rong et al. 2022): a number under one baseline alone is weak.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import interpolate

from overt.measure.drawing import normal_numbers
from overt.measure.faithfulness import Decide

Picture = Float[Tensor, "b c y x"]
Places = Bool[Tensor, "b y x"]
# what to put in the place of what is removed: (picture, removed, seen) -> a picture
Fill = Callable[[Picture, Places, Places], Picture]

_SMALL = 1024  # pixels of a picture up to which steps for all are faster than factors for each
_PULL = 1e-10  # towards the start: equations with no known pixel in them would have no answer


# --- baselines


def to_zero(picture: Picture, removed: Places, seen: Places) -> Picture:
    """Nothing: grey where pixels are centred, black where they are not."""
    return torch.zeros_like(picture)


def to_mean(picture: Picture, removed: Places, seen: Places) -> Picture:
    """The mean of each sample's own picture, channel by channel."""
    return _mean(picture, seen).expand_as(picture)


def blurred(picture: Picture, removed: Places, seen: Places, spread: float = 0.1) -> Picture:
    """The same picture out of focus; `spread` is the deviation as a share of the longer side.

    It is one pixel or cell at least: less leaves a coarse grid as it is.
    What may not be seen, such as padding behind a text, does not run into what may.
    """
    height, width = picture.shape[-2:]
    deviation = max(1.0, spread * max(height, width))
    if spread <= 0:
        raise ValueError(f"a spread of {spread} blurs nothing; take a share of the side above 0")
    rows, columns = (_bell(side, deviation).to(picture) for side in (height, width))
    there = rearrange(seen, "b y x -> b 1 y x").to(picture.dtype)
    total = rows @ there @ columns.T
    smooth = rows @ (picture * there) @ columns.T
    return smooth / torch.where(total > 0, total, 1)


@torch.no_grad()
def imputed(
    picture: Picture,
    removed: Places,
    seen: Places,
    generator: torch.Generator,
    noise: float = 0.01,
    tolerance: float = 1e-5,
) -> Picture:
    """What the rest of the picture suggests: every removed pixel is the mean of its neighbours.

    Noisy linear imputation of ROAD (Rong, Leemann, Borisov, Kasneci and Kasneci, "A Consistent and
    Efficient Evaluation Strategy for Attribution Methods", ICML 2022,
    https://arxiv.org/abs/2202.00449, section 5): neighbours count 1/6 beside and 1/12 at corners,
    all equations are solved together, and a little noise hides how smooth the result is. `noise` is
    in the units of the picture. On a CPU scipy solves one photo after the other, as the published
    code does; small pictures, and all on a GPU, are solved together by conjugate gradients, to
    `tolerance` of their length.
    Where nothing is left, it is the mean of the picture. Everything else stays as it is.
    """
    values = picture.detach().double()
    left = ~removed & seen
    start = _mean(values, torch.where(left.any(dim=(1, 2), keepdim=True), left, seen))
    hole, known, all_of = (
        rearrange(one, "b y x -> b 1 y x").double() for one in (removed & seen, left, seen)
    )
    large = values.device.type == "cpu" and removed[0].numel() > _SMALL
    solve = _solve_directly if large else _solve_in_steps
    solved = solve(values * known, hole, _around(all_of), start.expand_as(values), tolerance)
    drawn = normal_numbers(values.shape, generator)
    return torch.where(hole > 0, solved + noise * drawn.to(values), values).to(picture.dtype)


def _mean(picture: Picture, where: Places) -> Float[Tensor, "b c 1 1"]:
    there = rearrange(where, "b y x -> b 1 y x").to(picture.dtype)
    count = there.sum(dim=(-2, -1), keepdim=True).clamp_min(1)
    return (picture * there).sum(dim=(-2, -1), keepdim=True) / count


def _bell(side: int, deviation: float) -> Float[Tensor, "n n"]:
    place = torch.arange(side)
    return (-((place[:, None] - place[None, :]).square()) / (2 * deviation**2)).exp()


def _around(picture: Picture) -> Picture:
    """The weighted sum of the eight neighbours; there is nothing beyond the edge.

    (1, 2, 1) down times (1, 2, 1) across, less the pixel itself: 1/6 beside and 1/12 at corners.
    """
    return (_neighbours(_neighbours(picture, -1), -2) - 4 * picture) / 12


def _neighbours(picture: Picture, dim: int) -> Picture:
    """Twice each pixel and both of its neighbours along an axis."""
    side = picture.shape[dim]
    total = 2 * picture
    total.narrow(dim, 1, side - 1).add_(picture.narrow(dim, 0, side - 1))
    total.narrow(dim, 0, side - 1).add_(picture.narrow(dim, 1, side - 1))
    return total


def _solve_in_steps(
    known: Picture,
    hole: Float[Tensor, "b 1 y x"],
    share: Float[Tensor, "b 1 y x"],
    start: Picture,
    tolerance: float,
) -> Picture:
    """`share x - around(x) = around(known)` on the hole: symmetric, and so conjugate gradients."""

    def apply(x: Picture) -> Picture:
        return hole * (share * x - _around(hole * x))

    def dot(one: Picture, two: Picture) -> Tensor:
        return (one * two).sum(dim=(-2, -1), keepdim=True)

    x = hole * start
    given = hole * _around(known)
    rest = given - apply(x)
    step, left = rest, dot(rest, rest)
    # of both sides, not of what is wrong at first: the start may be right but for rounding
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


def _solve_directly(
    known: Picture,
    hole: Float[Tensor, "b 1 y x"],
    share: Float[Tensor, "b 1 y x"],
    start: Picture,
    tolerance: float,
) -> Picture:
    """The same equations image by image, to rounding; a hole without an edge keeps its start."""
    from scipy.sparse import diags_array
    from scipy.sparse.linalg import splu

    given = hole * _around(known) + _PULL * start
    solved = start.clone()
    for at, place in enumerate(hole[:, 0] > 0):
        if not place.any():
            continue
        diagonal = share[at, 0][place].numpy() + _PULL
        matrix = (diags_array(diagonal) - _couplings(place.numpy())).tocsc()
        factors = splu(matrix, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
        found = factors.solve(given[at][:, place].T.contiguous().numpy())
        solved[at][:, place] = torch.from_numpy(found).T
    return solved


def _couplings(hole: np.ndarray) -> Any:
    """How much each pixel of a hole counts for each other one, as a sparse matrix."""
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


# --- where it is removed


def in_pixels(
    classify: Callable[[Picture], Float[Tensor, "b c"]],
    images: Picture,
    cells: tuple[int, int],
    fill: Fill = to_mean,
) -> Decide:
    """A `Decide` that takes cells of a grid out of the images themselves.

    Every cell is its rectangle of pixels. The model sees the whole way from pixels to answer, where
    masks of features hide what a cell has heard of others.
    """
    seen = torch.ones(len(images), *images.shape[-2:], dtype=torch.bool, device=images.device)

    def decide(keep: Float[Tensor, "b k"]) -> Float[Tensor, "b c"]:
        grid = rearrange(keep, "b (y x) -> b 1 y x", y=cells[0], x=cells[1])
        kept = interpolate(grid, images.shape[-2:], mode="nearest-exact")
        return classify(_mixed(images, kept, seen, fill))

    return decide


def in_features(
    classify: Callable[[Float[Tensor, "b k d"]], Float[Tensor, "b c"]],
    values: Float[Tensor, "b k d"],
    cells: tuple[int, ...],
    fill: Fill = to_mean,
    present: Bool[Tensor, "b k"] | None = None,
) -> Decide:
    """A `Decide` that takes keys out of features, or of the embeddings of words.

    `cells` is the shape of the grid, or the number of words, which then are a picture one pixel
    high. `present` says which words there are: padding is neither read nor filled.
    """
    height, width = cells if len(cells) == 2 else (1, cells[0])
    picture = rearrange(values, "b (y x) d -> b d y x", y=height, x=width)
    there = torch.ones_like(values[..., 0], dtype=torch.bool) if present is None else present
    seen = rearrange(there, "b (y x) -> b y x", y=height, x=width)

    def decide(keep: Float[Tensor, "b k"]) -> Float[Tensor, "b c"]:
        kept = rearrange(torch.where(there, keep, 1), "b (y x) -> b 1 y x", y=height, x=width)
        mixed = _mixed(picture, kept, seen, fill)
        return classify(rearrange(mixed, "b d y x -> b (y x) d"))

    return decide


def in_tokens(
    classify: Callable[[Int[Tensor, "b k"]], Float[Tensor, "b c"]],
    tokens: Int[Tensor, "b k"],
    blank: int,
) -> Decide:
    """A `Decide` that puts the token `blank` in the place of words, such as that of a mask."""

    def decide(keep: Float[Tensor, "b k"]) -> Float[Tensor, "b c"]:
        return classify(torch.where(keep > 0.5, tokens, blank))

    return decide


def _mixed(picture: Picture, kept: Float[Tensor, "b 1 y x"], seen: Places, fill: Fill) -> Picture:
    """The picture where it is kept and the filling elsewhere; in between, a mixture of both."""
    kept = kept.to(picture.dtype)
    filled = fill(picture, kept[:, 0] < 0.5, seen)
    return kept * picture + (1 - kept) * filled
