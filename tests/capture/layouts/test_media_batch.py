"""The processor is called as it takes its images, with the settings that a processor adds."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from overt.capture.layouts.image_tokens import batch_images, batch_videos

SIZES = [[(40, 64), (64, 48)], [(32, 32)]]


def squares(pictures, tiles=1):
    made = [np.asarray(picture.resize((32, 32)), dtype=np.float32) for picture in pictures]
    return np.stack(made * tiles).transpose(0, 3, 1, 2)


def flat(images, tiles=1):
    return {"pixel_values": squares(images, tiles), "sizes": np.zeros(3)}


def nested(images):
    most = max(map(len, images))
    made = [squares(row) for row in images]
    return {
        "pixel_values": np.stack([np.pad(m, [(0, most - len(m))] + [(0, 0)] * 3) for m in made])
    }


def inputs(*shape):
    return {"input_ids": torch.ones(2, 4).long(), "pixel_values": torch.zeros(*shape)}


def test_images_are_given_as_one_list_or_as_a_list_per_sample():
    one = batch_images(flat, SIZES)
    assert one.input_name(inputs(3, 3, 32, 32)) == "pixel_values"
    assert [canvas.source for canvas in one.canvases(inputs(3, 3, 32, 32))] == [0, 1, 2]
    other = batch_images(nested, SIZES)
    assert [canvas.source for canvas in other.canvases(inputs(2, 2, 3, 32, 32))] == [0, 1, 2]


def test_settings_of_the_call_are_those_of_the_whole_processor_or_given():
    given = inputs(6, 3, 32, 32)
    defaults = SimpleNamespace(_defaults={"images_kwargs": {"tiles": 2}})
    whole = SimpleNamespace(image_processor=flat, valid_processor_kwargs=defaults)
    for processor in (whole, partial(flat, tiles=2)):
        assert len(batch_images(processor, SIZES).canvases(given)) == 6
    with pytest.raises(ValueError, match=r"\(3, 3.*\(6, 3"):
        batch_images(flat, SIZES).input_name(given)


def test_videos_are_arrays_lists_of_frames_or_sizes():
    frames = np.zeros((4, 40, 64, 3), np.uint8)
    assert batch_videos(flat, [frames, (2, 32, 48)]).frames == (4, 2)
    several = batch_videos(flat, [[frames, frames], frames])
    assert several.rows == ((0, 1), (2,))
    assert several.sizes == ((40, 64),) * 12
    assert batch_videos(flat, [list(frames)]).rows == ((0,),)
    with pytest.raises(ValueError, match=r"20, 64.*40, 64"):
        batch_videos(flat, [[frames[0], frames[0, :20]]])
    with pytest.raises(ValueError, match="processor="):
        batch_videos(None, [frames])
    with pytest.raises(ValueError, match="from these videos"):
        several.input_name(inputs(3, 3, 32, 32))
