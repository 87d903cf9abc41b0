"""Any PyTorch model as one of ours: `adopt(model)` predicts, shows where it looks, and can forget.

An adopted model takes a `Batch`, or whatever its `call` takes, and gives `Output`: so every loss,
measure, view and `fit` works on it. Its attention is watched from outside; its parameters are those
of the user's model, which is a submodule and is left as it was found.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.utils import _pytree

from overt.attention import POINT, AttentionMap, Kind, Layout
from overt.capture.call import Call, Written
from overt.capture.edits import Bias
from overt.capture.seen import Layouts, Seen
from overt.capture.watching import bare, watch
from overt.data.batch import Batch
from overt.models.output import Output

Predict = Callable[[nn.Module, Any], Tensor]  # how to run the model on a batch
Laid = Layouts | Callable[[Any], Layouts]  # a layout, or what makes one from a batch
Reduce = Callable[[Seen], AttentionMap | tuple[AttentionMap, ...]]
Masks = Mapping[str, Tensor]  # by span name: 1 to keep, 0 to remove
Remove = Callable[[Any, Masks], Any]  # a batch without what the masks remove

_SERVANTS = ("class", "distillation", "registers", "special")  # tokens that stand for no input


@runtime_checkable
class Summed(Protocol):
    """A loss before it is divided: a dataclass such as `overt.supervise.Loss`."""

    @property
    def total(self) -> Tensor:
        """The sum over the rows."""
        ...

    @property
    def count(self) -> Tensor:
        """The number of rows."""
        ...


@dataclass(frozen=True, eq=False)
class Supervised(Output):
    """An output with the loss on its attention, which was computed inside the forward pass."""

    loss: Summed | None = None


@dataclass(frozen=True, eq=False)
class Read:
    """What an adopted model keeps of a batch: all of it, and what its positions are."""

    batch: Any
    layout: Layouts | None


# --- which maps


def last(seen: Seen) -> tuple[AttentionMap, ...]:
    """What decides in the last layer: a map over each kind of input, all heads, one row.

    The row is that of the token called "class", or of the only query there is; without either,
    the mean over all queries that are not padding. Each map is renormalised over its own keys: what
    goes to the class token itself, to registers and to separators is left out.
    """
    return _looks(Seen([_fitting(seen)[-1]], seen.layout))


def every(seen: Seen) -> tuple[AttentionMap, ...]:
    """The same for all layers that look at the same keys as the last one, stacked."""
    calls = _fitting(seen)
    return _looks(Seen([one for one in calls if one.shape == calls[-1].shape], seen.layout))


def _fitting(seen: Seen) -> list[Call]:
    """The calls whose positions the layout describes; one query alone needs no description."""
    queries, keys = _pair(seen.layout)
    found = [
        call
        for call in seen.calls
        if (keys is None or call.shape[3] == len(keys))
        and (queries is None or call.shape[2] in (1, len(queries)))
    ]
    if not found:
        sizes = sorted({call.shape[2:] for call in seen.calls})
        wanted = (len(queries or ()), len(keys or ()))
        raise ValueError(
            f"the layout has {wanted[0]} queries and {wanted[1]} keys, and the attention of the "
            f"model (queries, keys) = {sizes}; give adopt() the layout of one of these, or reduce="
        )
    return found


def _looks(seen: Seen) -> tuple[AttentionMap, ...]:
    first = seen.calls[0]
    b, _, q, k = first.shape
    queries, keys = _pair(seen.layout)
    if keys is None:
        keys = _positions(k)
    if queries is None or q == 1:
        queries = POINT if q == 1 else _positions(q)
    seen = seen.within((queries, keys))
    names = [span.name for span in keys.spans]
    names = [name for name in names if name not in _SERVANTS] or names
    signed = any(call.kind is Kind.SIGNED for call in seen)
    block = seen.block if signed else seen.log_block
    if q == 1 or any(span.name == "class" for span in queries.spans):
        row = queries.spans[0].name if q == 1 else "class"
        return tuple(block(row, name) for name in names)
    everywhere = torch.arange(q, device=_device(first)).expand(b, q)
    return tuple(_mean(block(everywhere, name), _there(first)) for name in names)


def _mean(attention: AttentionMap, there: Bool[Tensor, "b q"] | None) -> AttentionMap:
    """The mean over the queries that are there and see some of the keys."""
    rows = attention.rows if there is None else attention.rows & there
    share = rows / rows.sum(dim=1, keepdim=True).clamp_min(1)
    weights = attention.weights * share[:, None, None, :, None].to(attention.values.dtype)
    return AttentionMap(
        weights.sum(dim=3, keepdim=True),
        attention.keys,
        POINT,
        (attention.visible & rows[..., None]).any(dim=1, keepdim=True),
        attention.kind,
    )


def _there(call: Call) -> Bool[Tensor, "b q"] | None:
    """Which queries are no padding: in self-attention, those at which somebody may look."""
    if call.cross or call.shape[2] != call.shape[3]:
        return None
    seen = call.visible()
    return None if seen is None else seen.any(dim=1)


# --- how to run it


def by_keywords(batch: Any, names: Collection[str]) -> dict[str, Any]:
    """What a batch has under the names that a Hugging Face model gives its inputs.

    Of a `Batch` these are tokens, their mask and images, one a sample; of a mapping, all entries
    that the model names, but for labels: the loss on them is not the model's business here.
    """
    if isinstance(batch, Batch):
        found: dict[str, Any] = {}
        if "pixel_values" in names and batch.images is not None:
            found["pixel_values"] = batch.images[batch.image_index]
        if "input_ids" in names and batch.tokens is not None:
            found["input_ids"] = batch.tokens
            if batch.token_mask is not None:  # a mask of words is none of patches
                found["attention_mask"] = batch.token_mask.long()
    elif isinstance(batch, Mapping):
        found = {name: value for name, value in batch.items() if name != "labels"}
    else:
        raise ValueError(
            f"a batch that is a {type(batch).__name__} needs adopt(model, call=...) to say how it "
            "is put to the model"
        )
    return {name: value for name, value in found.items() if value is not None and name in names}


def prediction_of(output: Any) -> Tensor:
    """The logits of what a model returned, or its pooled output, or the tensor itself."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "logits_per_image", "pooler_output"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    raise ValueError(
        f"a {type(output).__name__} has neither logits nor a pooled output; say what is the "
        "prediction with adopt(model, call=lambda model, batch: ...)"
    )


