"""Caption losses: next-token cross-entropy and self-critical training."""

import pytest
import torch

from overt.losses.caption_reward import (
    SampledCaptions,
    constant_baseline,
    leave_one_out_baseline,
    log_probabilities,
    mean_baseline,
    next_token_cross_entropy,
    self_critical,
    token_reward,
)
from overt.metrics.captions import CiderDScorer
from overt.nn.captioning.decoding import DecodingRules, GeneratedTexts, greedy, sample
from tests.nn.captioning.test_captioner import TOKENS, captioner, region_batch

RULES = DecodingRules(max_length=4)


def make_texts(tokens):
    tokens = torch.tensor(tokens)
    return GeneratedTexts(tokens, tokens > 0, torch.zeros(tokens.shape))


def test_next_token_cross_entropy_ignores_padding():
    model, batch = captioner(), region_batch()
    logits, mask = model(batch).logits, TOKENS[:, 1:] > 0
    loss = next_token_cross_entropy(logits, TOKENS[:, 1:], mask)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), TOKENS[:, 1:].flatten(), ignore_index=0, reduction="sum"
    )
    torch.testing.assert_close(loss.total, expected)
    assert int(loss.count) == int(mask.sum()) == 11
    smooth = next_token_cross_entropy(logits, TOKENS[:, 1:], mask, smoothing=0.1)
    assert smooth.total > 0 and not torch.isclose(smooth.total, loss.total)


def test_log_probabilities_exclude_forbidden_tokens():
    logits = torch.zeros(1, 1, 4)
    assert float(log_probabilities(logits, torch.tensor([[3]])).exp()) == pytest.approx(0.25)
    assert float(log_probabilities(logits, torch.tensor([[3]]), (0, 1)).exp()) == pytest.approx(0.5)


def test_baselines_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 0.0]])
    assert mean_baseline(rewards).tolist() == [[3], [0]]
    assert leave_one_out_baseline(rewards).tolist() == [[4, 3.5, 1.5], [0, 0, 0]]
    assert constant_baseline(torch.tensor([5.0, 7.0]))(rewards).tolist() == [[5], [7]]
    torch.testing.assert_close(
        rewards - mean_baseline(rewards), (rewards - leave_one_out_baseline(rewards)) * 2 / 3
    )
    with pytest.raises(ValueError, match=r"leave\-one\-out"):
        leave_one_out_baseline(rewards[:, :1])


def test_self_critical_step_by_hand():
    log_p = torch.tensor([[-1.0, -2.0], [-3.0, -9.0]], requires_grad=True)
    drawn = make_texts([[5, 4], [4, 0]])
    rewards = torch.tensor([[1.0, 0.5]])
    found = self_critical(lambda: drawn, lambda _: rewards, lambda _: log_p)
    # advantages 0.5 and -0.5, of texts with log-probabilities -3 and -3
    assert float(found.loss.total.detach()) == pytest.approx(-(0.5 * -3) - (-0.5 * -3))
    assert float(found.loss.count) == 2
    found.loss.total.backward()
    assert log_p.grad.tolist() == [[-0.5, -0.5], [0.5, 0]]
    assert (found.reward, found.best, found.baseline) == (0.75, 1.0, 0.75)
    assert (found.spread, found.idle, found.length) == (0.5, 0.0, 1.5)


def test_equal_rewards_give_no_gradient_and_are_counted_as_idle():
    log_p = torch.zeros(4, 1, requires_grad=True)
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    found = self_critical(lambda: make_texts([[5]] * 4), lambda _: rewards, lambda _: log_p)
    found.loss.total.backward()
    assert found.idle == 0.5 and log_p.grad.flatten().tolist()[:2] == [0, 0]


def test_gradient_approaches_that_of_the_expected_reward():
    """With many draws of one of three words the mean gradient approaches that of E[r]."""
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    worth = torch.tensor([1.0, 0.0, 3.0])
    (exact,) = torch.autograd.grad(-(logits.softmax(-1) * worth).sum(), logits)
    generator = torch.Generator().manual_seed(0)
    words = torch.multinomial(logits.detach().softmax(-1), 40_000, True, generator=generator)
    drawn = GeneratedTexts(
        words[:, None], torch.ones(40_000, 1, dtype=torch.bool), torch.zeros(40_000, 1)
    )
    found = self_critical(
        lambda: drawn,
        lambda one: worth[one.tokens].view(-1, 4),
        lambda one: logits.log_softmax(-1)[one.tokens],
    )
    (ours,) = torch.autograd.grad(found.loss.mean(), logits)
    torch.testing.assert_close(ours, exact, atol=0.02, rtol=0)


