"""Signals of generated tokens agree with loops over plain numbers, offline and streamed."""

import math

import pytest
import torch

from overt import watch
from overt.attention import AttentionMap, Kind, words
from overt.attribution import find_sinks
from overt.capture import generate
from overt.metrics.generation_signals import (
    SIGNALS,
    find_row_sinks,
    image_entropy,
    image_share_per_head,
    lookback_ratio,
    mean_over_written_words,
    sink_corrected_share,
    stream_signals,
    written_words,
)

B, L, H, Q, K = 2, 2, 3, 4, 9
IMAGE = torch.tensor([[0, 1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0, 0]]).bool()
CONTEXT = torch.arange(K).expand(B, K) < 5
SINKS = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0, 0]]).bool()


def rows(seed=0):
    """Rows of four new tokens after five of the prompt; the last row of sample 1 has ended."""
    torch.manual_seed(seed)
    mask = torch.arange(K)[None] < torch.arange(5, 5 + Q)[:, None]
    mask = mask.expand(B, Q, K).clone()
    mask[1, 3] = False
    mask[1, :, :2] = False  # padding on the left
    scores = torch.randn(B, L, H, Q, K)
    return AttentionMap.from_scores(scores, words(K), words(Q, "new"), mask)


def each_row(attention):
    """Index and numbers of every row, and which keys it sees."""
    for b in range(B):
        for l in range(L):
            for h in range(H):
                for q in range(Q):
                    row = attention.weights[b, l, h, q].tolist()
                    yield (b, l, h, q), row, attention.visible[b, q].tolist()


def slow(attention, number):
    found = torch.full((B, L, H, Q), torch.nan)
    for at, row, seen in each_row(attention):
        if any(seen):
            found[at] = number(at[0], row, seen)
    return found


def close(found, wanted):
    torch.testing.assert_close(found, wanted, equal_nan=True, atol=1e-6, rtol=1e-5)


def slow_share(b, row, seen):
    return sum(w for w, image in zip(row, IMAGE[b].tolist(), strict=True) if image)


def slow_corrected(b, row, seen):
    kept = [0.0 if sink else w for w, sink in zip(row, SINKS[b].tolist(), strict=True)]
    return slow_share(b, kept, seen) / sum(kept)


def slow_entropy(b, row, seen):
    part = [w for w, image in zip(row, IMAGE[b].tolist(), strict=True) if image and w > 0]
    return -sum(w / sum(part) * math.log(w / sum(part)) for w in part)


def slow_lookback(b, row, seen):
    old = [w for at, w in enumerate(row) if seen[at] and at < 5]
    new = [w for at, w in enumerate(row) if seen[at] and at >= 5]
    a, c = sum(old) / len(old), sum(new) / len(new) if new else 0.0
    return a / (a + c)


def test_signals_agree_with_loops():
    attention = rows()
    close(image_share_per_head(attention, IMAGE), slow(attention, slow_share))
    close(sink_corrected_share(attention, IMAGE, SINKS), slow(attention, slow_corrected))
    close(image_entropy(attention, IMAGE), slow(attention, slow_entropy))
    ratio = lookback_ratio(attention, CONTEXT)
    close(ratio, slow(attention, slow_lookback))
    assert (ratio[:, :, :, 0] == 1).all()  # no new token yet
    assert ratio[1, :, :, 3].isnan().all()  # after the end


def test_what_is_not_defined_is_nan():
    one = AttentionMap.from_cells(torch.tensor([[1.0, 0.0, 0.0]]), words(3))
    first, rest = torch.tensor([[True, False, False]]), torch.tensor([[False, True, True]])
    assert image_share_per_head(one, rest).item() == 0
    assert image_entropy(one, rest).isnan().all()
    assert sink_corrected_share(one, rest, first).isnan().all()
    assert lookback_ratio(AttentionMap.from_cells(torch.zeros(1, 3), words(3)), first).isnan().all()


