"""Image share: attention of text tokens to the image."""

import pytest
import torch

from overt.attention import AttentionMap, Kind, Span, grid, words
from overt.metrics.image_attention import image_share, image_share_per_token


def rows(values, mask=None) -> AttentionMap:
    return AttentionMap(
        values, grid(1, values.shape[-1]), words(values.shape[3]), mask, Kind.SUBPROBABILITY
    )


def test_image_share_matches_an_example_by_hand():
    values = torch.tensor([[0.1, 0.2], [0.4, 0.4], [0, 0]])[None, None, None].repeat(1, 1, 2, 1, 1)
    values[:, :, 1] /= 2
    mask = torch.tensor([[True, True], [True, True], [False, False]])[None]
    found = image_share_per_token(rows(values, mask))
    torch.testing.assert_close(found, torch.tensor([[0.225, 0.6, torch.nan]]), equal_nan=True)
    torch.testing.assert_close(image_share(rows(values, mask)), torch.tensor([0.4125]))


def test_a_text_without_visible_image_gives_nan():
    values, mask = torch.zeros(1, 1, 1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.bool)
    assert image_share(rows(values, mask)).isnan().all()


def test_normalized_rows_raise():
    whole = AttentionMap.from_cells(torch.ones(1, 2), words(2)).normalize()
    with pytest.raises(ValueError, match="got .* weights"):
        image_share_per_token(whole)


def test_image_share_of_generation_agrees_with_transformers():
    transformers = pytest.importorskip("transformers")
    from overt.capture.generation import generate

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.randint(3, 50, (2, 8))
    options = {"input_ids": prompt, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    generated = generate(model, keys=Span("image", (2, 3), slice(1, 7)), **options)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = model(generated.output.sequences, output_attentions=True).attentions
    wanted = torch.stack(whole, dim=1)[..., 7:11, 1:7].sum(dim=-1).mean(dim=(1, 2))
    torch.testing.assert_close(
        image_share_per_token(generated.attention), wanted, atol=1e-6, rtol=0
    )
    torch.testing.assert_close(image_share(generated.attention), wanted.mean(dim=1))


def test_negative_weights_give_nan():
    given = image_share_per_token(rows(torch.tensor([[[[[-0.1, 0.4], [0.1, 0.4]]]]])))
    assert given.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("wrong", [torch.inf, torch.nan])
def test_non_finite_weights_give_nan(wrong):
    """Without this check an infinite sum would give a share of 1."""
    values = torch.tensor([[0.1, 0.2], [wrong, 0.4]])[None, None, None]
    assert image_share_per_token(rows(values)).isnan().tolist() == [[False, True]]
    torch.testing.assert_close(image_share(rows(values)), torch.tensor([0.3]))
