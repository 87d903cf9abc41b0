"""Training again without what was attended to: a learner small enough to follow by hand."""

from itertools import pairwise

import pytest
import torch

from overt.attention import AttentionMap, words
from overt.measure import Retrained, recursive_roar, roar, roar_faithfulness

SHARES = (0.2, 0.4, 0.8)
KEYS = 5


def learner(
    x: torch.Tensor, y: torch.Tensor, test_x: torch.Tensor, test_y: torch.Tensor, asked: list
):
    """Trusts the one feature that tells most of the label, and attends to nothing else."""

    def retrain(train: torch.Tensor, test: torch.Tensor) -> Retrained:
        asked.append((train, test))
        told = ((x * train) * (2 * y - 1)[:, None]).mean(dim=0).abs()
        best = int(told.argmax())
        right = ((test_x * test)[:, best] > 0) == (test_y > 0)
        score = torch.where((test_x * test)[:, best] == 0, 0.5, right.float())

        def maps(count: int) -> AttentionMap:
            weights = torch.full((count, KEYS), 0.01)
            weights[:, best] = 1.0
            return AttentionMap.from_cells(weights, words(KEYS))

        return Retrained(score, maps(len(train)), maps(len(test)))

    return retrain


@pytest.fixture
def copied(generator):
    """Feature 1 is the label, feature 3 nearly a copy of it, the others are noise."""
    y = torch.randint(2, (400,), generator=generator).float()
    x = torch.randn(400, KEYS, generator=generator).sign()
    x[:, 1] = 2 * y - 1
    x[:, 3] = torch.where(torch.rand(400, generator=generator) < 0.02, -x[:, 1], x[:, 1])
    asked: list = []
    retrain = learner(x[:300], y[:300], x[300:], y[300:], asked)
    everything = torch.ones(300, KEYS, dtype=torch.bool), torch.ones(100, KEYS, dtype=torch.bool)
    return retrain(*everything), retrain, asked


def test_a_copy_hides_the_loss_until_it_is_asked_for_again(copied, generator):
    whole, retrain, _ = copied
    plain = roar(whole, retrain, generator, SHARES)
    again = recursive_roar(whole, retrain, generator, SHARES)
    assert plain.shares == again.shares == (0.0, *SHARES)
    assert float(plain.score[0].mean()) == 1
    # without feature 1 its copy serves as well
    assert float(plain.score[1].mean()) > 0.9 and float(again.score[1].mean()) > 0.9
    # the model trained again attends to the copy, and loses it next
    assert float(again.score[2].mean()) < 0.7
    assert float(again.faithfulness.mean()) > 0.1


def test_what_is_gone_stays_gone(copied, generator):
    whole, retrain, asked = copied
    for remove in (roar, recursive_roar):
        asked.clear()
        remove(whole, retrain, generator, SHARES)
        assert len(asked) == 2 * len(SHARES)
        for curve in (asked[0::2], asked[1::2]):  # by attention, and at random
            for share, (train, test) in zip(SHARES, curve, strict=True):
                left = KEYS - round(share * KEYS)
                assert (train.sum(dim=-1) == left).all() and (test.sum(dim=-1) == left).all()
            for before, after in pairwise(curve):
                assert not (after[0] & ~before[0]).any() and not (after[1] & ~before[1]).any()


def test_the_area_is_that_between_the_curves(copied, generator):
    whole, retrain, _ = copied
    found = roar(whole, retrain, torch.Generator().manual_seed(4), SHARES)
    apart = (found.random - found.score).double()
    at = [0.0, *SHARES]
    area = sum((apart[i] + apart[i + 1]) / 2 * (at[i + 1] - at[i]) for i in range(3)) / 0.8
    torch.testing.assert_close(found.faithfulness, area.float())
    again = roar_faithfulness(whole, retrain, torch.Generator().manual_seed(4), SHARES, roar)
    assert torch.equal(again, found.faithfulness)


def test_hidden_keys_are_never_kept(generator):
    seen = torch.tensor([[True, True, True, False, False]] * 2)
    maps = AttentionMap.from_cells(torch.rand(2, 5, generator=generator), words(5), seen)
    asked = []

    def retrain(train, test):
        asked.append((train, test))
        return Retrained(torch.ones(2), maps, maps)

    recursive_roar(Retrained(torch.ones(2), maps, maps), retrain, generator, (0.34, 1.0))
    assert all(not (kept & ~seen).any() for pair in asked for kept in pair)
    assert asked[0][0].sum(dim=-1).tolist() == [2, 2] and not asked[2][0].any()


def test_shares_must_grow(copied, generator):
    whole, retrain, _ = copied
    for shares in ((), (0.0, 0.5), (0.5, 0.2), (0.5, 1.5)):
        with pytest.raises(ValueError, match="must grow"):
            roar(whole, retrain, generator, shares)
