"""Context of a scorecard's metrics: maps, truth and removals of one batch, computed on demand.

A metric requests a map by its name, the truth to compare it with, and the model's answers with
parts removed. What several metrics need is computed once. Random numbers are per sample: see
`overt.metrics.rng`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import GLOBAL_QUERY, AttentionMap, Form, Kind
from overt.data.batch import Batch
from overt.data.human_attention import GroundTruth, pool_people
from overt.metrics import controls
from overt.metrics.deletion_curves import PerturbationCurve, deletion_curve, insertion_curve
from overt.metrics.faithfulness import Decide
from overt.metrics.human_ceiling import leave_one_person_out
from overt.metrics.key_effects import gradient_times_input, leave_one_out
from overt.metrics.metric import MetricUnavailableError, single_row
from overt.metrics.removal import (
    blur_fill,
    feature_removal,
    linear_imputation,
    mean_fill,
    pixel_removal,
)
from overt.metrics.resample import resample_to_grid
from overt.metrics.rng import PerSampleGenerator, derive_seed, sample_uniform
from overt.metrics.scorecard import feature_maps

ATTENTION, GRADIENT, ACTIVATION = "attention", "gradient", "class activation"
SHUFFLED, RANDOM, CENTRE, PRIOR, UNIFORM = "shuffled", "random", "centre", "prior", "uniform"
OTHER = "other sample"  # the map of another sample; SHUFFLED permutes the sample's own map
PERSON = "one person"
CONTROLS = (  # maps that do not depend on the sample's content
    *(OTHER, SHUFFLED, RANDOM),
    *(CENTRE, PRIOR, UNIFORM),
)

MASK = "mask"
REMOVALS = (MASK, "mean", "blur", "imputed")

MapFunction = Callable[[Batch], AttentionMap]


@runtime_checkable
class ScoredOutput(Protocol):
    """Protocol of a model's output: logits of the classes, and maps."""

    @property
    def prediction(self) -> Tensor: ...
    @property
    def attention(self) -> tuple[AttentionMap, ...]: ...


@runtime_checkable
class ScoredModel(Protocol):
    """Protocol of a model that can be run again with parts of its features masked."""

    def encode(self, batch: Any) -> Any: ...
    def decide(self, features: Any, mask: Any = None) -> Any: ...


