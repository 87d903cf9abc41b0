"""What holds for compiled models, run without the shape checks of the tests, which do not compile.

`python -m tests.models.thinning.compiled` ends well when a compiled model loses the same tokens as
a plain one, and is whole again afterwards.
"""

from functools import partial

import torch

from overt.models import keep_share, thin
from tests.models.thinning.encoders import answer, inputs, vit

if __name__ == "__main__":
    model, given = vit(num_hidden_layers=2), inputs("ViT")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        whole = answer(compiled, given)
        with thin(compiled, (1,), partial(keep_share, share=0.5)) as thinned:
            found = answer(compiled, given)
            assert thinned.lengths == [37, 19], thinned.lengths
            torch.testing.assert_close(found, answer(model, given))
        torch.testing.assert_close(answer(compiled, given), whole)
