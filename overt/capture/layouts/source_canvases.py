"""Measure which pixel of which image or frame each element of a processor's output shows.

All images of a batch go through the processor together, as the model gets them: dark, bright, with
ramps, and with a brightness that numbers the images or frames. So padding, tiles, the order of the
images and the frames of a patch are measured, not assumed. Canvases are placed by the same fit as
single images (`probe`). Flat patches are first assembled by the positions that their own pixels
decode to.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from overt.capture.layouts.probe import ImagePlacement, place_canvases, preserve_rng
from overt.capture.layouts.ramp_images import (
    BRIGHT,
    DARK,
    ImageTooSmallError,
    NotAffineError,
    Photo,
    RampImages,
    Size,
    bright_image,
    dark_image,
)

LEVELS = 16  # brightness levels that number images and frames, far apart after any resizing
NARROW = 24  # pixels: fewer do not determine a transform

Prepare = Callable[[Sequence[Photo]], np.ndarray]  # images or frames to a media input


@dataclass(frozen=True, eq=False)
class SourceCanvas:
    """A canvas in a media input, and what it shows.

    Attributes:
        source: Number of the image or frame.
        index: Element of the media input at each pixel of the canvas, in the flat input.
        placement: Where the image is on the canvas.
    """

    source: int
    index: Int[np.ndarray, "_ _ _"]
    placement: ImagePlacement


def measure_canvases(
    prepare: Prepare, sizes: Sequence[Size], shape: Sequence[int], patch: int | None = None
) -> list[SourceCanvas]:
    """Measure the canvases in a media input.

    Args:
        prepare: Turns all images of the batch, or all frames, into the media input.
        sizes: (height, width) of each of them.
        shape: Shape of the media input of the model.
        patch: Side of a flat patch, if the processor names it.

    Returns:
        The canvases that show something, in the order of the input.

    Raises:
        ValueError: If the processor makes another shape, or the transform is random, or does more
            than scale, crop, pad and flip.
    """
    with preserve_rng():
        views = _run_test_images(prepare, sizes, tuple(shape))
    sources = _Sources(views)
    index: np.ndarray = np.arange(views.low.size).reshape(views.low.shape)
    if views.low.ndim >= 4:
        parts: Sequence[np.ndarray] = list(index.reshape(-1, *index.shape[-3:]))
        found = [(sources.single(each), each) for each in parts]
    else:
        rows = index.reshape(-1, views.low.shape[-1])
        found = [(s, each) for s, each in _assemble_patches(views, sources, rows, patch)]
    return list(_place(views, [(s, _channels_first(each)) for s, each in found if s is not None]))


@dataclass(frozen=True, eq=False)
class _TestViews:
    """The media input of each kind of test images."""

    ramps: tuple[RampImages, ...]  # of each image or frame
    low: Float[np.ndarray, "..."]
    high: Float[np.ndarray, "..."]
    down: Float[np.ndarray, "..."]
    across: Float[np.ndarray, "..."]
    digits: tuple[Float[np.ndarray, "..."], ...]  # of the number of the image or frame


def _run_test_images(prepare: Prepare, sizes: Sequence[Size], shape: tuple[int, ...]) -> _TestViews:
    ramps = tuple(RampImages(size, (0, 0, *size)) for size in sizes)

    def run(pictures: Sequence[Photo]) -> Float[np.ndarray, "..."]:
        given = np.asarray(prepare(pictures), dtype=np.float64)
        if given.shape != shape:
            raise ValueError(
                f"the processor makes an input of shape {given.shape} of these images, but the "
                f"model gets {shape}; pass the same images and the processor with its settings"
            )
        return given

    across = run([one.picture(1) for one in ramps])
    if not np.array_equal(across, run([one.picture(1) for one in ramps])):
        raise NotAffineError("two runs on the same images differ, so the processor is random")
    # Number the images by grey levels, one digit in base `LEVELS` per run: what an element shows
    # in all runs is the number of its image.
    count, digits = 1, list[np.ndarray]()
    while count < len(sizes) or not digits:
        numbers = [number // count % LEVELS for number in range(len(sizes))]
        levels = [DARK + (BRIGHT - DARK) * digit / (LEVELS - 1) for digit in numbers]
        digits.append(
            run([np.full((*s, 3), round(v), np.uint8) for s, v in zip(sizes, levels, strict=True)])
        )
        count *= LEVELS
    return _TestViews(
        ramps,
        run([dark_image(size) for size in sizes]),
        run([bright_image(size) for size in sizes]),
        run([one.picture(0) for one in ramps]),
        across,
        tuple(digits),
    )


class _Sources:
    """The image or frame that each element shows."""

    def __init__(self, views: _TestViews) -> None:
        gain = views.high - views.low
        size = np.abs(gain)
        if not size.any():
            raise NotAffineError("the output does not depend on the images")
        # Half of the typical gain: below, a border pixel is mostly padding.
        self.shown = (size > 0.5 * np.median(size[size > size.max() / 4])).ravel()
        self.number = np.zeros(gain.size, dtype=np.int64)
        self.clear = self.shown.copy()
        safe = np.where(self.shown, gain.ravel(), 1.0)
        for place, digit in enumerate(views.digits):
            level = (digit - views.low).ravel() / safe * (LEVELS - 1)
            nearest = np.rint(level)
            self.clear &= np.abs(level - nearest) < 0.35
            self.number += nearest.astype(np.int64) * LEVELS**place
        self.number[~self.shown] = -1

    def single(self, index: Int[np.ndarray, "..."]) -> int | None:
        """Return the one image or frame that these elements show; None for padding."""
        numbers = np.unique(self.number[index[self.shown[index]]])
        if len(numbers) == 0:
            return None
        if len(numbers) > 1 or not self.clear[index[self.shown[index]]].all():
            raise NotAffineError("the processor mixes several images or frames into one canvas")
        return int(numbers[0])


def _channels_first(canvas: Int[np.ndarray, "_ _ _"]) -> Int[np.ndarray, "_ _ _"]:
    if canvas.shape[0] in (1, 3):
        return canvas
    if canvas.shape[-1] in (1, 3):
        return np.moveaxis(canvas, -1, 0)
    raise NotAffineError(f"an input with axes {canvas.shape} is neither images nor patches")


def _place(
    views: _TestViews, canvases: Sequence[tuple[int, Int[np.ndarray, "_ _ _"]]]
) -> Iterator[SourceCanvas]:
    """Fit the place of every image on its canvases, all canvases of an image together."""
    placed: dict[int, list[ImagePlacement]] = {}
    for source in dict.fromkeys(source for source, _ in canvases):
        ramps = views.ramps[source]
        own = [index for s, index in canvases if s == source]
        four = (views.low, views.high, views.down, views.across)
        low, high, down, across = ([each.ravel()[index] for index in own] for each in four)
        try:
            placed[source] = place_canvases(ramps, low, high, down, across)
        except NotAffineError as problem:
            if min(ramps.size) >= NARROW:
                raise
            raise ImageTooSmallError(
                f"an image of {ramps.size[0]} x {ramps.size[1]} pixels is too small to measure "
                "the transform of the processor"
            ) from problem
    for source, index in canvases:
        yield SourceCanvas(source, index, placed[source].pop(0))


# --- flat patches


def _assemble_patches(
    views: _TestViews, sources: _Sources, rows: Int[np.ndarray, "r d"], patch: int | None
) -> Iterator[tuple[int, Int[np.ndarray, "_ _ _"]]]:
    """Assemble canvases from patches that show the same images or frames.

    A patch of a video has several frames, the same ones for every patch of a canvas.
    """
    side, slots = _patch_form(rows.shape[1], patch)
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, index in enumerate(rows):
        numbers = np.unique(sources.number[index])
        shown = tuple(int(n) for n in numbers if n >= 0)
        if shown:
            groups.setdefault(shown, []).append(row)
    reasons: list[NotAffineError] = []
    for order in (_channels_first_slots, _channels_last_slots):
        try:
            made = [
                each
                for members in groups.values()
                for each in _assemble(views, sources, rows[members], side, slots, order)
            ]
            list(_place(views, made))  # pixels in the wrong order are not straight
        except NotAffineError as problem:
            reasons.append(problem)
            continue
        yield from made
        return
    raise reasons[0]


def _patch_form(length: int, patch: int | None) -> tuple[int, int]:
    """Return the side of a patch, and how many frames it has."""
    side = patch or int(np.sqrt(length / 3))
    slots = length // (3 * side * side)
    if side < 1 or slots * 3 * side * side != length:
        raise NotAffineError(f"flat patches of {length} numbers have no known form")
    return side, slots


SlotOrder = Callable[[Int[np.ndarray, "r d"], int, int], Int[np.ndarray, "r t c y x"]]


def _channels_first_slots(
    rows: Int[np.ndarray, "r d"], side: int, slots: int
) -> Int[np.ndarray, "r t c y x"]:
    return rows.reshape(len(rows), 3, slots, side, side).swapaxes(1, 2)


def _channels_last_slots(
    rows: Int[np.ndarray, "r d"], side: int, slots: int
) -> Int[np.ndarray, "r t c y x"]:
    return np.moveaxis(rows.reshape(len(rows), slots, side, side, 3), -1, 2)


def _assemble(
    views: _TestViews,
    sources: _Sources,
    rows: Int[np.ndarray, "r d"],
    side: int,
    slots: int,
    order: SlotOrder,
) -> Iterator[tuple[int, Int[np.ndarray, "_ _ _"]]]:
    """Put patches where their own pixels decode to, one canvas per frame."""
    parts = order(rows, side, slots)
    given: set[int] = set()
    for slot in range(slots):
        source = sources.single(parts[:, slot])
        # A still image is repeated to fill the frames of a patch.
        if source is None or source in given:
            continue
        given.add(source)
        y, x = _centres(views, sources, source, parts[:, slot])
        (row, height), (column, width) = _lattice(y), _lattice(x)
        canvas = np.full((3, height, side, width, side), -1)
        canvas[:, row, :, column] = parts[:, slot]
        if (canvas < 0).any() or len(rows) != height * width:
            raise NotAffineError(f"{len(rows)} patches do not form {height} rows of {width}")
        yield source, canvas.reshape(3, height * side, width * side)


def _centres(
    views: _TestViews, sources: _Sources, source: int, parts: Int[np.ndarray, "r c y x"]
) -> Float[np.ndarray, "2 r"]:
    """Return the mean image point (y, x) of each patch."""
    index = parts.reshape(len(parts), -1)
    shown: Bool[np.ndarray, "r d"] = sources.shown[index]
    low = views.low.ravel()[index]
    gain = np.where(shown, views.high.ravel()[index] - low, 1.0)
    levels = [(v.ravel()[index] - low) / gain * (BRIGHT - DARK) for v in (views.down, views.across)]
    points = views.ramps[source].points(*levels)
    return np.where(shown, points, 0).sum(axis=-1) / shown.sum(axis=-1)


def _lattice(at: Float[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], int]:
    """Return the row of each patch, from the measured coordinate, and the number of rows."""
    order = np.argsort(at, kind="stable")
    steps = np.diff(at[order])
    # Steps inside a row are errors of the measurement, those between rows are whole patches.
    room = 0.4 * steps.max() if len(steps) else 0.0
    rows = np.empty(len(at), dtype=np.int64)
    rows[order] = np.concatenate([[0], (steps > room).cumsum()])
    return rows, int(rows.max()) + 1