def test_sampling_and_rewards_run_without_gradients():
    seen = []

    def note(value):
        seen.append(torch.is_grad_enabled())
        return value

    self_critical(
        lambda: note(make_texts([[5], [6]])),
        lambda _: note(torch.tensor([[1.0, 0.0]])),
        lambda _: note(torch.zeros(2, 1, requires_grad=True)),
        lambda rewards: note(mean_baseline(rewards)),
    )
    assert seen == [False, False, False, True]


def test_self_critical_steps_increase_the_reward():
    model, batch = captioner(seed=7), region_batch()
    references = [[[5, 6, 7]], [[8, 9]], [[10, 11, 5]]]
    score = CiderDScorer(references)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    begin = torch.full((24, 1), RULES.begin)
    rows = torch.arange(3).repeat_interleave(8)

    def log_probs_of(drawn):
        given_before = torch.cat([begin, drawn.tokens[:, :-1]], dim=1)
        output = model.decode_captions(model.encode(batch.select(rows)), given_before)
        return log_probabilities(output.logits, drawn.tokens, RULES.forbidden).where(drawn.mask, 0)

    def reward(drawn):
        return torch.from_numpy(score(drawn.ids(), rows.tolist())).float().view(3, 8)

    found = []
    for _ in range(25):
        step = self_critical(
            lambda: sample(model, batch, 8, rules=RULES, generator=generator), reward, log_probs_of
        )
        optimizer.zero_grad()
        step.loss.mean().backward()
        optimizer.step()
        found.append(step.reward)
    assert sum(found[-5:]) > 1.5 * sum(found[:5])
    with torch.no_grad():
        assert isinstance(greedy(model, batch, RULES), SampledCaptions)


def test_token_reward_includes_the_end_token_per_image():
    end = RULES.end
    references = [[[5, 6, end]], [[8, 9, end], [8, end]], [[10, 11, end]]]
    score = CiderDScorer(references)
    drawn = make_texts([[10, 11, end], [10, 5, 0], [5, 6, end], [5, end, 0]])
    reward = token_reward(score, images=[2, 0], draws=2)
    texts = [[10, 11, end], [10, 5], [5, 6, end], [5, end]]
    expected = torch.from_numpy(score(texts, [2, 2, 0, 0])).view(2, 2)
    assert torch.equal(reward(drawn), expected)
    assert (reward(drawn)[:, 0] > reward(drawn)[:, 1]).all()
    with pytest.raises(ValueError, match=r"2 caption.* 3 .* 4"):
        token_reward(score, [0, 1, 2], 2)(drawn)


def test_invalid_rewards_raise():
    def step(rewards):
        return self_critical(
            lambda: make_texts([[5], [6]]), lambda _: rewards, lambda _: torch.zeros(2, 1)
        )

    with pytest.raises(ValueError, match="2 rewards.* 3"):
        step(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="not finite"):
        step(torch.tensor([[float("nan"), 0.0]]))


def test_tokens_and_logits_of_other_lengths_are_named(monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    tokens = torch.ones(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 4\)"):
        next_token_cross_entropy(torch.zeros(2, 3, 5), tokens, tokens > 0)
    with pytest.raises(ValueError, match="mask"):
        next_token_cross_entropy(torch.zeros(2, 4, 5), tokens, tokens[:1] > 0)


@pytest.fixture
def without_shape_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the checks of shapes at each call, as for users."""
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)


@pytest.mark.usefixtures("without_shape_checks")
def test_tokens_outside_of_the_vocabulary_raise_unless_they_are_padding():
    logits, tokens = torch.zeros(2, 5, 7), torch.arange(10).reshape(2, 5) % 7
    mask = torch.arange(5).expand(2, 5) < 3
    padded = tokens.where(mask, -100)
    found = next_token_cross_entropy(logits, padded, mask)
    assert torch.equal(found.total, next_token_cross_entropy(logits, tokens, mask).total)
    for wrong in (7, -1):
        with pytest.raises(ValueError, match=rf"0 to 6.* {wrong}"):
            next_token_cross_entropy(logits, tokens.where(~mask, wrong), mask)
    with pytest.raises(ValueError, match=r"boolean.*float"):
        next_token_cross_entropy(logits, tokens, mask.float())


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("smoothing", [-0.1, 1.1, float("nan")])
def test_smoothing_out_of_range_raises(smoothing):
    logits, tokens = torch.zeros(1, 2, 3), torch.zeros(1, 2).long()
    with pytest.raises(ValueError, match=f"smoothing.*{smoothing}"):
        next_token_cross_entropy(logits, tokens, tokens == 0, smoothing)
