"""What holds for compiled models, run without the shape checks of the tests, which do not compile.

`python -m tests.models.compiled` ends well when an adopted compiled model answers as a plain one.
"""

import copy

import torch

from overt.models.adopting.adopted import adopt
from overt.testing import toy_batch
from tests.models import tiny

if __name__ == "__main__":
    batch, plain = toy_batch(), tiny.vit().eval()
    compiled = torch.compile(copy.deepcopy(plain), backend="eager")
    one, two = (
        adopt(each, layout=tiny.image_layout, processor=tiny.Bytes()) for each in (plain, compiled)
    )
    half = {"image": torch.arange(16).remainder(2).expand(4, -1).float()}
    for mask in (None, half):
        ours = one.decide(one.encode(batch), mask)
        theirs = two.decide(two.encode(batch), mask)
        torch.testing.assert_close(ours.prediction, theirs.prediction)
        torch.testing.assert_close(ours.attention[0].weights, theirs.attention[0].weights)
