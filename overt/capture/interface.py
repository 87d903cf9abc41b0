"""Hugging Face's attention interface: `attn_implementation="overt"`.

Models that attend through kernels nobody can look into (flash-attention and the like) are switched
to it while they are watched, and back afterwards. It computes what they asked for with PyTorch's
fused kernel, and what that kernel cannot do (caps, sinks) in plain arithmetic.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from overt.capture.call import Projected, Route
from overt.capture.edits import edited, edits_of
from overt.capture.mode import attend
from overt.capture.places import HERE
from overt.capture.records import Record, remember

NAME = "overt"
_SEEN = ("eager", "sdpa", NAME)  # what the routes see by themselves


@contextmanager
def routed(model: nn.Module) -> Iterator[None]:
    yield
