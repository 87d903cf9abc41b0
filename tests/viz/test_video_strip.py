"""Videos are split into one grid per time step, with the positions of their cells."""

import numpy as np
import pytest
import torch

from overt.attention import Layout, Span, grid
from overt.errors import UserError
from overt.geometry import PixelGeometry
from overt.viz.panel import span_positions
from overt.viz.video_strip import is_frame, split_frames, step_photos


def test_each_step_has_its_own_cells_and_the_geometry_of_the_video() -> None:
    index = torch.tensor([[3, 4, 6, 7, 9, 10, 12, 13]])  # marks between rows
    where = PixelGeometry.identity(1, (8, 8))
    whole = Layout((Span("video", (2, 2, 2), index, where), Span("text", (3,), slice(0, 3))), 14)
    found = split_frames(whole)
    assert [span.name for span in found.spans] == ["frame 1", "frame 2", "text"]
    assert [span_positions(span) for span in found.spans[:2]] == [[3, 4, 6, 7], [9, 10, 12, 13]]
    assert all(span.geometry is where and span.shape == (2, 2) for span in found.spans[:2])
    assert [is_frame(span) for span in found.spans] == [True, True, False]
    assert len(found) == 14


def test_images_stay_and_a_second_video_is_named() -> None:
    plain = grid(2, 2)
    assert split_frames(plain) is plain
    videos = Layout(
        (Span("video", (1, 1, 2), slice(0, 2)), Span("video 2", (1, 1, 2), slice(2, 4))), 4
    )
    names = [span.name for span in split_frames(videos).spans]
    assert names == ["frame 1", "frame 1 of video 2"]


def test_a_video_with_fewer_frames_than_steps_raises() -> None:
    with pytest.raises(UserError, match="2 .* 3 "):
        step_photos([np.zeros((1, 1, 3), np.uint8)] * 2, 3)
