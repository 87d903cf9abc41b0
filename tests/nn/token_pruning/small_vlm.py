"""A tiny vision-language model with random weights, and prompts of different lengths for it."""

from functools import partial
from typing import Any

import torch

from overt.nn import keep_share
from overt.nn.token_pruning.pruned_decoder import PrunedDecoder
from tests.capture.layouts import vision_language as families

SIDE, CELLS, LAYERS = 32, 16, 4
QUARTER = partial(keep_share, share=0.25)
HALF = partial(keep_share, share=0.5)


def small_vlm(layers: int = LAYERS, **changes: Any) -> Any:
    """A LLaVA with 16 image tokens, in double precision."""
    vision = {**families.SIGLIP, "image_size": SIDE, "patch_size": 8}
    text = {**families.LLAMA, "num_hidden_layers": layers, "initializer_range": 0.2, **changes}
    config = families.config_of(
        "LlavaConfig", vision_config=vision, text_config=text, image_token_index=families.IMAGE,
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    return families.model_of("LlavaForConditionalGeneration", config).double()


def prompts(lengths: tuple[int, ...] = (3, 5), side: str = "left", tail: int = 0) -> dict[str, Any]:
    """One image per sample between words, padded on one side."""
    draw = torch.Generator().manual_seed(0)
    rows = [
        [1, 6, *[families.IMAGE] * CELLS, *(10 + 7 * at + n for n in range(count + tail))]
        for at, count in enumerate(lengths)
    ]
    longest = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for at, row in enumerate(rows):
        place = slice(longest - len(row), None) if side == "left" else slice(0, len(row))
        ids[at, place], mask[at, place] = torch.tensor(row), 1
    pixels = torch.randn(len(rows), 3, SIDE, SIDE, generator=draw, dtype=torch.float64)
    return {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}


def kept_positions(pruned: PrunedDecoder) -> dict[int, list[list[int]]]:
    """The positions of each sample after each step, from the maps of kept tokens."""
    return {
        step.after: [row.nonzero()[:, 0].tolist() for row in step.slots >= 0]
        for step in pruned.steps
    }
