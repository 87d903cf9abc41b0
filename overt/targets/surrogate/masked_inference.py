"""Inference on the same samples with many different masks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from overt.attention import AttentionMap, Layout
from overt.capture.eval_mode import eval_mode_forked_rng
from overt.data.batch import Batch
from overt.data.collated_dataset import batch_ids
from overt.errors import UserError
from overt.geometry import PixelGeometry, RegionGeometry, TextGeometry
from overt.targets.surrogate.removable import RemovablePositions


@runtime_checkable
class MaskableOutput(Protocol):
    """The output of a maskable model: a prediction and attention maps."""

    @property
    def prediction(self) -> Float[Tensor, "b c"]: ...
    def attention_to(self, name: str) -> AttentionMap: ...


@runtime_checkable
class MaskableModel(Protocol):
    """A model with separate `encode` and `decide`: features are computed once for all masks.

    Everything that does not depend on masks belongs in `encode`, also a linear map of the cells:
    one factor per cell can be applied after it as well as before.
    """

    def encode(self, batch: Any) -> Any: ...
    def decide(self, features: Any, mask: Mapping[str, Tensor] | None = None) -> MaskableOutput: ...


@runtime_checkable
class MultiMaskModel(MaskableModel, Protocol):
    """A model that evaluates many masks of the same samples at once, without copies of features.

    `decide_many` gets the features of b samples and m masks of each, and returns m b outputs, one
    mask
    after the other: those of `decide` if all samples are repeated m times. A search then runs few
    samples with all of their masks at a time, so that features stay in the cache.
    """

    def decide_many(
        self, features: Any, mask: Mapping[str, Float[Tensor, "m b _"]]
    ) -> MaskableOutput: ...


Score = Callable[[Float[Tensor, "n c"], Batch], Float[Tensor, " n"]]
Reduce = Callable[[AttentionMap], AttentionMap]
Select = Callable[[Any, Int[Tensor, " n"], int], Any]


# --- scores


def label_log_probability(prediction: Float[Tensor, "n c"], batch: Batch) -> Float[Tensor, " n"]:
    """Return the log-probability of the right class, in float32 at least.

    The paper compares probabilities. Their logarithms have the same order, and stay different where
    probabilities round to zero.

    Args:
        prediction: The logits.
        batch: The samples.

    Returns:
        One score per sample.

    Raises:
        ValueError: The samples have no labels.

    Example:
        >>> from overt.testing import toy_batch
        >>> label_log_probability(torch.zeros(2, 4), toy_batch(2)).exp()
        tensor([0.2500, 0.2500])
    """
    if batch.labels is None:
        raise ValueError("surrogates need labels; these samples have none")
    logs = prediction.to(torch.promote_types(prediction.dtype, torch.float32)).log_softmax(dim=-1)
    return logs.gather(1, batch.labels[:, None])[:, 0]


def answers_log_probability(prediction: Float[Tensor, "n c"], batch: Batch) -> Float[Tensor, " n"]:
    """Return the mean log-probability of several right answers, weighted by their soft scores.

    The scores of a sample are divided by their sum. A sample without a known answer scores 0 for
    every mask, and keeps its whole input.

    Args:
        prediction: The logits.
        batch: The samples.

    Returns:
        One score per sample.

    Raises:
        ValueError: The samples have no answers.

    Example:
        >>> batch = Batch(("a",), answers=torch.tensor([[1.0, 1.0, 0.0, 0.0]]))
        >>> answers_log_probability(torch.zeros(1, 4), batch).exp()
        tensor([0.2500])
    """
    if batch.answers is None:
        raise ValueError("these samples have no soft answers")
    precise = torch.promote_types(prediction.dtype, torch.float32)
    weights = batch.answers.to(precise)
    weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(precise).tiny)
    logs = prediction.to(precise).log_softmax(dim=-1)
    return torch.where(weights > 0, weights * logs, 0).sum(dim=-1)


def truth_log_probability(prediction: Float[Tensor, "n c"], batch: Batch) -> Float[Tensor, " n"]:
    """Return the log-probability of the soft answers if there are any, else of the label.

    Args:
        prediction: The logits.
        batch: The samples.

    Returns:
        One score per sample.

    Raises:
        ValueError: The samples have no labels or answers.

    Example:
        >>> from overt.testing import toy_batch
        >>> truth_log_probability(torch.zeros(2, 4), toy_batch(2)).exp()
        tensor([0.2500, 0.2500])
    """
    return (label_log_probability if batch.answers is None else answers_log_probability)(
        prediction, batch
    )


# --- reduction of layers and heads


def mean_map(attention: AttentionMap) -> AttentionMap:
    """Return the mean over layers and heads (hops or glimpses): of distributions, a distribution.

    Args:
        attention: The attention of the model.

    Returns:
        A map with one layer and one head.

    Example:
        >>> weights = torch.full((1, 3, 4, 1, 5), 0.2)
        >>> attention = AttentionMap.from_weights(weights, axes="b l h q k")
        >>> mean_map(attention).weights.shape
        torch.Size([1, 1, 1, 1, 5])
    """
    return attention.over_heads().over_layers()


def last_layer_map(attention: AttentionMap) -> AttentionMap:
    """Return the last layer with its heads averaged: the last hop of stacked attention.

    Args:
        attention: The attention of the model.

    Returns:
        A map with one layer and one head.

    Example:
        >>> weights = torch.full((1, 3, 4, 1, 5), 0.2)
        >>> attention = AttentionMap.from_weights(weights, axes="b l h q k")
        >>> last_layer_map(attention).weights.shape
        torch.Size([1, 1, 1, 1, 5])
    """
    return attention.layer(-1).over_heads()


def all_maps(attention: AttentionMap) -> AttentionMap:
    """Return all layers and heads unchanged.

    Args:
        attention: The attention of the model.

    Returns:
        The same map.

    Example:
        >>> weights = torch.full((1, 3, 4, 1, 5), 0.2)
        >>> attention = AttentionMap.from_weights(weights, axes="b l h q k")
        >>> all_maps(attention) is attention
        True
    """
    return attention


# --- selection of samples


def select_samples(features: Any, rows: Int[Tensor, " n"], count: int) -> Any:
    """Select samples of nested features.

    Supports tensors, maps, layouts, geometries and batches in dataclasses, mappings and sequences
    of any depth.

    Args:
        features: The features of `count` samples.
        rows: The indices of the samples, in the order of the result.
        count: The number of samples.

    Returns:
        The features of these samples.

    Raises:
        ValueError: A tensor has another first size, or a type is unknown.
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
                    f"features have a tensor of shape {tuple(features.shape)}, expected {count} "
                    "samples on its first axis; use select= to define how samples are selected"
                )
            return features[rows.to(features.device, non_blocking=True)]
        case None | bool() | int() | float() | str() | bytes() | slice() | torch.Size():
            return features
        case Mapping():
            return {name: select_samples(one, rows, count) for name, one in features.items()}
        case list() | tuple():
            found = [select_samples(one, rows, count) for one in features]
            named = hasattr(features, "_fields")
            return type(features)(*found) if named else type(features)(found)
    if is_dataclass(features) and not isinstance(features, type):
        each = {
            one.name: select_samples(getattr(features, one.name), rows, count)
            for one in fields(features)
        }
        return replace(features, **each)
    raise ValueError(
        f"features have a {type(features).__name__}, which is not supported; use select= to define "
        "how samples are selected"
    )


