"""Scores of image tokens: from captured attention, or an error; never from a constant."""

from functools import partial

import pytest
import torch

from overt.nn import keep_share
from overt.nn.token_pruning.image_token_scores import by_centre, by_image_encoder, make_zipper
from overt.nn.token_pruning.pruned_decoder import prune_image_tokens
from tests.nn.token_pruning.small_vlm import HALF, QUARTER, kept_positions, prompts, small_vlm


def test_a_score_without_attention_raises() -> None:
    model, given = small_vlm(), prompts()
    with pytest.raises(ValueError, match="after=1"):
        prune_image_tokens(model, (0,), HALF)(**given)
    with pytest.raises(ValueError, match="capture=False"):
        prune_image_tokens(model, (1,), HALF, capture=False)(**given)
    with pytest.raises(ValueError, match="vision_layer=-2"):
        prune_image_tokens(model, (1,), HALF, by_image_encoder)(**given)
    with pytest.raises(ValueError, match="pass labels="):
        prune_image_tokens(model.train(), (1,), HALF)(**given)


@torch.no_grad()
def test_attention_that_is_the_same_for_all_tokens_raises() -> None:
    model, given = small_vlm(), prompts((4,))
    model.model.language_model.layers[0].self_attn.q_proj.weight.zero_()
    with pytest.raises(ValueError, match="ranks nothing"):
        prune_image_tokens(model, (1,), HALF)(**given)


@torch.no_grad()
def test_a_score_follows_the_captured_weights() -> None:
    model, given = small_vlm(), prompts((4,))
    pruned = prune_image_tokens(model, (1,), QUARTER)
    pruned(**given)
    model.set_attn_implementation("eager")
    weights = model(**given, output_attentions=True).attentions[0][0].mean(dim=0)[-1, 2:18]
    assert pruned.steps[0].scores is not None
    torch.testing.assert_close(pruned.steps[0].scores[0, 2:18].exp(), weights)
    best = (weights.argsort(descending=True)[:4] + 2).sort().values.tolist()
    assert [at for at in kept_positions(pruned)[1][0] if 2 <= at < 18] == best

    model, given = small_vlm(), prompts()
    pruned = prune_image_tokens(model, (1,), QUARTER, by_centre, capture=False)
    with torch.no_grad():
        pruned(**given)
    found = pruned.kept.block("global", "image")
    assert found.keys.find("image").shape == (4, 4)
    middle = torch.zeros(4, 4)
    middle[1:3, 1:3] = 1
    assert torch.equal(found.values[0, 0, 0, 0].view(4, 4), middle)


@torch.no_grad()
def test_the_image_encoder_scores_by_the_attention_that_a_token_receives() -> None:
    model, given = small_vlm(), prompts()
    pruned = prune_image_tokens(model, (0,), HALF, by_image_encoder, vision_layer=-1)
    pruned(**given)
    model.set_attn_implementation("eager")
    encoder = model.model.vision_tower
    weights = encoder(given["pixel_values"], output_attentions=True).attentions[-1]
    received = weights.mean(dim=(1, 2))
    image = given["input_ids"] == 90
    found = pruned.steps[0].scores
    assert found is not None
    torch.testing.assert_close(found[image].exp().view(2, 16), received)


def test_scores_of_other_token_sequences_raise() -> None:
    with pytest.raises(ValueError, match="context.*0"):
        make_zipper(partial(keep_share, share=0.5), by_centre, context=0)
