"""Small attention maps over words and regions with a known geometry."""

import numpy as np
import torch

from overt.attention import AttentionMap, regions, words
from overt.geometry import RegionGeometry, TextGeometry

TEXT = "a red ring left of the small dog"
BOXES = [[10.0, 20.0, 60.0, 70.0], [80.0, 10.0, 150.0, 90.0], [0.0, 0.0, 20.0, 15.0]]


def spans_of(text: str) -> np.ndarray:
    """The character span of each word."""
    found, at = [], 0
    for word in text.split():
        start = text.index(word, at)
        at = start + len(word)
        found.append((start, at))
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def spans(text: str = TEXT) -> torch.Tensor:
    """The character span of each word of one sample."""
    return torch.from_numpy(spans_of(text))[None]


def text_map(weights: torch.Tensor, text: str = TEXT) -> AttentionMap:
    """A map from words to words."""
    layout = words(len(text.split()), geometry=TextGeometry((text,), spans(text)))
    return AttentionMap(weights, layout, layout)


def region_map(weights: torch.Tensor, text: str = TEXT) -> AttentionMap:
    """A map from words to the three boxes."""
    queries = words(len(text.split()), geometry=TextGeometry((text,), spans(text)))
    keys = regions(3, geometry=RegionGeometry(torch.tensor([BOXES])))
    return AttentionMap(weights, keys, queries)


def random_weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).softmax(dim=-1)


class SelfAttention(torch.nn.Module):
    """Two layers of self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, x, x, need_weights=False)[0]
        return x