# --- masked batches


@dataclass(frozen=True, eq=False)
class MaskedOutput:
    """The output for some samples with some masks, and the score of the truth.

    Args:
        score: The score of each sample.
        answer: The output of the model.
    """

    score: Float[Tensor, " n"]
    answer: MaskableOutput


def truth_of(batch: Batch | Mapping[str, Any]) -> Batch:
    """Return the ids, labels and answers of a batch.

    Args:
        batch: A `Batch`, or a mapping with "labels" (one class index per sample) or "answers" (one
            score per sample and class), and perhaps "ids"; without, samples are named by row.

    Returns:
        A batch without inputs.

    Raises:
        UserError: A mapping has neither labels nor answers.
    """
    if isinstance(batch, Batch):
        return Batch(batch.ids, labels=batch.labels, answers=batch.answers, groups=batch.groups)
    if not isinstance(batch, Mapping):
        raise UserError(
            f'expected batches such as {{"text": ..., "labels": ...}}, got a '
            f"{type(batch).__name__}: let the dataset return a dictionary per sample"
        )
    labels, answers = batch.get("labels"), batch.get("answers")
    known = answers if labels is None else labels
    if not isinstance(known, Tensor):
        raise UserError(
            f'a batch needs "labels" or "answers", a tensor, it has {", ".join(map(str, batch))}'
        )
    return Batch(batch_ids(batch, range(len(known))), labels=labels, answers=answers)


