"""Where tokens are after several steps, and which scores belong to which input."""

import torch

from overt.attention import grid, words
from overt.nn.token_pruning.token_tracker import TokenTracker, span_positions
from overt.nn.token_pruning.tokens import gather_tokens


def test_places_and_slots_follow_two_steps() -> None:
    layout = words(1, "class") + grid(1, 4)
    now = TokenTracker(layout, torch.arange(5.0)[None, :, None], ("class",))
    assert now.stays.tolist() == [[True, False, False, False, False]]
    for keep in ([1, 0, 1, 1, 1], [1, 1, 0, 1]):
        tokens = now.tokens(torch.zeros(1, now.length, 1), None)
        now.take(gather_tokens(tokens, torch.tensor([keep]).bool()))
    assert now.places.tolist() == [[0, 2, 4]]  # of the input
    assert now.slots.tolist() == [[0, -1, 1, -1, 2]]  # of the remaining tokens
    assert now.changed and not now.ragged and now.bias is None
    scores = now.scores_at_input(torch.tensor([[1.0, 2.0, 3.0]]))
    assert scores is not None
    assert scores.tolist() == [[1.0, -torch.inf, 2.0, -torch.inf, 3.0]]


def test_padding_and_merged_tokens_enter_the_bias() -> None:
    now = TokenTracker(grid(1, 3), torch.zeros(2, 3, 1), ())
    now.hide(torch.tensor([[True, True, True], [True, True, False]]))
    tokens = now.tokens(torch.zeros(2, 3, 1), None)
    now.take(gather_tokens(tokens, tokens.there))
    assert now.ragged and now.bias is not None
    assert now.bias.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, -torch.inf]]
    assert span_positions(grid(1, 3).spans[0], 3, now.places).tolist() == [[0, 1, 2]] * 2
