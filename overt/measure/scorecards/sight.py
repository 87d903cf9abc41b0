"""Everything that can be asked about the samples of one portion, computed when it is asked for.

A measure asks for a map by its name, for the truth to hold it to, for what the model answers with
parts removed. What several measures need is made once. Random numbers belong to a sample: see
`overt.measure.drawing`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import POINT, AttentionMap, Form, Kind
from overt.data.batch import Batch
from overt.data.human import Truth, pooled
from overt.measure import controls
from overt.measure.ceilings import left_out
from overt.measure.drawing import PerSample, seed_of, uniform_numbers
from overt.measure.effects import leave_one_out, slope
from overt.measure.faithfulness import Decide
from overt.measure.flipping import Curve, deletion_curve, insertion_curve
from overt.measure.grids import on_grid
from overt.measure.measured import row
from overt.measure.removal import blurred, imputed, in_features, in_pixels, to_mean
from overt.measure.scorecards import cells
from overt.measure.scorecards.entries import Unasked

ATTENTION, GRADIENT, ACTIVATION = "attention", "gradient", "class activation"
SHUFFLED, RANDOM, CENTRE, PRIOR, UNIFORM = "shuffled", "random", "centre", "prior", "uniform"
PERSON = "one person"
CONTROLS = (SHUFFLED, RANDOM, CENTRE, PRIOR, UNIFORM)  # they know nothing of the sample's content

MASK = "mask"
REMOVALS = (MASK, "mean", "blur", "imputed")

Look = Callable[[Batch], AttentionMap]


@runtime_checkable
class Answer(Protocol):
    """What a model gives: logits of classes, and the maps behind them."""

    @property
    def prediction(self) -> Tensor: ...
    @property
    def attention(self) -> tuple[AttentionMap, ...]: ...


@runtime_checkable
class Removing(Protocol):
    """A model that can be asked again with parts of what it has seen removed."""

    def encode(self, batch: Any) -> Any: ...
    def decide(self, features: Any, mask: Any = None) -> Any: ...


class Sight:
    """One portion of samples before a model: its maps, the controls, the truth, ways to remove.

    `looks` are further maps by name. `over` names the span that is judged; None takes that of the
    truth, or else of the first map there is.
    """

    def __init__(
        self,
        model: Callable[[Batch], Any] | None,
        batch: Batch,
        truth: Truth | None = None,
        looks: Mapping[str, Look] | None = None,
        over: str | None = None,
        seed: int = 0,
    ) -> None:
        self.model, self.batch, self.looks, self.seed = model, batch, dict(looks or {}), seed
        self.wanted, self._given = over, truth
        self._maps: dict[str, AttentionMap] = {}
        self._curves: dict[tuple[str, ...], Curve] = {}
        self._asked: dict[tuple[str, str], Tensor] = {}

    def __len__(self) -> int:
        return len(self.batch)

    def draw(self, *words: str) -> PerSample:
        """A stream of random numbers for each sample, by its id and for this purpose."""
        return PerSample([seed_of(self.seed, *words, name) for name in self.batch.ids])

    # --- the model

    @cached_property
    def features(self) -> Any:
        """What the model keeps of the batch, where it can be asked with parts removed."""
        if not isinstance(self.model, Removing):
            raise Unasked("the model has no encode and decide, so nothing can be masked in it")
        with torch.no_grad():
            return self.model.encode(self.batch)

    @cached_property
    def output(self) -> Answer:
        """What the model answers."""
        if self.model is None:
            raise Unasked("there are maps and no model")
        with torch.no_grad():
            if isinstance(self.model, Removing):
                found = self.model.decide(self.features)
            else:
                found = self._given_a_batch(self.model)
        if not isinstance(found, Answer):
            raise ValueError(
                f"a model gives an output with a prediction and maps, and this one gave a "
                f"{type(found).__name__}; overt.adopt makes one of any PyTorch model"
            )
        return found

    def _given_a_batch(self, model: Callable[[Batch], Any]) -> Any:
        """What the model gives for the batch; one that wants tensors is told how it gets them."""
        try:
            return model(self.batch)
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"{type(model).__name__} cannot be called with a batch; "
                "overt.adopt(model) makes one of any PyTorch model that can"
            ) from error

    @cached_property
    def alone(self) -> Batch:
        """The batch with an image of its own for every sample."""
        batch = self.batch
        if batch.images is None or batch.image_of is None:
            return batch
        return replace(
            batch,
            images=batch.images[batch.image_index],
            image_of=None,
            geometry=batch.sample_geometry,
        )

    def classify(self, images: Tensor) -> Float[Tensor, "b c"]:
        """What the model answers to other pictures of the same samples; bytes stay bytes."""
        if self.model is None:
            raise Unasked("there are maps and no model")
        kind = self.pictures.dtype
        if not kind.is_floating_point:
            images = images.round().clamp(0, 255)
        found: Tensor = self.model(replace(self.alone, images=images.to(kind))).prediction
        return found

    @property
    def pictures(self) -> Tensor:
        """The images of the samples, one each."""
        if self.alone.images is None:
            raise Unasked("the samples have no pictures")
        return self.alone.images

    # --- maps

    @cached_property
    def over(self) -> str:
        """The span that is judged."""
        if self.wanted is not None:
            return self.wanted
        if self._given is not None:
            return self._given.target.keys.spans[0].name
        return self.like.keys.spans[0].name

    def names(self) -> tuple[str, ...]:
        """All maps of this sight, those of the model first, then controls, then people."""
        found = [ATTENTION, *self.looks, ACTIVATION, GRADIENT, *CONTROLS, PERSON]
        there = []
        for name in found:
            try:
                self.map(name)
            except Unasked:
                continue
            there.append(name)
        return tuple(there)

    def map(self, name: str) -> AttentionMap:
        """The map of this name, one row a sample, over the keys of the model's own.

        Of a signed map the positive part is meant. `Unasked` says why there is none.
        """
        if name not in self._maps:
            self._maps[name] = self._made(name)
        return self._maps[name]

    @cached_property
    def like(self) -> AttentionMap:
        """The map whose keys all others have: the model's, else the first given, else its cells."""
        for name in (ATTENTION, *self.looks, ACTIVATION):
            try:
                return self.map(name)
            except Unasked:
                continue
        raise Unasked("neither the model nor anybody else gives a map of these samples")

    @cached_property
    def key_counts(self) -> Float[Tensor, " b"]:
        """How many keys each sample has: all cells of a picture, or the words that are there.

        NaN where the map sees none, as one that is not defined.
        """
        weights, seen = row(self.like)
        if len(self.like.keys.spans[0].shape) > 1:
            return torch.full((len(self),), float(weights.shape[-1]))
        counts = seen.sum(dim=-1).float()
        return torch.where(counts > 0, counts, torch.nan)

    def _made(self, name: str) -> AttentionMap:
        match name:
            case "attention":
                return self._own()
            case "class activation":
                return self._activation()
            case "gradient":
                return self._gradient()
            case "shuffled":
                return controls.shuffled(self.like, self.draw(SHUFFLED))
            case "random":
                return controls.random_map(self.like, self.draw(RANDOM))
            case "centre":
                return controls.centre(self.like)
            case "uniform":
                return controls.uniform(self.like)
            case "prior":
                return self._fitted(self._known("prior"))
            case "one person":
                return self._fitted(self._person[0])
        if name not in self.looks:
            raise ValueError(f"there is no map {name!r}; there are {', '.join(self.names())}")
        return self._given_map(name)

    @cached_property
    def heads(self) -> AttentionMap:
        """The last map of the model over the span, all its layers and heads."""
        maps = self.output.attention
        if not maps:
            raise Unasked("the model attends to nothing")
        wanted = self.wanted or (
            None if self._given is None else self._given.target.keys.spans[0].name
        )
        for one in reversed(maps):
            if wanted is None or [span.name for span in one.keys.spans] == [wanted]:
                return one
        names = [span.name for one in maps for span in one.keys.spans]
        raise Unasked(f"the model attends to {', '.join(names)}, and not to {wanted!r}")

    def _own(self) -> AttentionMap:
        """The last map of the model over the span; heads and layers are fused by their mean."""
        fused = self.heads
        fused = fused.over_heads() if fused.values.shape[2] > 1 else fused
        fused = fused.over_layers() if fused.values.shape[1] > 1 else fused
        return positive(one_row(fused))

    def _given_map(self, name: str) -> AttentionMap:
        found = self.looks[name](self.batch)
        if len(found) != len(self):
            raise ValueError(f"{len(found)} maps called {name!r} for {len(self)} samples")
        named = [span.name for span in found.keys.spans]
        if self.wanted is not None and named != [self.wanted]:
            raise Unasked(f"the maps {name!r} are over {', '.join(named)}, not {self.wanted!r}")
        found = positive(one_row(found.detach().to(self.device)))
        first = next(iter(self.looks))
        try:
            like = self.map(ATTENTION)
        except Unasked:
            if name == first:
                return found
            like = self.map(first)
        return onto(found, like)

    @cached_property
    def device(self) -> torch.device:
        """Where the samples are."""
        for one in (self.batch.images, self.batch.tokens, self.batch.features):
            if one is not None:
                return one.device
        return torch.device("cpu")

    @cached_property
    def _layer(self) -> nn.Module:
        """The last layer of the model that keeps the picture as cells."""
        if not isinstance(self.model, nn.Module) or self.alone.images is None:
            raise Unasked("only a network that is shown pictures has features of their cells")
        height, width = self.pictures.shape[-2:]
        found = cells.last_cells(self.model, lambda: self.classify(self.pictures), (height, width))
        if found is None:
            raise Unasked("no layer of the model keeps the picture as cells")
        return found

    def _activation(self) -> AttentionMap:
        if self.wanted not in (None, "image"):
            raise Unasked(f"class activation is over the image, and {self.wanted!r} is judged")
        layer, geometry = self._layer, self.alone.geometry
        assert isinstance(self.model, nn.Module)
        try:
            pictures = self.pictures.float()
            found = cells.activation_map(self.model, layer, self.classify, pictures, geometry)
        except (ValueError, RuntimeError) as problem:
            raise Unasked(f"class activation was not found: {problem}") from problem
        found = found.detach()
        try:
            like = self.map(ATTENTION)
        except Unasked:
            return found
        if not _is_grid(like):
            raise Unasked("class activation is over cells, and what is judged is not")
        return onto(found, like)

    def _gradient(self) -> AttentionMap:
        try:
            return self.slope
        except Unasked:
            like = self.map(ACTIVATION)
        assert isinstance(self.model, nn.Module)
        try:
            found = cells.gradient_map(
                self.model, self._layer, lambda: self.classify(self.pictures), like
            )
        except RuntimeError as problem:
            raise Unasked(f"the answer has no gradient: {problem}") from problem
        if found.shape[1] != len(like.keys):
            raise Unasked("gradients are over other cells than the map")
        return AttentionMap.from_cells(found, like.keys)

    @cached_property
    def slope(self) -> AttentionMap:
        """How steeply the answer changes with the mask of each key: gradient times input."""
        try:
            return slope(self.decide(MASK), self.map(ATTENTION)).to(self.device)
        except (ValueError, RuntimeError, NotImplementedError) as problem:
            raise Unasked(f"the answer has no gradient by a mask: {problem}") from problem

    @cached_property
    def effects(self) -> Mapping[str, AttentionMap]:
        """By what stands for removed keys, how far the answer moves when each alone is removed."""
        return _Kept(lambda removal: leave_one_out(self.decide(removal), self.like))

    # --- the truth

    def on_truth(self, name: str) -> AttentionMap:
        """The map of this name on the keys of the truth, where all models can be compared."""
        if name == PERSON:
            return self._person[0]
        if name == PRIOR:
            return self._known("prior")
        return onto(self.map(name), self.truth(name).target)

    def truth(self, name: str) -> Truth:
        """What the map of this name is held to; one person to all others, else all people."""
        if name == PERSON:
            return self._person[1]
        if self._given is None:
            raise Unasked("the data set does not say where attention should be")
        return self._given

    def _known(self, part: str) -> AttentionMap:
        found = None if self._given is None else getattr(self._given, part)
        if found is None:
            raise Unasked(f"the data set has no {part}")
        assert isinstance(found, AttentionMap)
        return found

    def _fitted(self, found: AttentionMap) -> AttentionMap:
        return onto(found, self.like)

    @cached_property
    def _person(self) -> tuple[AttentionMap, Truth]:
        """One person of each sample, drawn at random, and the truth without that person."""
        people = self._known("people")
        assert self._given is not None
        there = (people.weights.abs().sum(dim=-1)[:, 0, 0] > 0) & people.rows
        drawn = uniform_numbers((len(people), there.shape[1]), self.draw(PERSON)).to(there.device)
        chosen = drawn.masked_fill(~there, -1).argmax(dim=-1)
        one, rest = _query(people, chosen), _query(left_out(people), chosen)
        truth = Truth(target=rest, others=self._given.others, prior=self._given.prior)
        if self._given.fixations is not None:
            counts = self._given.fixations
            every, own = pooled(counts), _query(counts, chosen)
            left = (every.weights - own.weights * own.visible[:, None, None]).clamp_min(0)
            alone = there.sum(dim=1) > 1
            left = left * alone[:, None, None, None, None]
            truth = replace(truth, fixations=replace(every, values=left))
        return one, truth

    # --- ways to remove

    def decide(self, removal: str) -> Decide:
        """What the model answers when keys are removed, and what then stands in their place."""
        if self.model is None:
            raise Unasked("there are maps and no model")
        if removal == MASK:
            return self._remembering(removal, self._masking())
        fill = {"mean": to_mean, "blur": blurred}.get(removal)
        if fill is None:
            if removal != "imputed":
                raise ValueError(f"{removal!r} is no baseline; there are {', '.join(REMOVALS)}")
            fill = partial(imputed, generator=self.draw("imputed"))
        return self._remembering(removal, self._filling(fill))

    def _masking(self) -> Decide:
        model, features, name = self.model, self.features, self.over
        assert isinstance(model, Removing)

        def decide(keep: Float[Tensor, "b k"]) -> Float[Tensor, "b c"]:
            found: Tensor = model.decide(features, {name: keep}).prediction
            return found

        return decide

    def _filling(self, fill: Any) -> Decide:
        shape = self.like.keys.spans[0].shape
        if len(shape) == 2 and self.batch.images is not None:
            return in_pixels(self.classify, self.pictures.float(), (shape[0], shape[1]), fill)
        if self.batch.tokens is not None and self.over == "text":
            words = embedding_of(self.model)
            if words is not None:
                return self._in_words(words, shape, fill)
        features = self.features
        values = getattr(features, "values", None)
        if not is_dataclass(features) or not isinstance(values, Tensor) or values.ndim != 3:
            raise Unasked("the model does not show the features that a filling could stand in for")
        if values.shape[1] != len(self.like.keys):
            raise Unasked(f"the model's {values.shape[1]} features are not the keys of its map")
        model = self.model
        assert isinstance(model, Removing)

        def classify(changed: Float[Tensor, "b k d"]) -> Float[Tensor, "b c"]:
            found: Tensor = model.decide(replace(features, values=changed)).prediction
            return found

        return in_features(classify, values, shape, fill, getattr(features, "present", None))

    def _in_words(self, words: nn.Module, shape: tuple[int, ...], fill: Any) -> Decide:
        """Words removed from what a model makes of its tokens, before it reads them."""
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

        return in_features(classify, values, shape, fill, present)

    def _remembering(self, removal: str, decide: Decide) -> Decide:
        """The same answers, those to nothing and to everything removed being asked for once."""

        def ask(keep: Float[Tensor, "b k"]) -> Float[Tensor, "b c"]:
            if keep.requires_grad or torch.is_grad_enabled():
                return decide(keep)
            which = "whole" if bool((keep == 1).all()) else "" if bool((keep != 0).any()) else "no"
            if not which:
                return decide(keep)
            if (removal, which) not in self._asked:
                self._asked[removal, which] = decide(keep)
            return self._asked[removal, which]

        return ask

    def curve(self, kind: str, name: str, removal: str, shares: Sequence[float]) -> Curve:
        """The probability of the answer as more and more of a map is deleted or inserted."""
        key = (kind, name, removal, str(tuple(shares)))
        if key not in self._curves:
            make = deletion_curve if kind == "deletion" else insertion_curve
            self._curves[key] = make(
                self.decide(removal), self.map(name), self.draw("curve"), shares
            )
        return self._curves[key]


