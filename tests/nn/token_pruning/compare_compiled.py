"""Compare a pruned compiled model with an eager one; the tests' shape checks do not compile.

`python -m tests.nn.token_pruning.compare_compiled` exits with 0 if both drop the same tokens and
the model is unchanged afterwards.
"""

from functools import partial

import torch

from overt.nn import keep_share, prune_tokens
from tests.nn.token_pruning.encoders import inputs, predict, vit

if __name__ == "__main__":
    model, given = vit(num_hidden_layers=2), inputs("ViT")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        whole = predict(compiled, given)
        with prune_tokens(compiled, (1,), partial(keep_share, share=0.5)) as thinned:
            found = predict(compiled, given)
            assert thinned.lengths == [37, 19], thinned.lengths
            torch.testing.assert_close(found, predict(model, given))
        torch.testing.assert_close(predict(compiled, given), whole)
