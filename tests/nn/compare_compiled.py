"""Compare a wrapped compiled model with an eager one; the tests' shape checks do not compile.

`python -m tests.nn.compare_compiled` exits with 0 if predictions and attention are equal.
"""

import copy

import torch

from overt.nn.wrappers.wrapped_model import wrap
from overt.testing import toy_batch
from tests.nn import tiny

if __name__ == "__main__":
    batch, plain = toy_batch(), tiny.vit().eval()
    compiled = torch.compile(copy.deepcopy(plain), backend="eager")
    one, two = (
        wrap(each, layout=tiny.image_layout, processor=tiny.TinyProcessor())
        for each in (plain, compiled)
    )
    half = {"image": torch.arange(16).remainder(2).expand(4, -1).float()}
    for mask in (None, half):
        ours = one.decide(one.encode(batch), mask)
        theirs = two.decide(two.encode(batch), mask)
        torch.testing.assert_close(ours.prediction, theirs.prediction)
        torch.testing.assert_close(ours.attention[0].weights, theirs.attention[0].weights)
