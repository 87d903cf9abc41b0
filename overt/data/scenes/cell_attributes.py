"""Images of scenes with the attributes of the thing in each grid cell, as labels.

An image encoder that is trained from answers alone has one label per question; here it has one per
cell and attribute, which is what a pretrained encoder brings along.

Axis letters:  i image  k cell  a attribute
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from overt.data.scenes.dataset import Scenes
from overt.data.scenes.world import MOST, VALUES

ABSENT = 0  # label of a cell without a thing, or of a value without a word
LEAST_SHARE = 0.15  # a thing that covers less of a cell is not its label


def attribute_classes() -> tuple[int, ...]:
    """Return the number of labels of each attribute: its values, and `ABSENT`.

    Example:
        >>> attribute_classes()  # shape, color, size and texture
        (7, 9, 4, 3)
    """
    return tuple(1 + len(values) for values in VALUES.values())


class CellAttributes:
    """Images of scenes, and for each cell the attributes of the thing that covers most of it.

    Args:
        scenes: The scenes; its `cells` are the grid.

    Example:
        >>> data = CellAttributes(Scenes("train", seed=0, count=4, size=32, cells=(4, 4)))
        >>> batch = data.batch([0, 2])
        >>> batch["images"].shape, batch["attributes"].shape
        (torch.Size([2, 3, 32, 32]), torch.Size([2, 16, 4]))
    """

    def __init__(self, scenes: Scenes) -> None:
        self.scenes = scenes

    def __len__(self) -> int:
        return len(self.scenes)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return images (i 3 y x) and labels (i k a) of these scenes; 0 is `ABSENT`."""
        rows = [int(index) for index in indices]
        images = self.scenes.batch(rows).images
        assert images is not None
        return {"images": images, "attributes": self._labels(rows)}

    def _labels(self, rows: Sequence[int]) -> Int[Tensor, "i k a"]:
        shares = self.scenes.coverage(rows).numpy()
        most = np.where(shares.max(axis=1) >= LEAST_SHARE, shares.argmax(axis=1) + 1, 0)
        found = np.take_along_axis(self._things[list(rows)], most[..., None], axis=1)
        return torch.from_numpy(found.astype(np.int64))

    @cached_property
    def _things(self) -> NDArray[np.uint8]:
        """Labels of every thing of every scene; thing 0 is none."""
        found = np.zeros((len(self), 1 + MOST, len(VALUES)), np.uint8)
        for row in range(len(self)):
            scene, _ = self.scenes.scene_and_questions(row)
            for at, thing in enumerate(scene.things, start=1):
                for column, (name, values) in enumerate(VALUES.items()):
                    value = getattr(thing, name)
                    found[row, at, column] = 1 + values.index(value) if value in values else ABSENT
        return found
