"""Tiny third-party backbones with random weights, to attach attention to."""

from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn

SIZE = 32


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1], num_labels=4
    )
    return transformers.ResNetForImageClassification(config)


def convnext() -> nn.Module:
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1], image_size=SIZE
    )
    return transformers.ConvNextModel(config)


def pyramid() -> nn.Module:
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1], image_size=SIZE,
        out_features=["stage1", "stage2", "stage3"],
    )  # fmt: skip
    return transformers.ConvNextBackbone(config)


def swin() -> nn.Module:
    config = transformers.SwinConfig(
        image_size=SIZE, patch_size=2, embed_dim=8, depths=[1, 1, 1], num_heads=[1, 2, 2],
        window_size=4,
    )  # fmt: skip
    return transformers.SwinModel(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=SIZE, patch_size=8, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=16, initializer_range=0.2,
    )  # fmt: skip
    return transformers.ViTModel(config, add_pooling_layer=False)


def dino() -> nn.Module:
    config = transformers.Dinov2WithRegistersConfig(
        image_size=SIZE, patch_size=8, hidden_size=16, num_hidden_layers=4, num_attention_heads=2,
        mlp_ratio=1, initializer_range=0.2,
    )  # fmt: skip
    return transformers.Dinov2WithRegistersModel(config)


class Last(nn.Module):
    """Channels-last network as timm's Swin; one stage has as many channels as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.stages = nn.ModuleList([nn.Linear(8, 8), nn.Linear(32, 12), nn.Linear(48, 20)])

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stages[0](self.stem(pixels).permute(0, 2, 3, 1))
        for stage in self.stages[1:]:
            i, y, x_, d = x.shape
            x = x.reshape(i, y // 2, 2, x_ // 2, 2, d).transpose(2, 3)
            x = stage(x.reshape(i, y // 2, x_ // 2, 4 * d))
        return x.mean(dim=(1, 2))


class Plain(nn.Module):
    """A custom module with dropout and a norm with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(8, 12, 3, 2, 1), nn.Dropout(0.5))
        self.head = nn.Linear(12, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.two(self.one(pixels)).mean(dim=(2, 3)))


HOSTS: dict[str, Callable[[], nn.Module]] = {
    made.__name__.lower(): made for made in (resnet, convnext, pyramid, swin, vit, dino, Last)
}


def host(name: str) -> nn.Module:
    """Build a backbone with the same weights at each call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return HOSTS[name]()