class MetricContext:
    """Maps, controls, truth and ways to remove keys, for one batch of samples.

    Args:
        model: The model; None if there are only maps.
        batch: The samples.
        truth: Where attention should be, if known.
        looks: Further maps by name, as functions of a batch.
        over: Name of the evaluated span; by default that of the truth, or else of the first map.
        seed: Seed of all random numbers.
        other: Returns the map of another sample for each, given the name of the span.
    """

    def __init__(
        self,
        model: Callable[[Batch], Any] | None,
        batch: Batch,
        truth: GroundTruth | None = None,
        looks: Mapping[str, MapFunction] | None = None,
        over: str | None = None,
        seed: int = 0,
        other: Callable[[str], AttentionMap] | None = None,
    ) -> None:
        self.model, self.batch, self.looks, self.seed = model, batch, dict(looks or {}), seed
        self.other = other
        self.requested, self._truth = over, truth
        self._maps: dict[str, AttentionMap] = {}
        self._given: dict[str, AttentionMap] = {}
        self._curves: dict[tuple[str, ...], PerturbationCurve] = {}
        self._logits: dict[tuple[str, str], Tensor] = {}

    def __len__(self) -> int:
        return len(self.batch)

    def generator(self, *words: str) -> PerSampleGenerator:
        """Make a generator with one stream per sample, from its id and these words."""
        return PerSampleGenerator([derive_seed(self.seed, *words, name) for name in self.batch.ids])

    # --- the model

    @cached_property
    def features(self) -> Any:
        """The features of the batch, for a model with `encode` and `decide`."""
        if not isinstance(self.model, ScoredModel):
            raise MetricUnavailableError("the model has no encode and decide, which masking needs")
        with torch.no_grad():
            return self.model.encode(self.batch)

    @cached_property
    def output(self) -> ScoredOutput:
        """The output of the model."""
        if self.model is None:
            raise MetricUnavailableError("there are only maps and no model")
        with torch.no_grad():
            if isinstance(self.model, ScoredModel):
                found = self.model.decide(self.features)
            else:
                found = self._call_model(self.model)
        if not isinstance(found, ScoredOutput):
            raise ValueError(
                f"a model gives an output with a prediction and maps, and this one gave a "
                f"{type(found).__name__}; overt.wrap makes one of any PyTorch model"
            )
        return found

    def _call_model(self, model: Callable[[Batch], Any]) -> Any:
        """Call the model with the batch; raise with advice if it expects tensors."""
        try:
            return model(self.batch)
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"{type(model).__name__} cannot be called with a batch; "
                "overt.wrap(model) makes one of any PyTorch model that can"
            ) from error

    @cached_property
    def unshared(self) -> Batch:
        """The batch with a separate image for every sample."""
        return self.batch.with_own_images()

    def classify(self, images: Tensor) -> Float[Tensor, "b c"]:
        """Return the logits for other images of the same samples; integer images stay integers."""
        if self.model is None:
            raise MetricUnavailableError("there are only maps and no model")
        kind = self.pictures.dtype
        if not kind.is_floating_point:
            images = images.round().clamp(0, 255)
        found: Tensor = self.model(replace(self.unshared, images=images.to(kind))).prediction
        return found

    @property
    def pictures(self) -> Tensor:
        """The images of the samples, one each."""
        if self.unshared.images is None:
            raise MetricUnavailableError("the samples have no images")
        return self.unshared.images

    # --- maps

    @cached_property
    def over(self) -> str:
        """Name of the evaluated span."""
        if self.requested is not None:
            return self.requested
        if self._truth is not None:
            return self._truth.target.keys.spans[0].name
        return self.like.keys.spans[0].name

    def names(self) -> tuple[str, ...]:
        """List the available maps: those of the model first, then controls, then people."""
        found = [ATTENTION, *self.looks, ACTIVATION, GRADIENT, *CONTROLS, PERSON]
        there = []
        for name in found:
            try:
                self.map(name)
            except MetricUnavailableError:
                continue
            there.append(name)
        return tuple(there)

    def map(self, name: str) -> AttentionMap:
        """Return the map of this name, one row per sample, over the keys of the model's map.

        A signed map is clipped at zero.

        Raises:
            MetricUnavailableError: The map cannot be computed here.
        """
        if name not in self._maps:
            self._maps[name] = self._make_map(name)
        return self._maps[name]

    @cached_property
    def like(self) -> AttentionMap:
        """The map whose keys all others get: the model's, the first given, or class activation."""
        for name in (ATTENTION, *self.looks, ACTIVATION):
            try:
                return self.map(name)
            except MetricUnavailableError:
                continue
        raise MetricUnavailableError(
            "no map of these samples is available: the model has none, and none was given"
        )

    @cached_property
    def key_counts(self) -> Float[Tensor, " b"]:
        """Number of keys per sample: all cells of a picture, or the visible words.

        NaN where the map has no visible key, as it is not defined.
        """
        weights, seen = single_row(self.like)
        if len(self.like.keys.spans[0].shape) > 1:
            return torch.full((len(self),), float(weights.shape[-1]))
        counts = seen.sum(dim=-1).float()
        return torch.where(counts > 0, counts, torch.nan)

    def _make_map(self, name: str) -> AttentionMap:
        match name:
            case "attention":
                return self._attention_map()
            case "class activation":
                return self._activation()
            case "gradient":
                return self._gradient()
            case "other sample":
                return self._other_sample_map()
            case "shuffled":
                return controls.shuffled_map(self.like, self.generator(SHUFFLED))
            case "random":
                return controls.random_map(self.like, self.generator(RANDOM))
            case "centre":
                return controls.center_map(self.like)
            case "uniform":
                return controls.uniform_map(self.like)
            case "prior":
                return self._on_model_keys(self._from_truth("prior"))
            case "one person":
                return self._on_model_keys(self._person[0])
        if name not in self.looks:
            raise ValueError(f"unknown map {name!r}: use one of {', '.join(self.names())}")
        return self._external_map(name)

    def _other_sample_map(self) -> AttentionMap:
        """Put the map of another sample on the keys of each."""
        like = self.like
        if self.other is None:
            raise MetricUnavailableError("there is no other sample to take a map from")
        found = self.other(self.over)
        if _is_grid(found) and _is_grid(like):
            found = align_keys(found, like)
        return controls.transfer_to_keys(found, like)

    @cached_property
    def heads(self) -> AttentionMap:
        """The model's last map over the span, with all layers and heads."""
        maps = self.output.attention
        if not maps:
            raise MetricUnavailableError("the model has no attention")
        wanted = self.requested or (
            None if self._truth is None else self._truth.target.keys.spans[0].name
        )
        for one in reversed(maps):
            if wanted is None or [span.name for span in one.keys.spans] == [wanted]:
                return one
        names = [span.name for one in maps for span in one.keys.spans]
        raise MetricUnavailableError(f"the model attends to {', '.join(names)}, not to {wanted!r}")

    def describe(self, name: str) -> str:
        """Describe the map of this name, and the cells on which fixations are counted, if any.

        Fixation metrics depend on those cells: their scores are comparable on one grid only.
        """
        said = self._described(name)
        if self._truth is None or self._truth.fixations is None:
            return said
        cells = "x".join(str(side) for side in self._truth.fixations.keys.spans[0].shape)
        return f"{said}; fixations are counted on {cells} cells"

    def _described(self, name: str) -> str:
        """Describe a map: which one of the model's, over which keys, averaged over what."""
        span = self.map(name).keys.spans[0]
        where = span.name
        if len(span.shape) > 1:  # texts differ in length, grids do not
            where += f" {'x'.join(str(side) for side in span.shape)}"
        if name == ACTIVATION:
            return f"class activation of layer {self._layer_name()!r}, over {where}"
        if name != ATTENTION:
            return f"{name}, over {where}"
        maps = self.output.attention
        at = next(at for at in reversed(range(len(maps))) if maps[at] is self.heads)
        _, l, h, _, _ = self.heads.values.shape
        which = "the model's only map" if len(maps) == 1 else f"map {at + 1} of {len(maps)}"
        counts = [f"{n} {what}s" for n, what in ((l, "layer"), (h, "head")) if n > 1]
        fused = f", mean of {' and '.join(counts)}" if counts else ""
        return f"attention: {which}, over {where}{fused}"

    def _layer_name(self) -> str:
        assert isinstance(self.model, nn.Module)
        found = self._layer
        return next((name for name, one in self.model.named_modules() if one is found), "")

    def _attention_map(self) -> AttentionMap:
        """Return the model's last map over the span, averaged over heads and layers."""
        fused = self.heads
        fused = fused.over_heads() if fused.values.shape[2] > 1 else fused
        fused = fused.over_layers() if fused.values.shape[1] > 1 else fused
        return positive_part(check_one_row(fused))

    def _external_map(self, name: str) -> AttentionMap:
        found = self._given_map(name)
        first = next(iter(self.looks))
        try:
            like = self.map(ATTENTION)
        except MetricUnavailableError:
            if name == first:
                return found
            like = self.map(first)
        return align_keys(found, like)

    def _given_map(self, name: str) -> AttentionMap:
        """Return a further map on its own keys."""
        if name not in self._given:
            self._given[name] = self._check_given(name, self.looks[name](self.batch))
        return self._given[name]

    def _check_given(self, name: str, found: AttentionMap) -> AttentionMap:
        if len(found) != len(self):
            raise ValueError(
                f"maps {name!r} must have one row per sample, got {len(found)} for {len(self)}"
            )
        named = [span.name for span in found.keys.spans]
        if self.requested is not None and named != [self.requested]:
            raise MetricUnavailableError(
                f"the maps {name!r} are over {', '.join(named)}, not {self.requested!r}"
            )
        return positive_part(check_one_row(found.detach().to(self.device)))

    @cached_property
    def device(self) -> torch.device:
        """Device of the samples."""
        for one in (self.batch.images, self.batch.tokens, self.batch.features):
            if one is not None:
                return one.device
        return torch.device("cpu")

    @cached_property
    def _layer(self) -> nn.Module:
        """The model's last layer with a feature map."""
        if not isinstance(self.model, nn.Module) or self.unshared.images is None:
            raise MetricUnavailableError("class activation needs a network with image input")
        height, width = self.pictures.shape[-2:]
        found = feature_maps.last_feature_layer(
            self.model, lambda: self.classify(self.pictures), (height, width)
        )
        if found is None:
            raise MetricUnavailableError("no layer of the model has a feature map")
        return found

    def _activation(self) -> AttentionMap:
        if self.requested not in (None, "image"):
            raise MetricUnavailableError(
                f"class activation is over the image, not over {self.requested!r}"
            )
        layer, geometry = self._layer, self.unshared.geometry
        assert isinstance(self.model, nn.Module)
        try:
            pictures = self.pictures.float()
            found = feature_maps.activation_map(
                self.model, layer, self.classify, pictures, geometry
            )
        except (ValueError, RuntimeError) as problem:
            raise MetricUnavailableError(f"class activation failed: {problem}") from problem
        found = found.detach()
        try:
            like = self.map(ATTENTION)
        except MetricUnavailableError:
            return found
        if not _is_grid(like):
            raise MetricUnavailableError(
                "class activation is over cells, and the evaluated map is not"
            )
        return align_keys(found, like)

    def _gradient(self) -> AttentionMap:
        try:
            return self.key_gradients
        except MetricUnavailableError:
            like = self.map(ACTIVATION)
        assert isinstance(self.model, nn.Module)
        try:
            found = feature_maps.gradient_map(
                self.model, self._layer, lambda: self.classify(self.pictures), like
            )
        except RuntimeError as problem:
            raise MetricUnavailableError(f"the answer has no gradient: {problem}") from problem
        if found.shape[1] != len(like.keys):
            raise MetricUnavailableError("gradients and map have different cells")
        return AttentionMap.from_cells(found, like.keys)

    @cached_property
    def key_gradients(self) -> AttentionMap:
        """Gradient times input of each key, by the mask of the keys."""
        try:
            return gradient_times_input(self.decide(MASK), self.map(ATTENTION)).to(self.device)
        except (ValueError, RuntimeError, NotImplementedError) as problem:
            raise MetricUnavailableError(
                f"the answer has no gradient by a mask: {problem}"
            ) from problem

    @cached_property
    def effects(self) -> Mapping[str, AttentionMap]:
        """Leave-one-out effect of each key, by kind of removal."""
        return _LazyMaps(lambda removal: leave_one_out(self.decide(removal), self.like))

    # --- the truth

    def on_truth(self, name: str) -> AttentionMap:
        """Return the map of this name on the keys of the truth, where all models are comparable.

        A map that was given is resampled once, from its own keys: on the way through the keys of
        the model, a map on the keys of the truth would be blurred.
        """
        if name == PERSON:
            return self._person[0]
        if name == PRIOR:
            return self._from_truth("prior")
        found = self._given_map(name) if name in self.looks else self.map(name)
        return align_keys(found, self.truth(name).target)

    def truth(self, name: str) -> GroundTruth:
        """Return what the map of this name is compared with: all people, or all but one person."""
        if name == PERSON:
            return self._person[1]
        if self._truth is None:
            raise MetricUnavailableError("the dataset has no target for attention")
        return self._truth

    def _from_truth(self, part: str) -> AttentionMap:
        found = None if self._truth is None else getattr(self._truth, part)
        if found is None:
            raise MetricUnavailableError(f"the dataset has no {part}")
        assert isinstance(found, AttentionMap)
        return found

    def _on_model_keys(self, found: AttentionMap) -> AttentionMap:
        return align_keys(found, self.like)

    @cached_property
    def _person(self) -> tuple[AttentionMap, GroundTruth]:
        """One random person of each sample, and the truth without that person."""
        people = self._from_truth("people")
        assert self._truth is not None
        there = (people.weights.abs().sum(dim=-1)[:, 0, 0] > 0) & people.rows
        drawn = sample_uniform((len(people), there.shape[1]), self.generator(PERSON)).to(
            there.device
        )
        chosen = drawn.masked_fill(~there, -1).argmax(dim=-1)
        one, rest = (
            _select_query(people, chosen),
            _select_query(leave_one_person_out(people), chosen),
        )
        truth = GroundTruth(target=rest, others=self._truth.others, prior=self._truth.prior)
        if self._truth.fixations is not None:
            counts = self._truth.fixations
            every, own = pool_people(counts), _select_query(counts, chosen)
            left = (every.weights - own.weights * own.visible[:, None, None]).clamp_min(0)
            several = there.sum(dim=1) > 1
            left = left * several[:, None, None, None, None]
            truth = replace(truth, fixations=replace(every, values=left))
        return one, truth

    # --- removal of keys

    def decide(self, removal: str) -> Decide:
        """Return a function that computes the logits given a mask of kept keys.

        Args:
            removal: How keys are removed: one of `REMOVALS`.
        """
        if self.model is None:
            raise MetricUnavailableError("there are only maps and no model")
        if removal == MASK:
            return self._cached(removal, self._mask_keys())
        fill = {"mean": mean_fill, "blur": blur_fill}.get(removal)
        if fill is None:
            if removal != "imputed":
                raise ValueError(f"unknown removal {removal!r}: use one of {', '.join(REMOVALS)}")
            fill = partial(linear_imputation, generator=self.generator("imputed"))
        return self._cached(removal, self._fill_keys(fill))

    def _mask_keys(self) -> Decide:
        model, features, name = self.model, self.features, self.over
        assert isinstance(model, ScoredModel)

        def decide(keep: Float[Tensor, "b k"]) -> Float[Tensor, "b c"]:
            found: Tensor = model.decide(features, {name: keep}).prediction
            return found

        return decide

    def _fill_keys(self, fill: Any) -> Decide:
        shape = self.like.keys.spans[0].shape
        if len(shape) == 2 and self.batch.images is not None:
            return pixel_removal(self.classify, self.pictures.float(), (shape[0], shape[1]), fill)
        if self.batch.tokens is not None and self.over == "text":
            words = input_embedding(self.model)
            if words is not None:
                return self._fill_words(words, shape, fill)
        features = self.features
        values = getattr(features, "values", None)
        if not is_dataclass(features) or not isinstance(values, Tensor) or values.ndim != 3:
            raise MetricUnavailableError("the model does not expose features that could be filled")
        if values.shape[1] != len(self.like.keys):
            raise MetricUnavailableError(
                f"the model has {values.shape[1]} features, its map has {len(self.like.keys)} keys"
            )
        model = self.model
        assert isinstance(model, ScoredModel)

        def classify(changed: Float[Tensor, "b k d"]) -> Float[Tensor, "b c"]:
            found: Tensor = model.decide(replace(features, values=changed)).prediction
            return found

        return feature_removal(classify, values, shape, fill, getattr(features, "present", None))

    def _fill_words(self, words: nn.Module, shape: tuple[int, ...], fill: Any) -> Decide:
        """Fill removed words in the embeddings, before the model reads them."""
        tokens, present = self.batch.tokens, self.batch.token_mask
        assert tokens is not None and self.model is not None
        model = self.model
        with torch.no_grad():
            values = words(tokens)

        def classify(changed: Float[Tensor, "b k d"]) -> Float[Tensor, "b c"]:
            handle = words.register_forward_hook(lambda module, given, output: changed)
            try:
                found: Tensor = model(self.batch).prediction
            finally:
                handle.remove()
            return found

        return feature_removal(classify, values, shape, fill, present)

    def _cached(self, removal: str, decide: Decide) -> Decide:
        """Cache the logits with nothing and with everything removed."""

        def ask(keep: Float[Tensor, "b k"]) -> Float[Tensor, "b c"]:
            if keep.requires_grad or torch.is_grad_enabled():
                return decide(keep)
            which = "whole" if bool((keep == 1).all()) else "" if bool((keep != 0).any()) else "no"
            if not which:
                return decide(keep)
            if (removal, which) not in self._logits:
                self._logits[removal, which] = decide(keep)
            return self._logits[removal, which]

        return ask

    def curve(
        self, kind: str, name: str, removal: str, shares: Sequence[float]
    ) -> PerturbationCurve:
        """Return the deletion or insertion curve of a map."""
        key = (kind, name, removal, str(tuple(shares)))
        if key not in self._curves:
            make = deletion_curve if kind == "deletion" else insertion_curve
            self._curves[key] = make(
                self.decide(removal), self.map(name), self.generator("curve"), shares
            )
        return self._curves[key]