def test_wrong_arguments_are_named():
    attention = rows()
    with pytest.raises(ValueError, match=r"2, 9.*2, 8"):
        image_share_per_head(attention, IMAGE[:, :8])
    signed = AttentionMap(attention.values, words(K), words(Q), kind=Kind.SIGNED)
    with pytest.raises(ValueError, match="signed"):
        lookback_ratio(signed, CONTEXT)
    with pytest.raises(ValueError, match="ratio.*0.5"):
        find_row_sinks(attention, ratio=0.5)
    with pytest.raises(ValueError, match="one shape"):
        stream_signals(IMAGE, CONTEXT[:1])
    with pytest.raises(ValueError, match="3 samples.* 2"):
        stream_signals(*[torch.zeros(3, K).bool()] * 2)(attention)
    with pytest.raises(ValueError, match=r"\(2, 4\)"):
        mean_over_written_words(torch.zeros(B, L, H, Q), torch.zeros(B, 3).long())


def test_sinks_of_rows_are_those_of_a_trace():
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 20, 8)
    x[0, 3] *= 40  # a key that all queries see in the same way
    with torch.no_grad(), watch(layer) as trace:
        layer(x, x, x)
    for ratio, frequency in ((2.0, 0.3), (3.0, 0.2), (5.0, 0.1)):
        wanted = torch.zeros(2, 20).bool()
        for sink in find_sinks(trace, ratio, frequency):
            wanted[sink.sample, sink.position] = True
        assert torch.equal(find_row_sinks(trace.map(0), ratio, frequency), wanted)
    assert wanted.any()


# --- while a model generates


def llama():
    transformers = pytest.importorskip("transformers", reason="the model comes from transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=L,
        num_attention_heads=H + 1, num_key_value_heads=2, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"num_beams": 3, "do_sample": False}])
def test_streamed_signals_are_those_of_the_captured_rows(settings):
    model = llama()
    ids = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
    arguments = {
        "input_ids": ids, "attention_mask": (ids > 0).long(), "max_new_tokens": 4,
        "min_new_tokens": 4, **settings,
    }  # fmt: skip
    every = slice(0, K)
    whole = generate(model, keys=every, **arguments).attention
    streamed = generate(
        model, keys=every, reduce=stream_signals(IMAGE, CONTEXT, SINKS), **arguments
    ).attention
    assert [span.name for span in streamed.keys.spans] == list(SIGNALS)
    offline = [
        image_share_per_head(whole, IMAGE),
        sink_corrected_share(whole, IMAGE, SINKS),
        image_entropy(whole, IMAGE),
        lookback_ratio(whole, CONTEXT),
    ]
    for at, wanted in enumerate(offline):
        close(streamed.weights[..., at], wanted.nan_to_num(0))
    assert (lookback_ratio(whole, CONTEXT)[:, :, :, 1:] < 1).all()


# --- words


class Pieces:
    """A tokenizer of pieces of words."""

    pieces = ("<end>", "a", " red", " ri", "ng", " ", ".", " do", " n", "'t")
    all_special_ids = (0,)

    def decode(self, ids, skip_special_tokens=False, clean_up_tokenization_spaces=True):
        found = "".join(self.pieces[n] for n in ids if n or not skip_special_tokens)
        return found.replace(" n't", "n't") if clean_up_tokenization_spaces else found


def test_tokens_belong_to_the_words_that_they_write():
    found, numbers = written_words(Pieces(), [[1, 2, 3, 4, 6, 0], [3, 4, 5, 1]])
    assert found == [["a", "red", "ring."], ["ring", "a"]]
    assert numbers.tolist() == [[0, 1, 2, 2, 2, -1], [0, 0, -1, 1, -1, -1]]


def test_words_are_not_joined_after_their_tokens_were_counted():
    found, numbers = written_words(Pieces(), [[1, 7, 8, 9, 2]])
    assert found == [["a", "do", "n't", "red"]] and numbers.tolist() == [[0, 1, 2, 2, 3]]


def test_signals_of_a_word_are_the_mean_over_its_tokens():
    torch.manual_seed(0)
    signals = torch.rand(2, 1, 2, 4)
    signals[1, :, :, 1] = torch.nan
    numbers = torch.tensor([[0, 0, 1, -1], [0, 1, -1, 1]])
    found = mean_over_written_words(signals, numbers)
    assert found.shape == (2, 1, 2, 2)
    torch.testing.assert_close(found[0, :, :, 0], signals[0, :, :, :2].mean(dim=-1))
    torch.testing.assert_close(found[0, :, :, 1], signals[0, :, :, 2])
    torch.testing.assert_close(found[1, :, :, 1], signals[1, :, :, 3])
    alone = mean_over_written_words(signals, torch.tensor([[0, 0, 1, 1], [0, 0, 0, -1]]))
    assert alone[1, :, :, 1].isnan().all()