def _calling(processor: Any) -> Predict:
    """Run a model by keywords; bytes become what the processor makes of them."""

    def call(model: nn.Module, batch: Any) -> Tensor:
        named = inspect.signature(bare(model).forward).parameters
        inputs = by_keywords(batch, named)
        if not inputs:
            raise ValueError(
                f"{type(bare(model)).__name__} takes {', '.join(named)}, and the batch has none of "
                "them; say how to run it with adopt(model, call=lambda model, batch: ...)"
            )
        pixels = inputs.get("pixel_values")
        if isinstance(pixels, Tensor) and not pixels.is_floating_point():
            inputs["pixel_values"] = _normalized(pixels, processor)
        return prediction_of(model(**inputs))

    return call


def _normalized(pixels: Tensor, processor: Any) -> Tensor:
    processor = getattr(processor, "image_processor", processor)
    mean, spread = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
    if mean is None or spread is None:
        raise ValueError(
            "the images of the batch are bytes, and nothing says how the model wants them; give "
            "adopt(model, processor=...) or adopt(model, call=...)"
        )
    centre, scale = (
        torch.tensor(one, device=pixels.device)[:, None, None] for one in (mean, spread)
    )
    return (pixels.to(scale.dtype) / 255 - centre) / scale


# --- taking something away


def hiding(kept: Float[Tensor, "b k"], fits: Callable[[Call], bool]) -> tuple[Bias, list[str]]:
    """An edit that hides keys from every query of the calls that fit, and the names of those met.

    A number between 0 and 1 multiplies the weights before they are normalised. Nothing is ever left
    with no key at all: a query of self-attention that has lost all keys sees itself, which nobody
    else does. A query of cross-attention that has lost all takes nothing: zeros.
    """
    met: list[str] = []
    there = kept > 0
    bias = torch.where(there, torch.where(there, kept, 1).log(), -torch.inf)

    def make(call: Call) -> Tensor | None:
        b, _, q, k = call.shape
        if (b, k) != tuple(kept.shape) or not fits(call):
            return None
        met.append(call.name)
        seen = call.visible()
        left = there[:, None] if seen is None else there[:, None] & seen
        blind = ~left.any(dim=-1, keepdim=True)
        added = bias[:, None]
        if not torch.compiler.is_compiling() and not bool(blind.any()):
            return added[:, None]
        if call.cross:
            return _refused(call) if isinstance(call.source, Written) else added[:, None]
        place = torch.arange(k, device=kept.device)
        own = place == (torch.arange(q, device=kept.device) + k - q)[:, None]
        return torch.where(blind, torch.where(own, 0.0, -torch.inf), added)[:, None]

    return Bias(make), met


