"""Small maps with words and regions whose geometry is known."""

import torch

from overt.attention import AttentionMap, regions, words
from overt.geometry import RegionGeometry, TextGeometry

TEXT = "a red ring left of the small dog"
BOXES = [[10.0, 20.0, 60.0, 70.0], [80.0, 10.0, 150.0, 90.0], [0.0, 0.0, 20.0, 15.0]]


def spans(text: str = TEXT) -> torch.Tensor:
    """The characters of each word."""
    found, at = [], 0
    for word in text.split():
        start = text.index(word, at)
        at = start + len(word)
        found.append((start, at))
    return torch.tensor([found])


def text_map(weights: torch.Tensor, text: str = TEXT) -> AttentionMap:
    """From words to words."""
    layout = words(len(text.split()), geometry=TextGeometry((text,), spans(text)))
    return AttentionMap(weights, layout, layout)


def region_map(weights: torch.Tensor, text: str = TEXT) -> AttentionMap:
    """From words to the three boxes."""
    queries = words(len(text.split()), geometry=TextGeometry((text,), spans(text)))
    keys = regions(3, geometry=RegionGeometry(torch.tensor([BOXES])))
    return AttentionMap(weights, keys, queries)


def softmaxed(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).softmax(dim=-1)


class Attend(torch.nn.Module):
    """Two layers of attention over the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, x, x, need_weights=False)[0]
        return x
