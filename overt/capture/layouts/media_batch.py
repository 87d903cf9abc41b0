"""Images or videos of a batch, with the processor that prepared them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from overt.capture.layouts.patch_grids import Size
from overt.capture.layouts.ramp_images import Photo, dark_image
from overt.capture.layouts.source_canvases import SourceCanvas, measure_canvases

Process = Callable[[Sequence[Photo]], Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class BatchMedia:
    """Images or videos of a batch.

    Attributes:
        processor: The processor.
        rows: Numbers of the images or videos of each sample.
        sizes: (height, width) of each image, or of each frame of each video.
        frames: Number of frames of each video; empty for images.
    """

    processor: Any
    rows: tuple[tuple[int, ...], ...]
    sizes: tuple[Size, ...]
    frames: tuple[int, ...] = ()

    def input_name(self, inputs: Mapping[str, Any]) -> str:
        """Return the input of a model that the processor makes.

        Args:
            inputs: The inputs of the model.

        Raises:
            ValueError: If the processor makes none of them, or several.
        """
        return self._reading(inputs)[0]

    def canvases(self, inputs: Mapping[str, Any]) -> list[SourceCanvas]:
        """Measure what each element of this input shows.

        Args:
            inputs: The inputs of the model.
        """
        name, process = self._reading(inputs)
        return measure_canvases(
            lambda photos: _array(process(photos)[name]),
            self.sizes,
            tuple(inputs[name].shape),
            self._patch_side(),
        )

    def _reading(self, inputs: Mapping[str, Any]) -> tuple[str, Process]:
        """Return the input that the processor makes, and the way to call it."""
        blank = [dark_image(size) for size in self.sizes]
        floats = [n for n, v in inputs.items() if isinstance(v, Tensor) and v.is_floating_point()]
        reasons: list[str] = []
        for process in self._calls:
            try:
                made = process(blank)
            except Exception as problem:  # of the processor, whatever it is
                reasons.append(str(problem))
                continue
            names = [name for name in floats if name in made]
            shapes = [_array(made[name]).shape for name in names]
            if len(names) == 1 and shapes[0] == tuple(inputs[names[0]].shape):
                return names[0], process
            reasons.append(
                f"it makes {dict(zip(names, shapes, strict=True)) or sorted(made)}, the model gets "
                f"{ {name: tuple(inputs[name].shape) for name in floats} }"
            )
        kind = "videos" if self.frames else "images"
        raise ValueError(
            f"the processor does not make the inputs of the model from these {kind}: {reasons[0]}; "
            "pass the same ones, and the processor with the settings of the call "
            "(functools.partial)"
        )

    @cached_property
    def _calls(self) -> list[Process]:
        """The ways to call the processor: with one list of images, or a list per sample."""
        name = "video_processor" if self.frames else "image_processor"
        inner = getattr(self.processor, name, None)
        call = self.processor if inner is None else inner
        settings = {} if inner is None else _default_settings(self.processor, bool(self.frames))
        if self.frames:
            return [lambda photos: call(videos=self._videos(photos), **settings)]
        return [
            lambda photos: call(images=_pictures(photos), **settings),
            lambda photos: call(images=self._nested(_pictures(photos)), **settings),
        ]

    def _nested(self, pictures: Sequence[Any]) -> list[list[Any]]:
        return [[pictures[number] for number in row] for row in self.rows]

    def _videos(self, photos: Sequence[Photo]) -> list[np.ndarray]:
        ends = np.cumsum(self.frames)
        return [np.stack(list(part)) for part in _split(photos, ends.tolist())]

    def _patch_side(self) -> int | None:
        name = "video_processor" if self.frames else "image_processor"
        side = getattr(getattr(self.processor, name, self.processor), "patch_size", None)
        return side if isinstance(side, int) else None


def _split(photos: Sequence[Photo], ends: Sequence[int]) -> list[Sequence[Photo]]:
    return [photos[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _pictures(photos: Sequence[Photo]) -> list[Any]:
    from PIL import Image

    return [Image.fromarray(photo) for photo in photos]


def _array(value: Any) -> np.ndarray:
    """Return an output of a processor as one array."""
    if isinstance(value, list | tuple):
        return np.stack([_array(each) for each in value])
    return np.asarray(value)


def _default_settings(processor: Any, videos: bool) -> dict[str, Any]:
    """Return the settings that a processor of several media adds for its image processor."""
    kinds = getattr(processor, "valid_processor_kwargs", None)
    defaults = getattr(kinds, "_defaults", {})
    return dict(defaults.get("videos_kwargs" if videos else "images_kwargs", {}))
