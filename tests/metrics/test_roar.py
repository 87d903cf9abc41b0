"""ROAR: retraining without the attended keys, with a tiny learner."""

from itertools import pairwise

import pytest
import torch

from overt.attention import AttentionMap, words
from overt.metrics import roar_faithfulness
from overt.metrics.roar import RetrainedModel, recursive_roar, roar

SHARES = (0.2, 0.4, 0.8)
KEYS = 5


def learner(
    x: torch.Tensor, y: torch.Tensor, test_x: torch.Tensor, test_y: torch.Tensor, calls: list
):
    """Return a learner that uses and attends to the most predictive feature."""

    def retrain(train: torch.Tensor, test: torch.Tensor) -> RetrainedModel:
        calls.append((train, test))
        predictive = ((x * train) * (2 * y - 1)[:, None]).mean(dim=0).abs()
        best = int(predictive.argmax())
        right = ((test_x * test)[:, best] > 0) == (test_y > 0)
        score = torch.where((test_x * test)[:, best] == 0, 0.5, right.float())

        def maps(count: int) -> AttentionMap:
            weights = torch.full((count, KEYS), 0.01)
            weights[:, best] = 1.0
            return AttentionMap.from_cells(weights, words(KEYS))

        return RetrainedModel(score, maps(len(train)), maps(len(test)))

    return retrain


@pytest.fixture
def data_with_copy(generator):
    """Make data: feature 1 is the label, feature 3 a noisy copy of it, the others are noise."""
    y = torch.randint(2, (400,), generator=generator).float()
    x = torch.randn(400, KEYS, generator=generator).sign()
    x[:, 1] = 2 * y - 1
    x[:, 3] = torch.where(torch.rand(400, generator=generator) < 0.02, -x[:, 1], x[:, 1])
    calls: list = []
    retrain = learner(x[:300], y[:300], x[300:], y[300:], calls)
    all_keys = torch.ones(300, KEYS, dtype=torch.bool), torch.ones(100, KEYS, dtype=torch.bool)
    return retrain(*all_keys), retrain, calls


def test_recursive_roar_removes_a_copied_feature(data_with_copy, generator):
    whole, retrain, _ = data_with_copy
    plain = roar(whole, retrain, generator, SHARES)
    again = recursive_roar(whole, retrain, generator, SHARES)
    assert plain.shares == again.shares == (0.0, *SHARES)
    assert float(plain.score[0].mean()) == 1
    # without feature 1 its copy is equally predictive
    assert float(plain.score[1].mean()) > 0.9 and float(again.score[1].mean()) > 0.9
    # the retrained model attends to the copy, which is removed next
    assert float(again.score[2].mean()) < 0.7
    assert float(again.faithfulness.mean()) > 0.1


def test_removed_keys_stay_removed(data_with_copy, generator):
    whole, retrain, calls = data_with_copy
    for remove in (roar, recursive_roar):
        calls.clear()
        remove(whole, retrain, generator, SHARES)
        assert len(calls) == 2 * len(SHARES)
        for curve in (calls[0::2], calls[1::2]):  # by attention and at random
            for share, (train, test) in zip(SHARES, curve, strict=True):
                left = KEYS - round(share * KEYS)
                assert (train.sum(dim=-1) == left).all() and (test.sum(dim=-1) == left).all()
            for before, after in pairwise(curve):
                assert not (after[0] & ~before[0]).any() and not (after[1] & ~before[1]).any()


def test_faithfulness_is_the_area_between_the_curves(data_with_copy, generator):
    whole, retrain, _ = data_with_copy
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
    calls = []

    def retrain(train, test):
        calls.append((train, test))
        return RetrainedModel(torch.ones(2), maps, maps)

    recursive_roar(RetrainedModel(torch.ones(2), maps, maps), retrain, generator, (0.34, 1.0))
    assert all(not (kept & ~seen).any() for pair in calls for kept in pair)
    assert calls[0][0].sum(dim=-1).tolist() == [2, 2] and not calls[2][0].any()


def test_shares_that_do_not_increase_raise(data_with_copy, generator):
    whole, retrain, _ = data_with_copy
    for shares in ((), (0.0, 0.5), (0.5, 0.2), (0.5, 1.5)):
        with pytest.raises(ValueError, match="must increase"):
            roar(whole, retrain, generator, shares)


def test_the_area_uses_the_share_actually_removed(generator):
    """With two keys one half is the smallest share: .3 removes one key, .2 none."""
    seen = torch.ones(3, 2, dtype=torch.bool)
    maps = AttentionMap.from_cells(torch.tensor([[0.9, 0.1]]).expand(3, 2), words(2))

    def retrain(train: torch.Tensor, test: torch.Tensor) -> RetrainedModel:
        return RetrainedModel(test[:, 0].float(), maps, maps)

    whole = retrain(seen, seen)
    found = roar(whole, retrain, generator, (0.2, 0.3, 1.0))
    assert found.removed.T.tolist() == [[0.0, 0.0, 0.5, 1.0]] * 3
    between = (found.random - found.score).double().numpy()
    expected = (between[1] + between[2]) / 2 * 0.5 + (between[2] + between[3]) / 2 * 0.5
    assert found.faithfulness.tolist() == pytest.approx(expected.tolist())
    assert roar(whole, retrain, generator, (0.1, 0.2)).faithfulness.isnan().all()
