"""Packed documents: attention never crosses them, whatever kernel the model would use."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.capture import document_layout, hf_interface, watch
from overt.capture.packed_documents import is_packed, mask_by_lengths, mask_by_positions
from tests.capture.large_models import llama

POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
DOCUMENT = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
CROSSING = DOCUMENT[:, None] != DOCUMENT[None]
ENDS = torch.tensor([0, 4, 7, 9], dtype=torch.int32)
TOKENS = torch.tensor([[5, 9, 2, 7, 3, 8, 6, 4, 1]])


def on(implementation: str) -> nn.Module:
    """A Llama whose configuration names a kernel, which need not be installed."""
    model = llama()
    hf_interface.register_interface()
    model.config._attn_implementation_internal = implementation
    return model


def separately(model: nn.Module) -> Tensor:
    """The maps of each document on its own, in one block-diagonal map."""
    found = torch.zeros(1, 3, 4, 9, 9)
    for document in range(3):
        at = document == DOCUMENT
        with torch.no_grad(), watch(model) as trace:
            model(input_ids=TOKENS[:, at], use_cache=False)
        rows = at.nonzero()[:, 0]
        found[..., rows[:, None], rows[None]] = trace.map().weights
    return found


PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("eager", {"use_cache": False}),
    "sdpa": ("sdpa", {"use_cache": False}),
    "overt": ("overt", {"use_cache": False}),
    "flex": ("flex_attention", {"use_cache": False}),
    "flash": ("flash_attention_2", {"use_cache": False}),
    "flash, cache": ("flash_attention_2", {"use_cache": True}),
    "flash, mask of ones": (
        "flash_attention_2",
        {"attention_mask": torch.ones(1, 9, dtype=torch.long)},
    ),
    "flash, lengths": (
        "flash_attention_2",
        {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 4, "max_length_k": 4},
    ),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.newer("transformers>=5")
def test_each_document_attends_as_on_its_own(name: str) -> None:
    implementation, given = PACKED[name]
    wanted = separately(llama())
    model = on(implementation)
    with torch.no_grad(), watch(model) as trace:
        model(input_ids=TOKENS, position_ids=POSITIONS, **given)
    assert model.config._attn_implementation == implementation
    attention = trace.map()
    torch.testing.assert_close(attention.weights, wanted, rtol=0, atol=1e-5)
    assert not attention.visible[:, CROSSING].any()


def test_with_a_cache_sdpa_crosses_documents_and_the_map_shows_it() -> None:
    """transformers separates documents only if there is no cache; eager attention says the same."""
    model = on("eager")
    with torch.no_grad():
        wanted = model(
            input_ids=TOKENS, position_ids=POSITIONS, use_cache=True, output_attentions=True
        ).attentions
    model = on("sdpa")
    with torch.no_grad(), watch(model) as trace:
        model(input_ids=TOKENS, position_ids=POSITIONS, use_cache=True)
    torch.testing.assert_close(trace.map().weights, torch.stack(wanted, 1), rtol=0, atol=1e-5)
    assert trace.map().weights[..., CROSSING].max() > 0.1


def test_padding_of_flash_attention_separates_nothing() -> None:
    """Flash-attention removes padding and takes the rest for one document."""
    mask = torch.ones(1, 9, dtype=torch.long)
    mask[:, 7:] = 0
    model = on("flash_attention_2")
    with torch.no_grad(), watch(model) as trace:
        model(input_ids=TOKENS, position_ids=POSITIONS, attention_mask=mask)
    assert trace.map().visible[0, 4, 0]
    assert not trace.map().visible[0, :7, 7:].any()


@pytest.mark.newer("transformers>=5")
def test_a_layout_names_the_documents() -> None:
    layout = document_layout(POSITIONS)
    assert [(span.name, span.index) for span in layout.spans] == [
        ("document 0", slice(0, 4)),
        ("document 1", slice(4, 7)),
        ("document 2", slice(7, 9)),
    ]
    model = llama()
    with torch.no_grad(), watch(model, layout=layout) as trace:
        model(input_ids=TOKENS, position_ids=POSITIONS, use_cache=False)
    assert not trace.block("document 1", "document 0").weights.any()
    own = trace.block("document 1", "document 1").weights
    torch.testing.assert_close(own.sum(-1), torch.ones(1, 3, 4, 3))
    shares = trace.span_shares(queries="document 2", mean=True)
    torch.testing.assert_close(shares["document 2"], torch.ones(1, 3, 4))


def test_rows_that_are_packed_differently() -> None:
    layout = document_layout(torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 3, 4]]))
    first, second = layout.spans
    assert first.shape == (5,) and second.shape == (3,)
    assert first.index.tolist() == [[0, 1, -1, -1, -1], [0, 1, 2, 3, 4]]
    assert second.index.tolist() == [[2, 3, 4], [-1, -1, -1]]
    with pytest.raises(ValueError, match=r"got \(9,\)"):
        document_layout(POSITIONS[0])


def test_lengths_count_over_the_rows_of_a_batch() -> None:
    ends = torch.tensor([0, 2, 4, 8])
    made = mask_by_lengths(ends, ends, (2, 4), None, causal=False)
    document = torch.tensor([[0, 0, 1, 1], [2, 2, 2, 2]])
    assert torch.equal(made[:, 0], document[:, :, None] == document[:, None])
    causal = mask_by_lengths(ends, ends, (2, 4), None, causal=True)
    assert torch.equal(causal, made.tril())


def test_layers_share_a_mask_until_an_input_changes() -> None:
    positions = POSITIONS.clone()
    one = mask_by_positions(positions, None, causal=True)
    assert mask_by_positions(positions, None, causal=True) is one
    assert mask_by_positions(positions, None, causal=False) is not one
    one = mask_by_positions(positions, None, causal=True)
    positions.copy_(torch.arange(9)[None])  # a buffer that is filled again
    assert mask_by_positions(positions, None, causal=True).sum() == 45
    assert not is_packed(positions, 1, 9)
    given = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril(1)
    other = mask_by_positions(positions, given, causal=False)
    assert mask_by_positions(positions, given, causal=False) is other
    assert mask_by_positions(positions, given.clone(), causal=False) is not other


def test_a_mask_of_scores_is_kept() -> None:
    low = torch.finfo(torch.float32).min
    given = torch.full((1, 1, 9, 9), low).triu(1)
    made = mask_by_positions(POSITIONS, given, causal=False)
    assert made.dtype == torch.float32
    allowed = ~CROSSING & torch.ones(9, 9, dtype=torch.bool).tril()
    assert torch.equal(made[0, 0] == 0, allowed)


@pytest.mark.parametrize(
    ("positions", "packed"),
    [
        (POSITIONS, True),
        (torch.arange(9)[None], False),
        (torch.arange(3, 12)[None], False),  # after a cache
        (POSITIONS[0], False),
        (None, False),
    ],
    ids=["restarting", "one document", "later", "one axis", "none"],
)
def test_what_counts_as_packed(positions: Tensor | None, packed: bool) -> None:
    assert is_packed(positions, 1, 9) is packed
    assert not is_packed(positions, 2, 9)  # flash-attention packs one row only


def test_lengths_with_a_cache_raise() -> None:
    module = nn.Module()
    module.is_causal = True
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)
    lengths = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS}
    with pytest.raises(NotImplementedError, match="3.*5.*use_cache"):
        hf_interface.overt_attention(module, query, key, key, None, **lengths)


@pytest.mark.gpu
def test_flash_varlen_gives_the_same_output_as_watched() -> None:
    """The kernel that is replaced in a block separates the same documents."""
    pytest.importorskip("flash_attn", reason="no flash-attention")
    model = llama().to("cuda", torch.bfloat16)
    model.set_attn_implementation("flash_attention_2")
    for cache in (False, True):
        given = {"input_ids": TOKENS.cuda(), "position_ids": POSITIONS.cuda(), "use_cache": cache}
        with torch.no_grad():
            wanted = model(**given).logits
        with torch.no_grad(), watch(model) as trace:
            found = model(**given).logits
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)
        assert not trace.map().weights[..., CROSSING.cuda()].any()
