"""A video as a strip of frames: one image grid per time step, which share one colour scale."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from overt.attention import Layout, Span
from overt.errors import UserError
from overt.viz.panel import Photo, span_positions

FRAME = "frame"  # name of the span of a time step, before its number


def split_frames(layout: Layout) -> Layout:
    """Return the layout with each video of (time, rows, columns) as a grid per time step.

    The spans are "frame 1", "frame 2" and so on; of a second video "frame 1 of video 2".

    Args:
        layout: The layout of one sample; one without a video is returned unchanged.

    Example:
        >>> video = Layout((Span("video", (2, 1, 3), slice(1, 7)),), 8)
        >>> [(span.name, span.shape, span_positions(span)) for span in split_frames(video).spans]
        [('frame 1', (1, 3), [1, 2, 3]), ('frame 2', (1, 3), [4, 5, 6])]
    """
    if not any(len(span.shape) == 3 for span in layout.spans):
        return layout
    spans: list[Span] = []
    for span in layout.spans:
        if len(span.shape) != 3:
            spans.append(span)
            continue
        index = torch.tensor([span_positions(span)]).reshape(1, span.shape[0], -1)
        after = span.name.removeprefix("video").strip()  # "2" of "video 2"
        of = f" of video {after}" if after else ""
        spans += [
            replace(
                span, name=f"{FRAME} {step + 1}{of}", shape=span.shape[1:], index=index[:, step]
            )
            for step in range(span.shape[0])
        ]
    return Layout(tuple(spans), len(layout))


def is_frame(span: Span) -> bool:
    """Return whether a span is a time step of a video."""
    return len(span.shape) == 2 and span.name.startswith(f"{FRAME} ")


def step_photos(frames: Sequence[Photo], steps: int) -> tuple[Photo, ...]:
    """Return the photo of each time step: of several frames in one step, the first.

    Raises:
        UserError: There are fewer frames than steps.

    Example:
        >>> import numpy as np
        >>> frames = [np.full((1, 1, 3), n, np.uint8) for n in range(5)]
        >>> [int(photo[0, 0, 0]) for photo in step_photos(frames, 3)]  # two frames per step
        [0, 2, 4]
    """
    if len(frames) < steps:
        raise UserError(f"the video has {len(frames)} frames, the model reads {steps} time steps.")
    each = -(-len(frames) // steps)
    return tuple(frames[min(step * each, len(frames) - 1)] for step in range(steps))