def _refused(call: Call) -> Tensor:
    raise ValueError(
        f"all keys of {call.name} were removed, and a softmax over nothing is not a number; keep "
        "one, or give adopt() its own remove="
    )


# --- the model


class Adopted(nn.Module):
    """A model of somebody else with our face; `adopt` makes one.

    `encode` can keep nothing of a model it does not know: it remembers the batch, and `decide` runs
    the whole model, once a call.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Predict,
        layout: Laid | None = None,
        layers: Collection[int | str] | None = None,
        heads: Sequence[int] | None = None,
        reduce: Reduce = last,
        remove: Remove | None = None,
        loss: Callable[[Seen, Any], Summed] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.call, self.layout, self.reduce = call, layout, reduce
        self.layers, self.heads = layers, heads
        self.remove, self.loss = remove, loss

    def encode(self, batch: Any) -> Read:
        """The batch and its layout: what an unknown model makes of it cannot be kept."""
        layout = self.layout(batch) if callable(self.layout) else self.layout
        return Read(batch, layout)

    def decide(self, features: Read, mask: Masks | None = None) -> Output:
        """The output for a batch, of which a mask by span name may remove words, cells or regions.

        To remove is to hide: no query of any layer sees these keys, and the kernels stay fused. A
        removed position still has its own row. A model that averages rows reads them there: give
        `adopt` a `remove` of your own that takes things out of the batch.
        """
        prediction, seen = self.see(features, self.call, mask)
        found = self.reduce(seen)
        maps = found if isinstance(found, tuple) else (found,)
        if self.loss is None:
            return Output(prediction, maps)
        loss = self.judge(seen, features.batch, prediction)
        return Supervised(prediction, maps, loss=loss)

    def forward(self, batch: Any = None, /, **inputs: Any) -> Output:
        """The output for a batch, or for the keywords of one."""
        return self.decide(self.encode(inputs if batch is None else batch))

    def see(
        self, features: Read, call: Callable[[nn.Module, Any], Any], mask: Masks | None = None
    ) -> tuple[Any, Seen]:
        """What `call` gives under watch, and what was seen; `decide` without its last steps."""
        batch, layout = features.batch, features.layout
        watcher = watch(self.model, self.layers, self.heads, layout)
        if not mask:
            with watcher as seen:
                return call(self.model, batch), seen
        if self.remove is not None:
            with watcher as seen:
                return call(self.model, self.remove(batch, mask)), seen
        edit, met = hiding(_kept(layout, mask), _hides(layout))
        with watch(self.model, edit=edit), watcher as seen:
            result = call(self.model, batch)
        if not met:
            raise ValueError(
                "no attention of the model is over the keys of the layout, so hiding them removes "
                "nothing; give adopt() its own remove="
            )
        return result, seen

    def judge(self, seen: Seen, batch: Any, prediction: Tensor) -> Summed:
        """The loss on what was seen, tied to the prediction."""
        assert self.loss is not None
        loss = self.loss(seen, batch)
        return replace(loss, total=tie(loss.total, prediction))  # type: ignore[type-var]


def adopt(
    model: nn.Module,
    call: Predict | None = None,
    layout: Laid | None = None,
    processor: Any = None,
    tokenizer: Any = None,
    layers: Collection[int | str] | None = None,
    heads: Sequence[int] | None = None,
    reduce: Reduce = last,
    remove: Remove | None = None,
    loss: Callable[[Seen, Any], Summed] | None = None,
) -> Adopted:
    """Any PyTorch model as one of ours, on the same parameters.

    `call(model, batch)` runs it and gives the prediction; without it the model is a Hugging Face
    model that takes its inputs by name. `layout` says what the positions are, for both axes or as
    a pair (queries, keys); a function makes one from each batch. `layers` and `heads` are watched,
    all without them, and `reduce` makes the maps of the output out of what was seen: `last`,
    `every` or your own. `remove(batch, mask)` gives a batch without what the mask removes, where
    hiding keys is not enough.

    `loss(seen, batch)` is computed inside the forward pass and comes out as `output.loss`. That is
    the place for it when the model is wrapped for many processes: wrap what comes out of here.
    """
    if bare(model) is not model and type(model).__name__ != "OptimizedModule":
        raise ValueError(
            f"a loss on attention must be computed inside {type(model).__name__}: adopt the bare "
            f"model first, then wrap what comes out: {type(model).__name__}(adopt(model, ...))"
        )
    if isinstance(model, nn.DataParallel):
        raise ValueError("adopt model.module: DataParallel runs copies that cannot be watched")
    return Adopted(
        model,
        _calling(processor) if call is None else call,
        layout,
        layers,
        heads,
        reduce,
        remove,
        loss,
    )


# --- losses inside wrapped models


class _Tie(torch.autograd.Function):
    """A number as it is, whose gradient also calls on others, with zeros."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, *others: Tensor) -> Tensor:
        ctx.like = [(one.shape, one.dtype, one.device) for one in others]
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        zeros = [torch.zeros(s, dtype=t, device=d) for s, t, d in ctx.like]
        return gradient, *zeros


