"""How much do features know of another data set? A linear classifier on them is cross-validated.

Jetley, Lord, Lee and Torr, "Learn To Pay Attention", ICLR 2018, https://arxiv.org/abs/1804.02391,
table 3 and appendix A.4: what the last layer decides from, and a linear SVM with C = 1, five folds.
The paper whitens the images that features are made of; `whitening` serves for these too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.measure.measured import Measured, measured

MOST_STEPS = 10_000  # of the solver; its own default of 1,000 is short for features as they are

Change = Callable[[Float[Tensor, "n d"]], Float[Tensor, "n d"]]
Prepare = Callable[[Float[Tensor, "n d"]], Change]


# --- preparing features, by what is learned from the training folds alone


@dataclass(frozen=True, eq=False)
class Whitening:
    """A change of coordinates, `(x - mean) @ matrix`, after which features do not correlate."""

    mean: Float[Tensor, " d"]
    matrix: Float[Tensor, "d d"]

    def __call__(self, values: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """The values whitened, in double precision."""
        return (values.double() - self.mean) @ self.matrix


def as_they_are(train: Float[Tensor, "n d"]) -> Change:
    """Features are left alone, as in the paper."""
    return lambda values: values.double()


def standardised(train: Float[Tensor, "n d"]) -> Change:
    """Each feature with mean 0 and deviation 1; one that never changes becomes 0."""
    values = train.double()
    mean, deviation = values.mean(dim=0), values.std(dim=0, correction=0)
    scale = torch.where(deviation > 0, deviation, 1)
    return lambda values: (values.double() - mean) / scale


def whitening(train: Float[Tensor, "n d"], floor: float = 1e-5) -> Whitening:
    """ZCA: of all changes after which the covariance is the identity, the smallest one.

    `floor` is added to the variances, as a share of the mean of them, so that directions with none
    are not blown up. Images are flattened first.
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
class Transfer:
    """Which samples were classified rightly by a machine that had not seen them, and in which fold.

    `right` has one number a sample, so that two sets of features can be compared pairwise.
    """

    right: Measured
    fold: Int[Tensor, " b"]

    @property
    def accuracies(self) -> tuple[float, ...]:
        """The accuracy of each fold."""
        folds = range(int(self.fold.max()) + 1)
        return tuple(float(self.right[self.fold == fold].mean()) for fold in folds)

    @property
    def mean(self) -> float:
        """The mean over the folds, as papers report it."""
        return math.fsum(self.accuracies) / len(self.accuracies)

    @property
    def deviation(self) -> float:
        """The sample standard deviation over the folds, whose training sets overlap."""
        return float(torch.tensor(self.accuracies, dtype=torch.float64).std())


def cross_validated(
    features: Float[Tensor, "b d"],
    labels: Int[Tensor, " b"],
    prepare: Prepare = as_they_are,
    c: float = 1.0,
    folds: int = 5,
    seed: int = 0,
) -> Transfer:
    """A linear SVM on features, each fifth of the samples judged by what the others taught.

    Every fold has its share of each class. `prepare` learns from the training samples how features
    are changed: `as_they_are`, `standardised`, or `whitening`. The solver runs on the CPU, in
    scikit-learn.
    """
    try:
        from sklearn.model_selection import StratifiedKFold
        from sklearn.svm import LinearSVC
    except ImportError as problem:
        raise ImportError("a linear SVM needs scikit-learn: pip install scikit-learn") from problem
    _enough(features, labels, folds)
    names = labels.cpu().numpy()
    right = torch.zeros(len(labels))
    fold = torch.zeros(len(labels), dtype=torch.long)
    parts = StratifiedKFold(folds, shuffle=True, random_state=seed).split(names, names)
    for number, (train, test) in enumerate(parts):
        learned, judged = torch.from_numpy(train), torch.from_numpy(test)
        change = prepare(features[learned.to(features.device)].detach())
        machine = LinearSVC(C=c, dual="auto", max_iter=MOST_STEPS, random_state=seed)
        machine.fit(_array(change, features, learned), names[train])
        found = machine.predict(_array(change, features, judged))
        right[judged] = torch.from_numpy(found == names[test]).float()
        fold[judged] = number
    return Transfer(right.to(features.device), fold.to(features.device))


@measured("transfer accuracy", "share", higher_is_better=True, low=0.0, high=1.0)
def transfer_accuracy(
    features: Float[Tensor, "b d"],
    labels: Int[Tensor, " b"],
    prepare: Prepare = as_they_are,
    c: float = 1.0,
    folds: int = 5,
    seed: int = 0,
) -> Measured:
    """1 where the linear SVM that has not seen a sample is right about it, else 0."""
    return cross_validated(features, labels, prepare, c, folds, seed).right


def _array(change: Change, features: Float[Tensor, "b d"], rows: Int[Tensor, " n"]) -> object:
    return change(features[rows.to(features.device)].detach()).cpu().numpy()


def _enough(features: Float[Tensor, "b d"], labels: Int[Tensor, " b"], folds: int) -> None:
    if folds < 2:
        raise ValueError(f"{folds} folds leave nothing to learn from; take 2 at least")
    if not features.isfinite().all():
        raise ValueError(f"{int((~features.isfinite()).sum())} features are not finite")
    classes, counts = labels.unique(return_counts=True)
    if len(classes) < 2:
        raise ValueError("there are not two classes to tell apart")
    if int(counts.min()) < folds:
        rarest = int(classes[counts.argmin()])
        raise ValueError(
            f"class {rarest} has {int(counts.min())} samples, too few for {folds} folds: "
            "leave it out, or take fewer folds"
        )
