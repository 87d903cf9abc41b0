from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from overt.data.vocabulary import BEGIN, END
from overt.models.captioning import captioner as captioning
from overt.models.captioning import decoding
from overt.models.captioning.decoding import (
    Rules,
    a_word,
    beam,
    beams,
    drawn,
    greedy,
    sample,
    sample_beside_greedy,
)
from overt.testing import Copier, toy_batch
from tests.models.captioning.test_captioner import captioner, region_batch

# ids 5 to 7 are words; the others but the end are never written
RULES = Rules(longest=3, never=(0, 1, 2, 3, 8, 9, 10, 11))


def told(model, batch, tokens):
    """Log-probabilities of tokens under the rules, all at once and without a cache."""
    begun = torch.cat([torch.full((len(tokens), 1), BEGIN), tokens[:, :-1]], dim=1)
    found = model.write(model.encode(batch), begun)
    logits = found.logits.clone()
    logits[..., list(RULES.never)] = -torch.inf
    return logits.log_softmax(dim=-1), found.attention


def every_text():
    """All texts of up to three tokens over three words, the end among them."""
    for length in range(RULES.longest + 1):
        for words in product([5, 6, 7], repeat=length):
            if length < RULES.longest:
                yield (*words, END)
            else:
                yield words


@torch.no_grad()
def best_of_all(model, batch):
    """The likeliest text of every sample, by trying all of them."""
    found = [(-torch.inf, ())] * len(batch)
    for text in every_text():
        tokens = torch.tensor([text]).expand(len(batch), -1)
        log_p = told(model, batch, tokens)[0].gather(2, tokens[..., None]).sum(dim=(1, 2))
        found = [max(old, (float(p), text)) for old, p in zip(found, log_p, strict=True)]
    return found


@torch.no_grad()
def test_enough_beams_find_the_best_text_of_all():
    model, batch = captioner(seed=3), region_batch()
    found = beam(model, batch, width=27, rules=RULES)
    for at, (total, text) in enumerate(best_of_all(model, batch)):
        assert [*found.tokens[at][found.mask[at]].tolist()] == [*text]
        assert float(found.total[at]) == pytest.approx(total, abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    "write",
    [
        lambda model, batch: greedy(model, batch, RULES),
        lambda model, batch: beam(model, batch, 3, RULES),
        lambda model, batch: sample(model, batch, rules=RULES),
    ],
    ids=["greedy", "beam", "sample"],
)
def test_probabilities_and_attention_are_those_of_the_whole_text(write):
    torch.manual_seed(0)
    model, batch = captioner(seed=3), region_batch()
    found = write(model, batch)
    log_p, attention = told(model, batch, found.tokens)
    chosen = log_p.gather(2, found.tokens[..., None])[..., 0]
    expected = torch.where(found.mask, chosen, 0)
    torch.testing.assert_close(found.log_probabilities, expected, atol=1e-5, rtol=0)
    (looked,) = found.attention
    rows = found.mask[:, None, None, :, None]
    torch.testing.assert_close(looked.weights, attention.weights * rows, atol=1e-5, rtol=0)
    assert torch.equal(looked.rows, found.mask)
    looked.check()


@torch.no_grad()
def test_one_beam_is_greedy_and_more_are_no_worse():
    model, batch = captioner(seed=4), region_batch()
    plain, one, five = greedy(model, batch), beam(model, batch, 1), beam(model, batch, 5)
    assert plain.ids() == one.ids()
    assert bool((five.total >= plain.total - 1e-5).all())


@torch.no_grad()
def test_beams_are_all_different_and_the_best_comes_first():
    model, batch = captioner(seed=5), region_batch()
    found = beams(model, batch, 4, RULES)
    assert len(found) == 12 and len({tuple(ids) for ids in found.ids()[:4]}) == 4
    totals = found.total.view(3, 4)
    assert bool((totals[:, :-1] >= totals[:, 1:]).all())
    assert beam(model, batch, 4, RULES).ids() == found.ids()[::4]
    ranked = beams(model, batch, 4, RULES, rank=a_word)
    means = (ranked.total / ranked.mask.sum(-1)).view(3, 4)
    assert bool((means[:, :-1] >= means[:, 1:] - 1e-6).all())


def test_a_copier_copies_in_every_way():
    batch = toy_batch(3)
    tokens = torch.tensor([[5, 6, 7, END], [8, 9, END, 0], [6, END, 0, 0]])
    batch = replace(batch, tokens=tokens, token_mask=tokens > 0, text=None)
    model = Copier(gain=40.0)
    for found in (greedy(model, batch), sample(model, batch), beam(model, batch, 3)):
        assert found.ids() == [[5, 6, 7], [8, 9], [6]]
        assert found.mask.sum(-1).tolist() == [4, 3, 2]
        looked = found.attention[0].weights[:, 0, 0]
        torch.testing.assert_close(looked[0, :4], torch.eye(4))
        assert not looked[2, 2:].any()


class Coin(nn.Module):
    """Writes heads (5) with probability 1/4 and else tails (6), forever."""

    def encode(self, batch):
        return len(batch)

    def start(self, features):
        return Tossed(features)

    def step(self, state, tokens):
        from overt.models.output import Output

        logits = torch.full((len(tokens), 7), -torch.inf)
        logits[:, 5], logits[:, 6] = 0.0, torch.tensor(3.0).log()
        return Output(logits), state


class Tossed:
    def __init__(self, count):
        self.count = count

    def reorder(self, rows):
        return Tossed(len(rows))


