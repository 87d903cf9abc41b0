"""A layer of a Hugging Face cache from which positions were evicted.

Importing this module imports `transformers`, so it is imported inside of functions.
"""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class EvictedLayer(DynamicLayer):
    """A dynamic cache layer with fewer keys and values than tokens it has read.

    It reports the number of tokens, so that later tokens get their true positions, and places its
    keys right before them, so that the causal mask shows them all. Each head keeps its own
    positions, and all the same number.

    Args:
        layer: The layer to copy from.
        positions: The kept positions of each sample and head, in ascending order. Padding must be
            in front: the columns of the attention mask that stand for the kept keys are its last.
    """

    def __init__(self, layer: DynamicLayer, positions: Int[Tensor, "b g n"]) -> None:
        assert layer.keys is not None and layer.values is not None
        super().__init__()
        self.dtype, self.device = layer.dtype, layer.device
        self.keys = _gather(layer.keys, positions)
        self.values = _gather(layer.values, positions)
        self.cumulative_length = layer.get_seq_length()
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens."""
        self.cumulative_length += key_states.shape[-2]
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of tokens read, evicted ones included."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys for a mask, and the position that the first stands for."""
        held = self._held()
        return held + query_length, self.cumulative_length - held

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens: some of them may have been evicted."""
        if tokens_to_remove != 0:
            raise ValueError(
                "cannot crop a cache from which positions were evicted; copy it with "
                "copy.deepcopy before generating, or generate without an assistant"
            )

    def _held(self) -> int:
        return 0 if self.keys is None or self.keys.numel() == 0 else int(self.keys.shape[-2])


def _gather(values: Tensor, positions: Int[Tensor, "b g n"]) -> Tensor:
    """Gather positions of keys or values (b g k d); their widths may differ."""
    at = positions.to(values.device)[..., None].expand(-1, -1, -1, values.shape[-1])
    return torch.gather(values, 2, at)