class MaskedBatch:
    """A batch that is encoded once and evaluated with any masks; create it with `masked_batch`.

    Scores are on the CPU; masks are best created on `device`. Features are selected once for
    repeated calls with the same rows.

    Args:
        model: The model.
        features: The encoded features of the batch.
        batch: The samples, as a `Batch` or a mapping with "labels" or "answers".
        names: The spans that masks remove from.
        score: How likely the truth is.
        reduce: Which map is the result if there are several layers or heads.
        select: Selects samples of the features.

    Attributes:
        base: The score of every sample without a mask.
        positions: The removable positions of each span.
        key_masks: The visible keys of the maps of each span.
        supports_many_masks: Whether the model evaluates many masks of a sample without copies of
            its features.

    Raises:
        ValueError: The score of a sample is not finite.

    Example:
        >>> from overt.testing import PlantedCell, toy_batch
        >>> with masked_batch(PlantedCell((2, 2), cell=0), toy_batch(2), ["image"]) as masked:
        ...     len(masked), masked.base.shape
        (2, torch.Size([2]))
    """

    def __init__(
        self,
        model: MaskableModel,
        features: Any,
        batch: Batch | Mapping[str, Any],
        names: Sequence[str],
        score: Score = truth_log_probability,
        reduce: Reduce = mean_map,
        select: Select = select_samples,
    ) -> None:
        self._truth = truth_of(batch)
        self.ids, self.names = self._truth.ids, tuple(names)
        self._model, self._features, self._select = model, features, select
        self._score, self._reduce = score, reduce
        known = [one for one in (self._truth.labels, self._truth.answers) if one is not None]
        self.device = known[0].device if known else torch.device("cpu")
        self._masks: dict[str, Tensor] = {}
        self.supports_many_masks = isinstance(model, MultiMaskModel)
        self._rows: Tensor | None = None
        self._selected: tuple[Any, Batch]
        everyone = torch.arange(len(self.ids))
        whole = self(everyone, {})
        wrong = ~whole.score.isfinite()
        if wrong.any():
            name = self.ids[int(wrong.nonzero()[0])]
            raise ValueError(f"the score of sample {name!r} is NaN or infinite")
        self.base = whole.score
        self.positions = {
            n: RemovablePositions.of_span(self._attention_to(whole.answer, n), n)
            for n in self.names
        }
        self.key_masks = {n: one.mask for n, one in self.maps(whole.answer).items()}

    @staticmethod
    def _attention_to(answer: MaskableOutput, name: str) -> AttentionMap:
        try:
            return answer.attention_to(name)
        except ValueError as problem:
            raise ValueError(
                f"the masks are for {name!r}: {problem}. Pass masks=GridMasks() for cells, "
                "RemoveWords() for words, and name= for another span"
            ) from problem

    def __len__(self) -> int:
        return len(self.ids)

    def __call__(
        self, rows: Int[Tensor, " n"], masks: Mapping[str, Float[Tensor, "n _"]]
    ) -> MaskedOutput:
        """Evaluate the samples in `rows`, each with its own mask (1 keeps)."""
        score, answer = self._evaluate(rows, masks)
        return MaskedOutput(score.cpu(), answer)

    def score_masks(
        self, rows: Int[Tensor, " n"], masks: Mapping[str, Float[Tensor, "m n _"]]
    ) -> Float[Tensor, "m n"]:
        """Return the scores of m masks of each sample, on `device`, without synchronizing."""
        m = len(next(iter(masks.values())))
        if not isinstance(self._model, MultiMaskModel):
            flat = {name: mask.flatten(0, 1) for name, mask in masks.items()}
            return self._evaluate(rows.repeat(m), flat)[0].unflatten(0, (m, -1))
        fixed = {
            name: mask[rows].expand(m, -1, -1)
            for name, mask in self._masks.items()
            if name not in masks
        }
        found = {
            name: mask.to(self.device, non_blocking=True)
            for name, mask in {**fixed, **masks}.items()
        }
        features = self._select(self._features, rows, len(self))
        truth = _repeat_labels(self._truth, rows, m)
        with torch.no_grad():
            answer = self._model.decide_many(features, found)
        return self._scored(answer, truth).unflatten(0, (m, -1))

    def maps(self, answer: MaskableOutput) -> dict[str, AttentionMap]:
        """Return the reduced maps of an output, by span name."""
        return {
            name: _check_single_span(self._reduce(answer.attention_to(name)), name)
            for name in self.names
        }

    def with_masks(self, masks: Mapping[str, Float[Tensor, "b _"]]) -> "MaskedBatch":
        """Return the same batch with these masks applied from now on, also in `base`.

        The removable positions are still those of the whole input.
        """
        other = object.__new__(MaskedBatch)
        other.__dict__.update(self.__dict__)
        other._masks = {**self._masks, **masks}
        other._rows = None
        other.base = other(torch.arange(len(self)), {}).score
        return other

    def _evaluate(
        self, rows: Int[Tensor, " n"], masks: Mapping[str, Float[Tensor, "n _"]]
    ) -> tuple[Float[Tensor, " n"], MaskableOutput]:
        if self._rows is None or not torch.equal(rows, self._rows):
            self._take(rows)
        features, truth = self._selected
        fixed = {name: mask[rows] for name, mask in self._masks.items() if name not in masks}
        found = {name: mask.to(self.device) for name, mask in {**fixed, **masks}.items()}
        with torch.no_grad():
            answer = self._model.decide(features, found or None)
        return self._scored(answer, truth), answer

    def _scored(self, answer: MaskableOutput, truth: Batch) -> Float[Tensor, " n"]:
        with torch.no_grad():
            score = self._score(answer.prediction, truth)
        if score.shape != (len(truth),):
            raise ValueError(
                f"score must have the shape ({len(truth)},), one number per sample, got "
                f"{tuple(score.shape)}"
            )
        return score.detach().to(self.device)

    def _take(self, rows: Tensor) -> None:
        features, truth = self._features, self._truth
        if not torch.equal(rows, torch.arange(len(self))):
            features = self._select(features, rows, len(self))
            truth = truth.select(rows)
        self._rows, self._selected = rows.clone(), (features, truth)