def tie(total: Float[Tensor, ""], *others: Tensor) -> Float[Tensor, ""]:
    """The same number; its backward pass also passes through `others`, with a gradient of zero.

    A loss on attention alone leaves the last layers without a gradient. `DistributedDataParallel`
    waits for those, and `fully_shard` does not bring back the weights of a layer whose output has
    none. The other tensors also share the graph when no row is supervised on this process.
    """
    found: Tensor = _Tie.apply(total, *others)
    return found


def _parts(value: Any) -> tuple[list[Any], Any]:
    """The fields of a value of ours, for wrappers that look for tensors in what a model returns."""
    names = [one.name for one in fields(value)]
    found = [getattr(value, name) for name in names]
    loss = getattr(value, "loss", None)
    if loss is not None:  # its class may be anybody's
        found[names.index("loss")] = (loss.total, loss.count)
    return found, (type(value), names, loss)


def _whole(parts: Any, context: Any) -> Any:
    kind, names, loss = context
    given = dict(zip(names, parts, strict=True))
    if loss is not None:
        total, count = given["loss"]
        given["loss"] = replace(loss, total=total, count=count)
    return kind(**given)


for _kind in (AttentionMap, Output, Supervised):
    _pytree.register_pytree_node(_kind, _parts, _whole)


# --- helpers


def _pair(layout: Layouts | None) -> tuple[Layout | None, Layout | None]:
    if layout is None:
        return None, None
    return layout if isinstance(layout, tuple) else (layout, layout)


def _positions(count: int) -> Layout:
    from overt.attention import words

    return words(count, "positions")


def _device(call: Call) -> torch.device:
    source = call.source
    return source.used.device if isinstance(source, Written) else source.query.device


def _hides(layout: Layouts | None) -> Callable[[Call], bool]:
    """With a layout for each axis, a decoder that looks at itself is another axis than the keys."""
    if isinstance(layout, tuple) and layout[0] is not layout[1]:
        return lambda call: call.cross or not call.causal
    return lambda call: True


def _kept(layout: Layouts | None, mask: Masks) -> Float[Tensor, "b k"]:
    """Masks over spans as one factor a key: the least of those that overlap."""
    _, keys = _pair(layout)
    some = next(iter(mask.values()))
    if keys is None:
        keys = _positions(some.shape[1])
    precise = torch.promote_types(some.dtype, torch.float32)
    kept = torch.ones(len(some), len(keys), dtype=precise, device=some.device)
    for name, one in mask.items():
        span = keys.find(name)
        if one.shape[1] != len(span):
            raise ValueError(
                f"a mask of {one.shape[1]} positions over {name!r}, which has {len(span)}"
            )
        if isinstance(span.index, slice):
            at = torch.arange(len(keys), device=some.device)[span.index].expand(len(some), -1)
        else:
            at = span.index.to(some.device)
        factors = torch.where(at >= 0, one.to(precise), 1)
        kept = kept.scatter_reduce(1, at.clamp_min(0), factors, "amin")
    return kept