class _LazyMaps(dict[str, AttentionMap]):
    """Maps by name, computed at the first access."""

    def __init__(self, make: Callable[[str], AttentionMap]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> AttentionMap:
        self[name] = self.make(name)
        return self[name]


def input_embedding(model: Any) -> nn.Module | None:
    """Return the token embedding of a Hugging Face model, or None."""
    for one in (getattr(model, "model", None), model):
        ask = getattr(one, "get_input_embeddings", None)
        if callable(ask):
            found = ask()
            return found if isinstance(found, nn.Module) else None
    return None


def check_one_row(attention: AttentionMap) -> AttentionMap:
    """Raise unless a map has one row per sample; return it with a single point as its query."""
    _, l, h, q, _ = attention.values.shape
    if l * h * q != 1:
        raise ValueError(
            f"a scorecard needs one row per sample, got {l} layers, {h} heads and {q} queries: "
            "pass a map function that selects one, such as .layer(i), .head(i) or .block(...)"
        )
    return replace(attention, queries=GLOBAL_QUERY)


def positive_part(attention: AttentionMap) -> AttentionMap:
    """Clip a signed map at zero; return other maps unchanged."""
    if attention.kind is not Kind.SIGNED:
        return attention
    return replace(attention, values=attention.values.clamp_min(0), kind=Kind.AMOUNT)


def align_keys(attention: AttentionMap, like: AttentionMap) -> AttentionMap:
    """Put a map on the keys of another: grids are resampled, words have to be the same.

    Padding at the end of one of two texts is ignored.
    """
    if _is_grid(attention) and _is_grid(like):
        height, width = like.keys.spans[0].shape
        return resample_to_grid(attention, (height, width))
    ours, theirs = len(attention.keys), len(like.keys)
    if _is_grid(attention) != _is_grid(like) or ours < theirs:
        raise ValueError(
            f"maps must have the same keys, got {ours} of {attention.keys.spans[0].name!r} and "
            f"{theirs} of {like.keys.spans[0].name!r}"
        )
    if ours == theirs:
        return attention
    extra = attention.weights[..., theirs:]
    if bool((extra != 0).any()):
        raise ValueError(f"the map has weight beyond the truth: {ours} words against {theirs}")
    mask = None if attention.mask is None else attention.mask[..., :theirs]
    values = attention.weights[..., :theirs]
    kind = attention.kind
    return AttentionMap(values, like.keys, attention.queries, mask, kind, Form.PLAIN)


def _is_grid(attention: AttentionMap) -> bool:
    spans = attention.keys.spans
    return len(spans) == 1 and len(spans[0].shape) == 2 and len(spans[0]) == len(attention.keys)


def _select_query(people: AttentionMap, chosen: Tensor) -> AttentionMap:
    """Select one query of each sample."""
    at = chosen[:, None, None, None, None].to(people.values.device)
    values = people.weights.gather(3, at.expand(-1, 1, 1, 1, people.values.shape[-1]))
    seen = people.visible.gather(1, at[:, 0, 0].expand(-1, 1, people.values.shape[-1]))
    return AttentionMap(values, people.keys, GLOBAL_QUERY, seen, Kind.AMOUNT)