class _Kept(dict[str, AttentionMap]):
    """What a function made of a name, kept for the next who asks."""

    def __init__(self, make: Callable[[str], AttentionMap]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> AttentionMap:
        self[name] = self.make(name)
        return self[name]


def embedding_of(model: Any) -> nn.Module | None:
    """The layer that turns tokens into vectors, where a Hugging Face model names it."""
    for one in (getattr(model, "model", None), model):
        ask = getattr(one, "get_input_embeddings", None)
        if callable(ask):
            found = ask()
            return found if isinstance(found, nn.Module) else None
    return None


def one_row(attention: AttentionMap) -> AttentionMap:
    """A map of one row a sample, or `ValueError` with what to do."""
    _, l, h, q, _ = attention.values.shape
    if l * h * q != 1:
        raise ValueError(
            f"a scorecard reads one row a sample, and this map has {l} layers, {h} heads and {q} "
            "queries: give it a look= that takes one, such as .layer(i), .head(i) or .block(...)"
        )
    return replace(attention, queries=POINT)


def positive(attention: AttentionMap) -> AttentionMap:
    """The map itself, or what of a signed one is above zero."""
    if attention.kind is not Kind.SIGNED:
        return attention
    return replace(attention, values=attention.values.clamp_min(0), kind=Kind.AMOUNT)


def onto(attention: AttentionMap, like: AttentionMap) -> AttentionMap:
    """The map on the keys of another: grids are drawn anew, words have to be the same.

    A row of padding at the end of one of two texts is no difference.
    """
    if _is_grid(attention) and _is_grid(like):
        height, width = like.keys.spans[0].shape
        return on_grid(attention, (height, width))
    ours, theirs = len(attention.keys), len(like.keys)
    if _is_grid(attention) != _is_grid(like) or ours < theirs:
        raise ValueError(
            f"a map over {ours} keys of {attention.keys.spans[0].name!r} cannot be laid over "
            f"{theirs} keys of {like.keys.spans[0].name!r}"
        )
    if ours == theirs:
        return attention
    extra = attention.weights[..., theirs:]
    if bool((extra != 0).any()):
        raise ValueError(f"a map of {ours} words has weight beyond the {theirs} words of the truth")
    mask = None if attention.mask is None else attention.mask[..., :theirs]
    values = attention.weights[..., :theirs]
    kind = attention.kind
    return AttentionMap(values, like.keys, attention.queries, mask, kind, Form.PLAIN)


def _is_grid(attention: AttentionMap) -> bool:
    spans = attention.keys.spans
    return len(spans) == 1 and len(spans[0].shape) == 2 and len(spans[0]) == len(attention.keys)


def _query(people: AttentionMap, chosen: Tensor) -> AttentionMap:
    """One query of each sample."""
    at = chosen[:, None, None, None, None].to(people.values.device)
    values = people.weights.gather(3, at.expand(-1, 1, 1, 1, people.values.shape[-1]))
    seen = people.visible.gather(1, at[:, 0, 0].expand(-1, 1, people.values.shape[-1]))
    return AttentionMap(values, people.keys, POINT, seen, Kind.AMOUNT)
