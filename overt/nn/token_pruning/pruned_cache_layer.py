"""A layer of a Hugging Face cache that was filled by the kept tokens of a pruned prompt.

Importing this module imports `transformers`, so it is imported inside of functions.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class PrunedCacheLayer(DynamicLayer):
    """A dynamic cache layer whose first keys are the kept tokens of a longer prompt.

    It reports the length of the whole text, so that new tokens get their true positions and masks
    cover every token; `columns` says which columns of such a mask belong to its keys.

    Args:
        layer: the layer to copy from, filled by the kept tokens.
        places: position of each kept token in the prompt; -1 for padding.
        length: number of tokens of the prompt.
        bias: added to the scores of each kept token: -inf for padding, the logarithm of its size
            for a merged one; None for zeros.
    """

    def __init__(
        self,
        layer: DynamicLayer,
        places: Int[Tensor, "b k"],
        length: int,
        bias: Float[Tensor, "b k"] | None,
    ) -> None:
        super().__init__()
        self.dtype, self.device = layer.dtype, layer.device
        self.keys, self.values = layer.keys, layer.values
        self.is_initialized = True
        self.places, self.prompt_length, self.bias = places, length, bias
        self.text_length = length
        self._expected = 0

    def expect(self, new: int) -> None:
        """Allow an update by `new` tokens, whose masks were adapted to the kept ones."""
        self._expected = new

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens.

        Raises:
            ValueError: The masks were not adapted: the model runs outside of the pruned one.
        """
        if self._expected != key_states.shape[-2]:
            raise ValueError(
                "the cache of a pruned prompt was passed to a model that is not pruned; go on with "
                "the pruned model, or inside its block"
            )
        self._expected = 0
        self.text_length += key_states.shape[-2]
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the length of the whole text, with the tokens that were pruned."""
        return self.text_length

    def columns(self, new: int) -> Int[Tensor, "b k"]:
        """Return the position in the text of every key, with `new` tokens about to be added."""
        later = torch.arange(
            self.prompt_length, self.text_length + new, device=self.places.device
        ).expand(len(self.places), -1)
        return torch.cat([self.places, later], dim=1)

    def key_bias(self, new: int) -> Float[Tensor, "b k"] | None:
        """Return the bias on the scores of every key, with `new` tokens about to be added."""
        if self.bias is None:
            return None
        more = self.text_length + new - self.prompt_length
        return torch.nn.functional.pad(self.bias, (0, more))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to remove tokens: some of them may have been pruned."""
        if tokens_to_remove != 0:
            raise ValueError(
                "cannot crop the cache of a pruned prompt; copy it with copy.deepcopy before "
                "generating, or generate without an assistant"
            )

    def reset(self) -> None:
        """Refuse to be filled again: another prompt keeps other tokens."""
        raise ValueError("cannot reuse the cache of a pruned prompt; pass a new cache")

    # --- beams: the positions follow the keys

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder samples."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._select(beam_idx.to(self.places.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sample."""
        super().batch_repeat_interleave(repeats)
        each = torch.arange(len(self.places), device=self.places.device)
        self._select(each.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select samples."""
        super().batch_select_indices(indices)
        self._select(indices.to(self.places.device))

    def _select(self, rows: Tensor) -> None:
        self.places = self.places[rows]
        self.bias = None if self.bias is None else self.bias[rows]
