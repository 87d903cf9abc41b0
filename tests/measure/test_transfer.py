"""Transfer: against scikit-learn's own cross-validation, and whitening by its definition."""

import sys
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.svm import LinearSVC

from overt.measure import (
    Transfer,
    as_they_are,
    cross_validated,
    standardised,
    transfer_accuracy,
    whitening,
)


def features(generator: torch.Generator, noise: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Three clouds of 20 points in six dimensions."""
    labels = torch.arange(60) % 3
    centres = torch.randn(3, 6, generator=generator)
    return centres[labels] + noise * torch.randn(60, 6, generator=generator), labels


def test_folds_agree_with_scikit_learn(generator):
    x, y = features(generator)
    found = cross_validated(x, y)
    expected = cross_val_score(
        LinearSVC(C=1.0, dual="auto", max_iter=10_000, random_state=0),
        x.double().numpy(),
        y.numpy(),
        cv=StratifiedKFold(5, shuffle=True, random_state=0),
    )
    np.testing.assert_allclose(found.accuracies, expected, rtol=1e-6)
    assert found.mean == pytest.approx(expected.mean())
    assert found.deviation == pytest.approx(expected.std(ddof=1))
    assert 0.4 < found.mean < 1
    assert torch.equal(transfer_accuracy(x, y), found.right)


def test_every_sample_is_judged_once_and_each_fold_has_its_share(generator):
    x, y = features(generator)
    found = cross_validated(x, y, folds=4)
    assert found.right.shape == (60,) and set(found.right.tolist()) <= {0.0, 1.0}
    for fold in range(4):
        assert (y[found.fold == fold].bincount() == 5).all()


def test_no_sample_teaches_its_own_judge(generator):
    """Features that name each sample, and labels at random: nothing can be learned."""
    labels = torch.randint(0, 2, (60,), generator=generator)
    assert cross_validated(torch.eye(60), labels).mean < 0.75
    told = torch.nn.functional.one_hot(labels).float()
    assert cross_validated(told, labels).mean == 1


def test_the_seed_decides(generator):
    x, y = features(generator, noise=2.0)
    first, again, other = (cross_validated(x, y, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.right, again.right) and torch.equal(first.fold, again.fold)
    assert not torch.equal(first.fold, other.fold)


def test_features_are_prepared_by_the_training_folds_alone(generator):
    x, y = features(generator)
    seen: list[int] = []

    def prepare(train: torch.Tensor):
        seen.append(len(train))
        return as_they_are(train)

    cross_validated(x.requires_grad_(), y, prepare)
    assert seen == [48] * 5


@pytest.mark.parametrize("prepare", [standardised, whitening])
def test_scales_do_not_matter_once_features_are_prepared(prepare, generator):
    x, y = features(generator)
    scaled = x * torch.tensor([1e-3, 1.0, 1e3, 1.0, 1.0, 10.0])
    if prepare is whitening:
        prepare = partial(whitening, floor=0.0)
    plain, stretched = (cross_validated(one, y, prepare).mean for one in (x, scaled))
    assert plain == pytest.approx(stretched, abs=0.05)


def test_whitened_features_do_not_correlate(generator):
    x = torch.randn(500, 4, generator=generator) @ torch.randn(4, 4, generator=generator) + 3
    change = whitening(x, floor=0.0)
    white = change(x)
    torch.testing.assert_close(white.mean(dim=0), torch.zeros(4).double(), atol=1e-9, rtol=0)
    covariance = torch.cov(white.T, correction=0)
    torch.testing.assert_close(covariance, torch.eye(4).double(), atol=1e-9, rtol=0)


def test_zca_is_the_inverse_root_of_the_covariance(generator):
    """The symmetric root: what tells ZCA from other whitenings."""
    from scipy.linalg import sqrtm

    x = torch.randn(300, 5, generator=generator) @ torch.randn(5, 5, generator=generator)
    found = whitening(x, floor=0.0).matrix
    covariance = np.cov(x.double().numpy().T, bias=True)
    np.testing.assert_allclose(found, np.linalg.inv(sqrtm(covariance)), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found, found.T)


def test_directions_without_variance_are_not_blown_up(generator):
    x = torch.randn(50, 3, generator=generator)
    x = torch.cat([x, x[:, :1], torch.full((50, 1), 7.0)], dim=1)
    white = whitening(x)(x)
    assert white.isfinite().all() and float(white.abs().max()) < 20
    assert not whitening(torch.ones(5, 2))(torch.ones(5, 2)).any()


def test_standardised_by_hand():
    change = standardised(torch.tensor([[0.0, 5.0], [2.0, 5.0]]))
    assert change(torch.tensor([[3.0, 6.0]])).tolist() == [[2.0, 1.0]]


def test_a_transfer_by_hand():
    made = Transfer(torch.tensor([1.0, 0, 1, 1]), torch.tensor([0, 0, 1, 1]))
    assert made.accuracies == (0.5, 1.0)
    assert made.mean == 0.75 and made.deviation == pytest.approx(0.353553, abs=1e-6)


def test_bad_input_is_said_in_a_sentence(generator):
    x, y = features(generator)
    with pytest.raises(ValueError, match="class 7 has 3 samples, too few for 5 folds"):
        cross_validated(x, torch.cat([torch.full((3,), 7), y[3:]]))
    with pytest.raises(ValueError, match="not two classes"):
        cross_validated(x, torch.zeros_like(y))
    with pytest.raises(ValueError, match="1 folds leave nothing"):
        cross_validated(x, y, folds=1)
    with pytest.raises(ValueError, match="1 features are not finite"):
        cross_validated(torch.where(torch.eye(60, 6) * torch.arange(6) == 5, torch.nan, x), y)


def test_without_scikit_learn_a_sentence_says_so(monkeypatch, generator):
    for name in ("sklearn", "sklearn.svm", "sklearn.model_selection"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="needs scikit-learn: pip install scikit-learn"):
        cross_validated(*features(generator))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("prepare", [as_they_are, standardised, whitening])
def test_features_may_lie_on_a_gpu(prepare, generator):
    x, y = features(generator)
    here, there = (cross_validated(x.to(d), y.to(d), prepare) for d in ("cpu", "cuda"))
    assert there.right.is_cuda and torch.equal(there.fold.cpu(), here.fold)
    assert there.mean == pytest.approx(here.mean, abs=0.02)