def test_chance_follows_the_model_and_its_temperature():
    batch = region_batch()
    generator = torch.Generator().manual_seed(1)
    rules = Rules(longest=200)
    found = sample(Coin(), batch, draws=20, rules=rules, generator=generator)
    assert len(found) == 60 and found.attention == ()
    assert float((found.tokens == 5).float().mean()) == pytest.approx(0.25, abs=0.02)
    log_p = found.log_probabilities
    expected = torch.where(found.tokens == 5, 0.25, 0.75).log()
    torch.testing.assert_close(log_p, expected)
    warm = sample(Coin(), batch, draws=20, temperature=1e3, rules=rules, generator=generator)
    assert float((warm.tokens == 5).float().mean()) == pytest.approx(0.5, abs=0.02)


def test_a_race_draws_what_multinomial_draws():
    shares = torch.rand(50, 30).softmax(dim=-1)
    shares[:, ::3] = 0
    ours = drawn(shares, torch.Generator().manual_seed(4))
    theirs = torch.multinomial(shares, 1, generator=torch.Generator().manual_seed(4))[:, 0]
    assert torch.equal(ours, theirs)


def test_tokens_after_the_last_end_are_left_out(monkeypatch):
    """A card is asked now and then only, and what it wrote in the meantime is dropped."""
    tokens = torch.tensor([[5, 6, END], [8, END, 0], [6, END, 0]])
    batch = replace(toy_batch(3), tokens=tokens, token_mask=tokens > 0, text=None)
    asked = []

    def over(there, written):
        asked.append(written)
        return written % 5 == 0 and not bool(there.any())

    monkeypatch.setattr(decoding, "_over", over)
    found = greedy(Copier(gain=40.0), batch)
    assert asked == [1, 2, 3, 4, 5] and torch.equal(found.tokens, tokens)


class Hasty(nn.Module):
    """Another decoder, in a hurry to end."""

    def __init__(self, model):
        super().__init__()
        self.model, self.encode, self.start = model, model.encode, model.start

    def step(self, state, tokens):
        output, state = self.model.step(state, tokens)
        sooner = output.prediction.clone()
        sooner[:, END] += 6
        return replace(output, prediction=sooner), state


@torch.no_grad()
def test_beams_of_a_card_that_records_are_the_same_texts(monkeypatch):
    """It is not asked whether all have ended, nor whose rows are whose: texts are padded."""
    model, batch, rules = Hasty(captioner(seed=5)), region_batch(), replace(RULES, longest=9)
    plain = beams(model, batch, 3, rules)
    for place, name in ((decoding, "_ended"), (captioning, "_same")):
        monkeypatch.setattr(place, name, lambda *_: False)
    whole = beams(model, batch, 3, rules)
    width = plain.tokens.shape[1]
    assert width < whole.tokens.shape[1] == rules.longest
    assert not whole.mask[:, width:].any()
    for name in ("tokens", "mask", "log_probabilities"):
        torch.testing.assert_close(getattr(whole, name)[:, :width], getattr(plain, name))
    torch.testing.assert_close(
        whole.attention[0].weights[:, :, :, :width], plain.attention[0].weights
    )


def test_draws_of_a_sample_stand_together():
    model, batch = captioner(seed=3), region_batch()
    with torch.no_grad():
        found = sample(model, batch, draws=3, rules=RULES)
    repeated = batch.select(torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2]))
    log_p, _ = told(model, repeated, found.tokens)
    chosen = log_p.gather(2, found.tokens[..., None])[..., 0].where(found.mask, 0)
    torch.testing.assert_close(found.log_probabilities, chosen, atol=1e-5, rtol=0)


@torch.no_grad()
def test_length_rules_hold():
    model, batch = captioner(seed=3), region_batch()
    rules = replace(RULES, shortest=3, longest=3)
    for found in (greedy(model, batch, rules), beam(model, batch, 3, rules)):
        assert found.mask.sum(-1).tolist() == [3, 3, 3]
        assert not (found.tokens[:, :2] == END).any()
    assert bool(torch.isin(found.tokens, torch.tensor([4, 5, 6, 7])).all())


@torch.no_grad()
def test_features_that_are_known_are_not_computed_again():
    model, batch = captioner(seed=3), region_batch()
    features = model.encode(batch)
    expected = greedy(model, batch, RULES).ids()
    model.eye = None
    assert greedy(model, batch, RULES, features).ids() == expected


def test_bad_input_is_refused():
    model, batch = Coin(), region_batch()
    with pytest.raises(ValueError, match="cannot be written"):
        Rules(longest=2, shortest=3)
    with pytest.raises(ValueError, match="0 draws"):
        sample(model, batch, draws=0)
    with pytest.raises(ValueError, match="temperature 0"):
        sample(model, batch, temperature=0.0)
    with pytest.raises(ValueError, match="0 beams"):
        beam(model, batch, 0)


@torch.no_grad()
def test_the_greedy_text_is_written_beside_those_that_are_drawn():
    torch.manual_seed(1)
    model, batch = captioner(seed=3), region_batch()
    drawn, usual = sample_beside_greedy(model, batch, draws=4, rules=RULES)
    alone = greedy(model, batch, RULES)
    assert usual.ids() == alone.ids()
    torch.testing.assert_close(usual.total, alone.total, atol=1e-5, rtol=0)
    assert len(drawn) == 12 and len({tuple(one) for one in drawn.ids()}) > 3
    rows = torch.arange(3).repeat_interleave(4)
    log_p, _ = told(model, batch.select(rows), drawn.tokens)
    chosen = log_p.gather(2, drawn.tokens[..., None])[..., 0]
    expected = torch.where(drawn.mask, chosen, 0)
    torch.testing.assert_close(drawn.log_probabilities, expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="0 draws"):
        sample_beside_greedy(model, batch, draws=0)
