"""Asking a model about the same samples again and again, each time with other parts removed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Layout
from overt.capture.resting import resting
from overt.data.batch import Batch
from overt.geometry import PixelGeometry, RegionGeometry, TextGeometry
from overt.supervise.surrogate.places import Places


@runtime_checkable
class Answer(Protocol):
    """What a model says: a prediction, and where it looked."""

    @property
    def prediction(self) -> Float[Tensor, "b c"]: ...
    def looking_at(self, name: str) -> AttentionMap: ...


@runtime_checkable
class Asking(Protocol):
    """A model that can be asked twice: `encode` once, `decide` for every mask.

    What no mask changes belongs into `encode`, where it is computed once for all masks: a linear
    map of the cells, say, because one number a cell can be multiplied after it as well as before.
    """

    def encode(self, batch: Batch) -> Any: ...
    def decide(self, features: Any, mask: Mapping[str, Tensor] | None = None) -> Answer: ...


@runtime_checkable
class AskingMany(Asking, Protocol):
    """A model that takes many masks of the same samples at once, and so needs no copy of features.

    `decide_many` gets the features of b samples and m masks of each, and answers m b times, one
    mask after the other: what `decide` says when all samples come m times over. A search of such a
    model asks about few samples with all of their masks, so that features are read from a cache.
    """

    def decide_many(self, features: Any, mask: Mapping[str, Float[Tensor, "m b _"]]) -> Answer: ...


Score = Callable[[Float[Tensor, "n c"], Batch], Float[Tensor, " n"]]
Reduce = Callable[[AttentionMap], AttentionMap]
Select = Callable[[Any, Int[Tensor, " n"], int], Any]


# --- how sure the model is of the truth


def of_label(prediction: Float[Tensor, "n c"], batch: Batch) -> Float[Tensor, " n"]:
    """The log-probability of the right class, in float32 at least.

    The paper compares probabilities. Their logarithms have the same order, and go on telling apart
    what has rounded to zero.
    """
    if batch.labels is None:
        raise ValueError("surrogates are found with the right answers; these samples have none")
    logs = prediction.to(torch.promote_types(prediction.dtype, torch.float32)).log_softmax(dim=-1)
    return logs.gather(1, batch.labels[:, None])[:, 0]


def of_answers(prediction: Float[Tensor, "n c"], batch: Batch) -> Float[Tensor, " n"]:
    """The log-probabilities of several right answers, weighted by their soft scores.

    The scores of a sample are divided by their sum. One whose answers are all unknown scores 0
    for every mask, and keeps its whole input.
    """
    if batch.answers is None:
        raise ValueError("these samples have no soft scores of answers")
    precise = torch.promote_types(prediction.dtype, torch.float32)
    weights = batch.answers.to(precise)
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(precise).tiny)
    logs = prediction.to(precise).log_softmax(dim=-1)
    return torch.where(weights > 0, weights * logs, 0).sum(dim=-1)


def of_truth(prediction: Float[Tensor, "n c"], batch: Batch) -> Float[Tensor, " n"]:
    """`of_answers` where a sample may have several, else `of_label`."""
    return (of_label if batch.answers is None else of_answers)(prediction, batch)


# --- which map, when there are several


def mean(attention: AttentionMap) -> AttentionMap:
    """The mean over layers and over hops, glimpses or heads: of distributions, a distribution."""
    return attention.over_heads().over_layers()


def last_layer(attention: AttentionMap) -> AttentionMap:
    """The last layer, its heads averaged: the last hop of stacked attention."""
    return attention.layer(-1).over_heads()


def every_one(attention: AttentionMap) -> AttentionMap:
    """All layers and heads as they are."""
    return attention


# --- rows of features


def rows_of(features: Any, rows: Int[Tensor, " n"], count: int) -> Any:
    """The samples named, in their order, of features of `count` samples.

    Tensors, maps, layouts, geometries and batches are known, in dataclasses, mappings and
    sequences of any depth. A tensor with another first size is refused: it cannot be told whose
    its rows are.
    """
    match features:
        case Batch() | AttentionMap() | Layout():
            return features.select(rows)
        case PixelGeometry() | RegionGeometry() | TextGeometry():
            return features[rows]
        case Tensor():
            if features.ndim == 0:
                return features
            if len(features) != count:
                raise ValueError(
                    f"features hold a tensor of shape {tuple(features.shape)} for {count} samples, "
                    "whose rows are not theirs; say with select= how to take some of the samples"
                )
            return features[rows.to(features.device, non_blocking=True)]
        case None | bool() | int() | float() | str() | bytes() | slice() | torch.Size():
            return features
        case Mapping():
            return {name: rows_of(one, rows, count) for name, one in features.items()}
        case list() | tuple():
            found = [rows_of(one, rows, count) for one in features]
            named = hasattr(features, "_fields")
            return type(features)(*found) if named else type(features)(found)
    if is_dataclass(features) and not isinstance(features, type):
        each = {
            one.name: rows_of(getattr(features, one.name), rows, count) for one in fields(features)
        }
        return replace(features, **each)
    raise ValueError(
        f"features hold a {type(features).__name__}, whose rows are not known; say with select= "
        "how to take some of the samples"
    )


# --- asking


@dataclass(frozen=True, eq=False)
class Looked:
    """What the model said about some samples with some masks, and how sure it was of the truth."""

    score: Float[Tensor, " n"]
    answer: Answer


class Look:
    """A batch that is encoded once and can be asked about with any mask; `asking` makes one.

    `base` is the score of every sample with nothing removed, `places` what can be removed from it,
    `seen` which keys its queries then see. Scores are on the CPU, masks best made on `device`.
    Features are selected once for as long as the same rows are asked about. `takes_many` says that
    the model is asked about many masks of a sample without copies of its features.
    """

    def __init__(
        self,
        model: Asking,
        features: Any,
        batch: Batch,
        names: Sequence[str],
        score: Score = of_truth,
        reduce: Reduce = mean,
        select: Select = rows_of,
    ) -> None:
        self.ids, self.names = batch.ids, tuple(names)
        self._model, self._features, self._select = model, features, select
        self._score, self._reduce = score, reduce
        self._truth = Batch(
            batch.ids, labels=batch.labels, answers=batch.answers, groups=batch.groups
        )
        known = [one for one in (batch.labels, batch.answers) if one is not None]
        self.device = known[0].device if known else torch.device("cpu")
        self._held: dict[str, Tensor] = {}
        self.takes_many = isinstance(model, AskingMany)
        self._rows: Tensor | None = None
        self._asked: tuple[Any, Batch]
        everyone = torch.arange(len(batch))
        whole = self(everyone, {})
        wrong = ~whole.score.isfinite()
        if wrong.any():
            who = self.ids[int(wrong.nonzero()[0])]
            raise ValueError(f"the model gives sample {who!r} no probability, but NaN or infinity")
        self.base = whole.score
        self.places = {n: Places.under(whole.answer.looking_at(n), n) for n in self.names}
        self.seen = {n: one.mask for n, one in self.maps(whole.answer).items()}

    def __len__(self) -> int:
        return len(self.ids)

    def __call__(
        self, rows: Int[Tensor, " n"], masks: Mapping[str, Float[Tensor, "n _"]]
    ) -> Looked:
        """The answers about the samples in `rows`, each with its own mask, 1 to keep."""
        score, answer = self._asked_about(rows, masks)
        return Looked(score.cpu(), answer)

    def many(
        self, rows: Int[Tensor, " n"], masks: Mapping[str, Float[Tensor, "m n _"]]
    ) -> Float[Tensor, "m n"]:
        """The scores of m masks of each sample in `rows`, on `device`: nothing waits for them."""
        m = len(next(iter(masks.values())))
        if not isinstance(self._model, AskingMany):
            flat = {name: mask.flatten(0, 1) for name, mask in masks.items()}
            return self._asked_about(rows.repeat(m), flat)[0].unflatten(0, (m, -1))
        held = {
            name: mask[rows].expand(m, -1, -1)
            for name, mask in self._held.items()
            if name not in masks
        }
        found = {
            name: mask.to(self.device, non_blocking=True)
            for name, mask in {**held, **masks}.items()
        }
        features = self._select(self._features, rows, len(self))
        truth = _repeated(self._truth, rows, m)
        with torch.no_grad():
            answer = self._model.decide_many(features, found)
        return self._scored(answer, truth).unflatten(0, (m, -1))

    def maps(self, answer: Answer) -> dict[str, AttentionMap]:
        """The maps behind an answer, by span name, reduced."""
        return {name: _alone(self._reduce(answer.looking_at(name)), name) for name in self.names}

    def holding(self, masks: Mapping[str, Float[Tensor, "b _"]]) -> "Look":
        """The same batch with these masks in place from now on: `base` and all are of what is left.

        What can be removed is still what the whole input had.
        """
        other = object.__new__(Look)
        other.__dict__.update(self.__dict__)
        other._held = {**self._held, **masks}
        other._rows = None
        other.base = other(torch.arange(len(self)), {}).score
        return other

    def _asked_about(
        self, rows: Int[Tensor, " n"], masks: Mapping[str, Float[Tensor, "n _"]]
    ) -> tuple[Float[Tensor, " n"], Answer]:
        if self._rows is None or not torch.equal(rows, self._rows):
            self._take(rows)
        features, truth = self._asked
        held = {name: mask[rows] for name, mask in self._held.items() if name not in masks}
        found = {name: mask.to(self.device) for name, mask in {**held, **masks}.items()}
        with torch.no_grad():
            answer = self._model.decide(features, found or None)
        return self._scored(answer, truth), answer

    def _scored(self, answer: Answer, truth: Batch) -> Float[Tensor, " n"]:
        with torch.no_grad():
            score = self._score(answer.prediction, truth)
        if score.shape != (len(truth),):
            raise ValueError(
                f"a score of shape {tuple(score.shape)} for {len(truth)} masked samples; one "
                "number a sample is needed"
            )
        return score.detach().to(self.device)

    def _take(self, rows: Tensor) -> None:
        features, truth = self._features, self._truth
        if not torch.equal(rows, torch.arange(len(self))):
            features = self._select(features, rows, len(self))
            truth = truth.select(rows)
        self._rows, self._asked = rows.clone(), (features, truth)


@contextmanager
def asking(
    model: Asking,
    batch: Batch,
    names: Sequence[str],
    score: Score = of_truth,
    reduce: Reduce = mean,
    select: Select = rows_of,
) -> Iterator[Look]:
    """Encode a batch once, to be asked about spans `names` again and again inside the block.

    The model is in evaluation mode and makes no graph there; afterwards every module is as it was
    found, and so are the streams of random numbers.

        with asking(model, batch, ["image"]) as look:
            found = search(look, Grids(500))
    """
    with resting(model), torch.no_grad():
        yield Look(model, model.encode(batch), batch, names, score, reduce, select)


def _repeated(truth: Batch, rows: Int[Tensor, " n"], times: int) -> Batch:
    """What is right for the samples in `rows`, so many times over, without waiting for a card."""
    chosen = rows.tolist()

    def tensor(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        found = values[rows.to(values.device, non_blocking=True)]
        return found.repeat(times, *[1] * (found.ndim - 1))

    return Batch(
        tuple(truth.ids[row] for row in chosen) * times,
        labels=tensor(truth.labels),
        answers=tensor(truth.answers),
        groups=None if truth.groups is None else tuple(truth.groups[r] for r in chosen) * times,
    )


def _alone(attention: AttentionMap, name: str) -> AttentionMap:
    names = [span.name for span in attention.keys.spans]
    if names != [name]:
        raise ValueError(
            f"the map over {name!r} has the keys {names}; give a reduce= that takes the block to "
            f"{name!r} alone, with AttentionMap.between"
        )
    return attention