@contextmanager
def masked_batch(
    model: MaskableModel,
    batch: Batch | Mapping[str, Any],
    names: Sequence[str],
    score: Score = truth_log_probability,
    reduce: Reduce = mean_map,
    select: Select = select_samples,
) -> Iterator[MaskedBatch]:
    """Encode a batch once, and evaluate it with any masks inside the block.

    The model is in evaluation mode without gradients there; afterwards the mode of every module and
    the random state are restored.

        with masked_batch(model, batch, ["image"]) as masked:
            result = exhaustive_search(masked, GridMasks(500))

    Args:
        model: The model.
        batch: The samples, as a `Batch` or a mapping with "labels" or "answers".
        names: The spans that masks remove from.
        score: How likely the truth is.
        reduce: Which map is the result if there are several layers or heads.
        select: Selects samples of the features.

    Yields:
        The encoded batch.

    Example:
        >>> from overt.testing import PlantedCell, toy_batch
        >>> with masked_batch(PlantedCell((2, 2), cell=0), toy_batch(2), ["image"]) as masked:
        ...     masked.positions["image"].present.shape
        torch.Size([2, 4])
    """
    with eval_mode_forked_rng(model), torch.no_grad():
        yield MaskedBatch(model, model.encode(batch), batch, names, score, reduce, select)


def _repeat_labels(truth: Batch, rows: Int[Tensor, " n"], times: int) -> Batch:
    """Repeat the labels of the samples in `rows`, without synchronizing the GPU."""
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


def _check_single_span(attention: AttentionMap, name: str) -> AttentionMap:
    names = [span.name for span in attention.keys.spans]
    if names != [name]:
        raise ValueError(
            f"the map over {name!r} has the keys {names}; use a reduce= that selects the block to "
            f"{name!r} with AttentionMap.between"
        )
    return attention
