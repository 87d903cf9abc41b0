"""Transfer accuracy compared with scikit-learn's cross-validation, and whitening."""

import sys
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.svm import LinearSVC

from overt.metrics.transfer import (
    CrossValidationResult,
    cross_validate,
    no_preprocessing,
    standardize,
    transfer_accuracy,
    zca_whitening,
)


def random_features(
    generator: torch.Generator, noise: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return three clusters of 20 points in six dimensions."""
    labels = torch.arange(60) % 3
    centres = torch.randn(3, 6, generator=generator)
    return centres[labels] + noise * torch.randn(60, 6, generator=generator), labels


def test_cross_validation_agrees_with_scikit_learn(generator):
    x, y = random_features(generator)
    found = cross_validate(x, y)
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


def test_every_sample_is_tested_once_in_stratified_folds(generator):
    x, y = random_features(generator)
    found = cross_validate(x, y, folds=4)
    assert found.right.shape == (60,) and set(found.right.tolist()) <= {0.0, 1.0}
    for fold in range(4):
        assert (y[found.fold == fold].bincount() == 5).all()


def test_samples_are_not_tested_by_their_own_training_fold(generator):
    """With one-hot features per sample and random labels nothing can be learned."""
    labels = torch.randint(0, 2, (60,), generator=generator)
    assert cross_validate(torch.eye(60), labels).mean < 0.75
    label_features = torch.nn.functional.one_hot(labels).float()
    assert cross_validate(label_features, labels).mean == 1


def test_folds_depend_on_the_seed_only(generator):
    x, y = random_features(generator, noise=2.0)
    first, again, other = (cross_validate(x, y, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.right, again.right) and torch.equal(first.fold, again.fold)
    assert not torch.equal(first.fold, other.fold)


def test_preprocessing_is_fitted_on_training_folds_only(generator):
    x, y = random_features(generator)
    seen: list[int] = []

    def prepare(train: torch.Tensor):
        seen.append(len(train))
        return no_preprocessing(train)

    cross_validate(x.requires_grad_(), y, prepare)
    assert seen == [48] * 5


@pytest.mark.parametrize("prepare", [standardize, zca_whitening])
def test_preprocessing_removes_feature_scales(prepare, generator):
    x, y = random_features(generator)
    scaled = x * torch.tensor([1e-3, 1.0, 1e3, 1.0, 1.0, 10.0])
    if prepare is zca_whitening:
        prepare = partial(zca_whitening, floor=0.0)
    plain, stretched = (cross_validate(one, y, prepare).mean for one in (x, scaled))
    assert plain == pytest.approx(stretched, abs=0.05)


def test_whitened_features_do_not_correlate(generator):
    x = torch.randn(500, 4, generator=generator) @ torch.randn(4, 4, generator=generator) + 3
    change = zca_whitening(x, floor=0.0)
    white = change(x)
    torch.testing.assert_close(white.mean(dim=0), torch.zeros(4).double(), atol=1e-9, rtol=0)
    covariance = torch.cov(white.T, correction=0)
    torch.testing.assert_close(covariance, torch.eye(4).double(), atol=1e-9, rtol=0)


def test_zca_is_the_inverse_root_of_the_covariance(generator):
    """ZCA uses the symmetric root, unlike other whitenings."""
    from scipy.linalg import sqrtm

    x = torch.randn(300, 5, generator=generator) @ torch.randn(5, 5, generator=generator)
    found = zca_whitening(x, floor=0.0).matrix
    covariance = np.cov(x.double().numpy().T, bias=True)
    np.testing.assert_allclose(found, np.linalg.inv(sqrtm(covariance)), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found, found.T)


def test_whitening_does_not_amplify_constant_directions(generator):
    x = torch.randn(50, 3, generator=generator)
    x = torch.cat([x, x[:, :1], torch.full((50, 1), 7.0)], dim=1)
    white = zca_whitening(x)(x)
    assert white.isfinite().all() and float(white.abs().max()) < 20
    assert not zca_whitening(torch.ones(5, 2))(torch.ones(5, 2)).any()


def test_standardize_matches_an_example_by_hand():
    change = standardize(torch.tensor([[0.0, 5.0], [2.0, 5.0]]))
    assert change(torch.tensor([[3.0, 6.0]])).tolist() == [[2.0, 1.0]]


def test_cross_validation_result_matches_an_example_by_hand():
    made = CrossValidationResult(torch.tensor([1.0, 0, 1, 1]), torch.tensor([0, 0, 1, 1]))
    assert made.accuracies == (0.5, 1.0)
    assert made.mean == 0.75 and made.deviation == pytest.approx(0.353553, abs=1e-6)


def test_bad_input_raises(generator):
    x, y = random_features(generator)
    with pytest.raises(ValueError, match=r"5 folds.* 7 .*3"):
        cross_validate(x, torch.cat([torch.full((3,), 7), y[3:]]))
    with pytest.raises(ValueError, match="at least 2 classes"):
        cross_validate(x, torch.zeros_like(y))
    with pytest.raises(ValueError, match="folds .* got 1"):
        cross_validate(x, y, folds=1)
    with pytest.raises(ValueError, match="finite, 1"):
        cross_validate(torch.where(torch.eye(60, 6) * torch.arange(6) == 5, torch.nan, x), y)


def test_missing_scikit_learn_raises_with_install_command(monkeypatch, generator):
    for name in ("sklearn", "sklearn.svm", "sklearn.model_selection"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip .*scikit-learn"):
        cross_validate(*random_features(generator))


@pytest.mark.gpu
@pytest.mark.parametrize("prepare", [no_preprocessing, standardize, zca_whitening])
def test_features_can_be_on_a_gpu(prepare, generator):
    x, y = random_features(generator)
    here, there = (cross_validate(x.to(d), y.to(d), prepare) for d in ("cpu", "cuda"))
    assert there.right.is_cuda and torch.equal(there.fold.cpu(), here.fold)
    assert there.mean == pytest.approx(here.mean, abs=0.02)
