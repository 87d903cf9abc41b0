"""Capture of compiled models: `python -m tests.parity.compiled_models BERT:sdpa:eager ...`.

Each argument is a family, an attention implementation and a backend of `torch.compile`; the result
of each is printed.
"""

import sys

import torch
import transformers

from overt.capture import UncapturedAttentionError
from tests.capture import families


def check_compiled(name: str, implementation: str, backend: str) -> str:
    """Return whether capture of a compiled model equals that of the model, or is rejected."""
    torch._dynamo.reset()
    one = families.family(name.replace("_", " "))
    theirs, wanted = families.look(one.build(implementation), one.inputs())
    model = one.build(implementation)
    compiled = torch.compile(model, backend=backend)
    try:
        for _ in range(2):  # the second pass reuses the graph
            ours, found = families.look(compiled, one.inputs(), inner=model)
            families.same(ours, theirs)
            families.close(found, wanted)
    except UncapturedAttentionError:
        return "rejected"
    return "equal"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for word in sys.argv[1:]:
        print(check_compiled(*word.split(":")), flush=True)
