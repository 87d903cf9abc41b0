"""Decoding of captions: greedy, beam search, sampling, length rules."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from overt.data.vocabulary import BEGIN, END
from overt.nn.captioning import captioner as captioning
from overt.nn.captioning import decoding
from overt.nn.captioning.decoding import (
    DecodingRules,
    beam_search,
    beam_search_all,
    draw_tokens,
    greedy,
    rank_by_mean,
    sample,
    sample_with_greedy,
)
from overt.testing import Copier, toy_batch
from tests.nn.captioning.test_captioner import captioner, region_batch

# ids 5 to 7 are words; of the others only the end token is allowed
RULES = DecodingRules(max_length=3, forbidden=(0, 1, 2, 3, 8, 9, 10, 11))


def log_probs(model, batch, tokens):
    """Compute log-probabilities of tokens under the rules in one pass, without a cache."""
    begun = torch.cat([torch.full((len(tokens), 1), BEGIN), tokens[:, :-1]], dim=1)
    found = model.decode_captions(model.encode(batch), begun)
    logits = found.logits.clone()
    logits[..., list(RULES.forbidden)] = -torch.inf
    return logits.log_softmax(dim=-1), found.attention


def all_texts():
    """Yield all texts of up to three tokens over three words, including the end token."""
    for length in range(RULES.max_length + 1):
        for words in product([5, 6, 7], repeat=length):
            if length < RULES.max_length:
                yield (*words, END)
            else:
                yield words


@torch.no_grad()
def exhaustive_best(model, batch):
    """Find the likeliest text of each sample by exhaustive search."""
    found = [(-torch.inf, ())] * len(batch)
    for text in all_texts():
        tokens = torch.tensor([text]).expand(len(batch), -1)
        log_p = log_probs(model, batch, tokens)[0].gather(2, tokens[..., None]).sum(dim=(1, 2))
        found = [max(old, (float(p), text)) for old, p in zip(found, log_p, strict=True)]
    return found


@torch.no_grad()
def test_a_wide_beam_search_equals_exhaustive_search():
    model, batch = captioner(seed=3), region_batch()
    found = beam_search(model, batch, width=27, rules=RULES)
    for at, (total, text) in enumerate(exhaustive_best(model, batch)):
        assert [*found.tokens[at][found.mask[at]].tolist()] == [*text]
        assert float(found.total[at]) == pytest.approx(total, abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    "write",
    [
        lambda model, batch: greedy(model, batch, RULES),
        lambda model, batch: beam_search(model, batch, 3, RULES),
        lambda model, batch: sample(model, batch, rules=RULES),
    ],
    ids=["greedy", "beam", "sample"],
)
def test_decoded_log_probs_and_attention_equal_those_of_one_pass(write):
    torch.manual_seed(0)
    model, batch = captioner(seed=3), region_batch()
    found = write(model, batch)
    log_p, attention = log_probs(model, batch, found.tokens)
    chosen = log_p.gather(2, found.tokens[..., None])[..., 0]
    expected = torch.where(found.mask, chosen, 0)
    torch.testing.assert_close(found.log_probabilities, expected, atol=1e-5, rtol=0)
    (looked,) = found.attention
    rows = found.mask[:, None, None, :, None]
    torch.testing.assert_close(looked.weights, attention.weights * rows, atol=1e-5, rtol=0)
    assert torch.equal(looked.rows, found.mask)
    looked.check()


@torch.no_grad()
def test_one_beam_equals_greedy_and_more_beams_are_not_worse():
    model, batch = captioner(seed=4), region_batch()
    plain, one, five = (
        greedy(model, batch),
        beam_search(model, batch, 1),
        beam_search(model, batch, 5),
    )
    assert plain.ids() == one.ids()
    assert bool((five.total >= plain.total - 1e-5).all())


@torch.no_grad()
def test_beams_are_distinct_and_sorted_by_score():
    model, batch = captioner(seed=5), region_batch()
    found = beam_search_all(model, batch, 4, RULES)
    assert len(found) == 12 and len({tuple(ids) for ids in found.ids()[:4]}) == 4
    totals = found.total.view(3, 4)
    assert bool((totals[:, :-1] >= totals[:, 1:]).all())
    assert beam_search(model, batch, 4, RULES).ids() == found.ids()[::4]
    ranked = beam_search_all(model, batch, 4, RULES, rank=rank_by_mean)
    means = (ranked.total / ranked.mask.sum(-1)).view(3, 4)
    assert bool((means[:, :-1] >= means[:, 1:] - 1e-6).all())


def test_every_decoding_method_copies_with_the_copier():
    batch = toy_batch(3)
    tokens = torch.tensor([[5, 6, 7, END], [8, 9, END, 0], [6, END, 0, 0]])
    batch = replace(batch, tokens=tokens, token_mask=tokens > 0, text=None)
    model = Copier(gain=40.0)
    for found in (greedy(model, batch), sample(model, batch), beam_search(model, batch, 3)):
        assert found.ids() == [[5, 6, 7], [8, 9], [6]]
        assert found.mask.sum(-1).tolist() == [4, 3, 2]
        looked = found.attention[0].weights[:, 0, 0]
        torch.testing.assert_close(looked[0, :4], torch.eye(4))
        assert not looked[2, 2:].any()


class Coin(nn.Module):
    """Decoder that emits token 5 with probability 1/4 and else token 6, without end."""

    def encode(self, batch):
        return len(batch)

    def start(self, features):
        return CoinState(features)

    def step(self, state, tokens):
        from overt.nn.output import Output

        logits = torch.full((len(tokens), 7), -torch.inf)
        logits[:, 5], logits[:, 6] = 0.0, torch.tensor(3.0).log()
        return Output(logits), state


class CoinState:
    def __init__(self, count):
        self.count = count

    def reorder(self, rows):
        return CoinState(len(rows))


def test_sampling_follows_the_model_and_the_temperature():
    batch = region_batch()
    generator = torch.Generator().manual_seed(1)
    rules = DecodingRules(max_length=200)
    found = sample(Coin(), batch, draws=20, rules=rules, generator=generator)
    assert len(found) == 60 and found.attention == ()
    assert float((found.tokens == 5).float().mean()) == pytest.approx(0.25, abs=0.02)
    log_p = found.log_probabilities
    expected = torch.where(found.tokens == 5, 0.25, 0.75).log()
    torch.testing.assert_close(log_p, expected)
    warm = sample(Coin(), batch, draws=20, temperature=1e3, rules=rules, generator=generator)
    assert float((warm.tokens == 5).float().mean()) == pytest.approx(0.5, abs=0.02)


def test_draw_tokens_equals_torch_multinomial():
    shares = torch.rand(50, 30).softmax(dim=-1)
    shares[:, ::3] = 0
    ours = draw_tokens(shares, torch.Generator().manual_seed(4))
    theirs = torch.multinomial(shares, 1, generator=torch.Generator().manual_seed(4))[:, 0]
    assert torch.equal(ours, theirs)


def test_tokens_after_the_last_end_are_dropped(monkeypatch):
    """On a GPU the end is checked every few steps; tokens written after it are dropped."""
    tokens = torch.tensor([[5, 6, END], [8, END, 0], [6, END, 0]])
    batch = replace(toy_batch(3), tokens=tokens, token_mask=tokens > 0, text=None)
    asked = []

    def over(there, written):
        asked.append(written)
        return written % 5 == 0 and not bool(there.any())

    monkeypatch.setattr(decoding, "_all_ended", over)
    found = greedy(Copier(gain=40.0), batch)
    assert asked == [1, 2, 3, 4, 5] and torch.equal(found.tokens, tokens)


class EarlyEndDecoder(nn.Module):
    """Wrap a decoder and raise the logit of the end token."""

    def __init__(self, model):
        super().__init__()
        self.model, self.encode, self.start = model, model.encode, model.start

    def step(self, state, tokens):
        output, state = self.model.step(state, tokens)
        sooner = output.prediction.clone()
        sooner[:, END] += 6
        return replace(output, prediction=sooner), state


@torch.no_grad()
def test_beam_search_without_synchronization_gives_the_same_texts(monkeypatch):
    """Neither the end of all beams nor equal images are checked; the texts are padded."""
    model, batch, rules = (
        EarlyEndDecoder(captioner(seed=5)),
        region_batch(),
        replace(RULES, max_length=9),
    )
    plain = beam_search_all(model, batch, 3, rules)
    for place, name in ((decoding, "_all_beams_ended"), (captioning, "_same_images")):
        monkeypatch.setattr(place, name, lambda *_: False)
    whole = beam_search_all(model, batch, 3, rules)
    width = plain.tokens.shape[1]
    assert width < whole.tokens.shape[1] == rules.max_length
    assert not whole.mask[:, width:].any()
    for name in ("tokens", "mask", "log_probabilities"):
        torch.testing.assert_close(getattr(whole, name)[:, :width], getattr(plain, name))
    torch.testing.assert_close(
        whole.attention[0].weights[:, :, :, :width], plain.attention[0].weights
    )


def test_draws_of_one_sample_are_adjacent():
    model, batch = captioner(seed=3), region_batch()
    with torch.no_grad():
        found = sample(model, batch, draws=3, rules=RULES)
    repeated = batch.select(torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2]))
    log_p, _ = log_probs(model, repeated, found.tokens)
    chosen = log_p.gather(2, found.tokens[..., None])[..., 0].where(found.mask, 0)
    torch.testing.assert_close(found.log_probabilities, chosen, atol=1e-5, rtol=0)


@torch.no_grad()
def test_length_and_forbidden_token_rules_apply():
    model, batch = captioner(seed=3), region_batch()
    rules = replace(RULES, min_length=3, max_length=3)
    for found in (greedy(model, batch, rules), beam_search(model, batch, 3, rules)):
        assert found.mask.sum(-1).tolist() == [3, 3, 3]
        assert not (found.tokens[:, :2] == END).any()
    assert bool(torch.isin(found.tokens, torch.tensor([4, 5, 6, 7])).all())


@torch.no_grad()
def test_given_features_are_not_computed_again():
    model, batch = captioner(seed=3), region_batch()
    features = model.encode(batch)
    expected = greedy(model, batch, RULES).ids()
    model.eye = None
    assert greedy(model, batch, RULES, features).ids() == expected


def test_bad_input_raises():
    model, batch = Coin(), region_batch()
    with pytest.raises(ValueError, match=r"min_length=3.*max_length=2"):
        DecodingRules(max_length=2, min_length=3)
    with pytest.raises(ValueError, match=r"draws.* 0"):
        sample(model, batch, draws=0)
    with pytest.raises(ValueError, match=r"temperature.* 0"):
        sample(model, batch, temperature=0.0)
    with pytest.raises(ValueError, match=r"width.* 0"):
        beam_search(model, batch, 0)


@torch.no_grad()
def test_sample_with_greedy_equals_greedy_and_sample():
    torch.manual_seed(1)
    model, batch = captioner(seed=3), region_batch()
    drawn, usual = sample_with_greedy(model, batch, draws=4, rules=RULES)
    alone = greedy(model, batch, RULES)
    assert usual.ids() == alone.ids()
    torch.testing.assert_close(usual.total, alone.total, atol=1e-5, rtol=0)
    assert len(drawn) == 12 and len({tuple(one) for one in drawn.ids()}) > 3
    rows = torch.arange(3).repeat_interleave(4)
    log_p, _ = log_probs(model, batch.select(rows), drawn.tokens)
    chosen = log_p.gather(2, drawn.tokens[..., None])[..., 0]
    expected = torch.where(drawn.mask, chosen, 0)
    torch.testing.assert_close(drawn.log_probabilities, expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"draws.* 0"):
        sample_with_greedy(model, batch, draws=0)
