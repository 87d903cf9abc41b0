"""Compiled models: `python -m tests.parity.compiled BERT:sdpa:eager ...` says a word on each.

Each argument is a family, an implementation of attention and a backend of `torch.compile`.
"""

import sys

import torch
import transformers

from overt.capture import Unseen
from tests.capture import families


def verdict(name: str, implementation: str, backend: str) -> str:
    """Whether a compiled model is seen as the model itself is, or refused."""
    torch._dynamo.reset()
    one = families.family(name.replace("_", " "))
    theirs, wanted = families.look(one.build(implementation), one.inputs())
    model = one.build(implementation)
    compiled = torch.compile(model, backend=backend)
    try:
        for _ in range(2):  # the second time the graph is there already
            ours, found = families.look(compiled, one.inputs(), inner=model)
            families.same(ours, theirs)
            families.close(found, wanted)
    except Unseen:
        return "refused"
    return "equal"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for word in sys.argv[1:]:
        print(verdict(*word.split(":")), flush=True)
