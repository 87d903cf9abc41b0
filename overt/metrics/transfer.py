"""Transfer of features to another dataset: a cross-validated linear classifier (linear probe).

Jetley, Lord, Lee and Torr, "Learn To Pay Attention", ICLR 2018, https://arxiv.org/abs/1804.02391,
table 3 and appendix A.4: the features of the last layer and a linear SVM with C = 1, five folds.
The paper whitens the input images; `zca_whitening` can do this too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.errors import missing_package_message
from overt.metrics.metric import SampleScores, declare_metric

MAX_ITERATIONS = 10_000  # the default of 1,000 is too few for features that are not scaled

FeatureTransform = Callable[[Float[Tensor, "n d"]], Float[Tensor, "n d"]]
FitTransform = Callable[[Float[Tensor, "n d"]], FeatureTransform]


# --- preprocessing, fitted on the training folds only


@dataclass(frozen=True, eq=False)
class Whitening:
    """A linear map, `(x - mean) @ matrix`, after which features are uncorrelated."""

    mean: Float[Tensor, " d"]
    matrix: Float[Tensor, "d d"]

    def __call__(self, values: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Whiten values, in float64."""
        return (values.double() - self.mean) @ self.matrix


def no_preprocessing(train: Float[Tensor, "n d"]) -> FeatureTransform:
    """Leave features unchanged, as in the paper."""
    return lambda values: values.double()


def standardize(train: Float[Tensor, "n d"]) -> FeatureTransform:
    """Scale each feature to mean 0 and standard deviation 1; a constant feature becomes 0."""
    values = train.double()
    mean, deviation = values.mean(dim=0), values.std(dim=0, correction=0)
    scale = torch.where(deviation > 0, deviation, 1)
    return lambda values: (values.double() - mean) / scale


def zca_whitening(train: Float[Tensor, "n d"], floor: float = 1e-5) -> Whitening:
    """Fit ZCA whitening: the smallest change after which the covariance is the identity.

    Args:
        train: The training features; flatten images first.
        floor: Added to the variances, as a share of their mean, so that directions without variance
            are not amplified.

    Returns:
        The fitted whitening.
    """
    values = train.double()
    mean = values.mean(dim=0)
    centred = values - mean
    covariance = centred.T @ centred / len(values)
    variances, directions = torch.linalg.eigh(covariance)
    added = floor * covariance.diagonal().mean().clamp_min(torch.finfo(values.dtype).tiny)
    scale = (variances.clamp_min(0) + added).rsqrt()
    return Whitening(mean, (directions * scale) @ directions.T)


# --- the classifier


@dataclass(frozen=True, eq=False)
class CrossValidationResult:
    """Which samples were classified correctly by a classifier that was not trained on them.

    Args:
        right: 1 or 0 per sample, so that two sets of features can be compared by pairs.
        fold: The fold of each sample.
    """

    right: SampleScores
    fold: Int[Tensor, " b"]

    @property
    def accuracies(self) -> tuple[float, ...]:
        """Accuracy of each fold."""
        folds = range(int(self.fold.max()) + 1)
        return tuple(float(self.right[self.fold == fold].mean()) for fold in folds)

    @property
    def mean(self) -> float:
        """Mean accuracy over the folds, as papers report it."""
        return math.fsum(self.accuracies) / len(self.accuracies)

    @property
    def deviation(self) -> float:
        """Sample standard deviation over the folds, whose training sets overlap."""
        return float(torch.tensor(self.accuracies, dtype=torch.float64).std())


def cross_validate(
    features: Float[Tensor, "b d"],
    labels: Int[Tensor, " b"],
    prepare: FitTransform = no_preprocessing,
    c: float = 1.0,
    folds: int = 5,
    seed: int = 0,
) -> CrossValidationResult:
    """Cross-validate a linear SVM on features, with stratified folds.

    The solver is scikit-learn's, on the CPU.

    Args:
        features: One row per sample.
        labels: The classes.
        prepare: Fits a preprocessing on the training features: `no_preprocessing`, `standardize` or
            `zca_whitening`.
        c: Regularization parameter C of the SVM.
        folds: Number of folds.
        seed: Seed of the folds and the solver.

    Returns:
        Correctness and fold of each sample.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: Features are not finite, or a class has too few samples.
    """
    try:
        from sklearn.model_selection import StratifiedKFold
        from sklearn.svm import LinearSVC
    except ImportError as problem:
        raise ImportError(missing_package_message("sklearn"), name="sklearn") from problem
    _check_samples(features, labels, folds)
    names = labels.cpu().numpy()
    right = torch.zeros(len(labels))
    fold = torch.zeros(len(labels), dtype=torch.long)
    parts = StratifiedKFold(folds, shuffle=True, random_state=seed).split(names, names)
    for number, (train, test) in enumerate(parts):
        learned, judged = torch.from_numpy(train), torch.from_numpy(test)
        change = prepare(features[learned.to(features.device)].detach())
        machine = LinearSVC(C=c, dual="auto", max_iter=MAX_ITERATIONS, random_state=seed)
        machine.fit(_to_array(change, features, learned), names[train])
        found = machine.predict(_to_array(change, features, judged))
        right[judged] = torch.from_numpy(found == names[test]).float()
        fold[judged] = number
    return CrossValidationResult(right.to(features.device), fold.to(features.device))


@declare_metric("transfer accuracy", "share", higher_is_better=True, low=0.0, high=1.0)
def transfer_accuracy(
    features: Float[Tensor, "b d"],
    labels: Int[Tensor, " b"],
    prepare: FitTransform = no_preprocessing,
    c: float = 1.0,
    folds: int = 5,
    seed: int = 0,
) -> SampleScores:
    """Compute whether a linear SVM trained on other samples classifies a sample correctly: 1 or 0.

    Args:
        features: One row per sample.
        labels: The classes.
        prepare: Fits a preprocessing on the training features.
        c: Regularization parameter C of the SVM.
        folds: Number of folds.
        seed: Seed of the folds and the solver.

    Returns:
        One score per sample.
    """
    return cross_validate(features, labels, prepare, c, folds, seed).right


def _to_array(
    change: FeatureTransform, features: Float[Tensor, "b d"], rows: Int[Tensor, " n"]
) -> object:
    return change(features[rows.to(features.device)].detach()).cpu().numpy()


def _check_samples(features: Float[Tensor, "b d"], labels: Int[Tensor, " b"], folds: int) -> None:
    if folds < 2:
        raise ValueError(f"folds must be at least 2, got {folds}")
    if not features.isfinite().all():
        raise ValueError(f"features must be finite, {int((~features.isfinite()).sum())} are not")
    classes, counts = labels.unique(return_counts=True)
    if len(classes) < 2:
        raise ValueError(f"a classifier needs at least 2 classes, got {len(classes)}")
    if int(counts.min()) < folds:
        rarest = int(classes[counts.argmin()])
        raise ValueError(
            f"every class needs at least {folds} samples for {folds} folds, class {rarest} has "
            f"{int(counts.min())}: leave it out, or use fewer folds"
        )
