"""Models and datasets of the benchmark of explanations, for `overt bench FILE.py:NAME`.

Two networks are installed with the package. The third is trained when it is opened, in half a
minute of one CPU thread.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from overt import data
from overt.inspect.load_model import load_model, locate_model
from overt.nn import SmallCNN

WORLD, IMAGES, SIZE = 1, 3_000, 32
RATE, STEPS = 3e-3, 1_500


def scenes(split: str = "test", count: int = 504) -> data.DominantScenes:
    """Return scenes to classify by their largest thing, whose pixels are the evidence."""
    return data.DominantScenes(split, WORLD, count, size=SIZE, cells=(8, 8))


def attention_cnn() -> nn.Module:
    """Return the CNN with learned attention on two levels: `overt:learned-attention`."""
    return load_model(locate_model("overt:learned-attention")).model


def self_supervised_cnn() -> nn.Module:
    """Return the CNN whose attention was trained towards masked inputs: `overt:self-supervised`."""
    return load_model(locate_model("overt:self-supervised")).model


def cnn() -> nn.Module:
    """Train a CNN with average pooling, from seed 0."""
    batch = scenes("train", IMAGES).batch(range(IMAGES))
    assert batch.labels is not None
    torch.manual_seed(0)
    net = SmallCNN(6, width=0.5, dropout=0.0)
    optimizer = torch.optim.AdamW(net.parameters(), RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS, pct_start=0.1)
    net.train()
    for _ in range(STEPS):
        some = batch.select(torch.randint(IMAGES, (32,)))
        optimizer.zero_grad()
        cross_entropy(net(some).prediction, some.labels).backward()
        optimizer.step()
        schedule.step()
    return net.eval()
