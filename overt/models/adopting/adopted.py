"""Any PyTorch model as one of ours: `adopt(model)` predicts, shows where it looks, and can forget.

An adopted model takes a `Batch`, or whatever its `call` takes, and gives `Output`: so every loss,
measure, view and `fit` works on it. Its attention is watched from outside; its parameters are those
of the user's model, which is a submodule and is left as it was found.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils import _pytree

from overt.attention import AttentionMap
from overt.capture.seen import Layouts, Seen
from overt.capture.watching import bare, watch
from overt.models.adopting.feeding import Predict, automatic, calling
from overt.models.adopting.hiding import Masks, hidden_in, hiding, kept_keys
from overt.models.adopting.looking import last
from overt.models.output import Output

Laid = Layouts | Callable[[Any], Layouts]  # a layout, or what makes one from a batch
Reduce = Callable[[Seen], AttentionMap | tuple[AttentionMap, ...]]
Remove = Callable[[Any, Masks], Any]  # a batch without what the masks remove


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


Judge = Callable[[Seen, Any], Summed | None]  # of what was seen and its batch; None: no target


@dataclass(frozen=True, eq=False)
class Supervised(Output):
    """An output with the loss on its attention, which was computed inside the forward pass.

    None for a batch of which the loss had nothing to say.
    """

    loss: Summed | None = None


@dataclass(frozen=True, eq=False)
class Read:
    """What an adopted model keeps of a batch: all of it, and what its positions are."""

    batch: Any
    layout: Layouts | None


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
        layout: Callable[[nn.Module, Any], Layouts | None],
        layers: Collection[int | str] | None = None,
        heads: Sequence[int] | None = None,
        reduce: Reduce = last,
        remove: Remove | None = None,
        loss: Judge | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.call, self.layout, self.reduce = call, layout, reduce
        self.layers, self.heads = layers, heads
        self.remove, self.loss = remove, loss

    def encode(self, batch: Any) -> Read:
        """The batch and its layout: what an unknown model makes of it cannot be kept."""
        layout = self.layout(self.model, batch)
        first = next(self.model.parameters(), None)
        return Read(batch, layout if first is None else _moved(layout, first.device))

    def decide(self, features: Read, mask: Masks | None = None) -> Output:
        """The output for a batch, of which a mask by span name may remove words, cells or regions.

        To remove is to hide: no query of any layer sees these keys, and the kernels stay fused. A
        removed position still has its own row. A model that averages rows reads them there: give
        `adopt` a `remove` of your own that takes things out of the batch.
        """
        prediction, seen = self.see(features, self.call, mask)
        found = self.reduce(seen)
        maps = found if isinstance(found, tuple) else (found,)
        if not prediction.ndim:
            raise ValueError(
                "the model gave one number for all samples; say what is the prediction of each "
                "with adopt(model, call=lambda model, batch: ...)"
            )
        for one in maps:
            if len(one) != len(prediction):
                raise ValueError(
                    f"a map of {len(one)} rows for {len(prediction)} samples: this model attends "
                    "inside windows or runs samples apart; give adopt() a reduce= that joins them"
                )
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
        if mask is not None and not isinstance(mask, Mapping):
            raise TypeError('a mask is given by what it is over, such as {"image": keep}')
        if not mask:
            with watcher as seen:
                return call(self.model, batch), seen
        if self.remove is not None:
            with watcher as seen:
                return call(self.model, self.remove(batch, mask)), seen
        kept = kept_keys(layout, mask)
        edit, met = hiding(kept, hidden_in(layout))
        with watch(self.model, edit=edit), watcher as seen:
            result = call(self.model, batch)
        if not met:
            if isinstance(result, Tensor) and len(result) != len(kept):
                raise ValueError(f"a mask of {len(kept)} samples for a batch of {len(result)}")
            raise ValueError(
                "no attention of the model is over the keys of the layout, so hiding them removes "
                "nothing; give adopt() its own remove="
            )
        return result, seen

    def judge(self, seen: Seen, batch: Any, prediction: Tensor) -> Summed | None:
        """The loss on what was seen, tied to the prediction."""
        loss = None if self.loss is None else self.loss(seen, batch)
        if loss is None:
            return None
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
    loss: Judge | None = None,
) -> Adopted:
    """Any PyTorch model as one of ours, on the same parameters.

    `call(model, batch)` runs it and gives the prediction; without it the model is a Hugging Face
    model that takes its inputs by name. `layout` says what the positions are, for both axes or as
    a pair (queries, keys); a function makes one from each batch. Without it, that of a Hugging Face
    model is found, by `processor` and `tokenizer` where given; any other has mere positions.

    `layers` and `heads` are watched, all without them, and `reduce` makes the maps of the output
    out of what was seen: `last`, `every` or your own. `remove(batch, mask)` gives a batch without
    what the mask removes, where hiding keys is not enough.

    `loss(seen, batch)` is computed inside the forward pass and comes out as `output.loss`; None is
    for a batch without a target. That is the place for it when the model is wrapped for many
    processes: wrap what comes out of here.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"adopt takes a torch.nn.Module, and this is of type {type(model).__name__}"
        )
    if bare(model) is not model and type(model).__name__ != "OptimizedModule":
        raise ValueError(
            f"a loss on attention must be computed inside {type(model).__name__}: adopt the bare "
            f"model first, then wrap what comes out: {type(model).__name__}(adopt(model, ...))"
        )
    if isinstance(model, nn.DataParallel):
        raise ValueError("adopt model.module: DataParallel runs copies that cannot be watched")
    return Adopted(
        model,
        calling(processor) if call is None else call,
        _laying(layout, processor, tokenizer),
        layers,
        heads,
        reduce,
        remove,
        loss,
    )


def _laying(
    layout: Laid | None, processor: Any, tokenizer: Any
) -> Callable[[nn.Module, Any], Layouts | None]:
    if layout is None:
        return partial(automatic, processor=processor, tokenizer=tokenizer)
    return lambda model, batch: layout(batch) if callable(layout) else layout


def _moved(layout: Layouts | None, device: torch.device) -> Layouts | None:
    if layout is None:
        return None
    if isinstance(layout, tuple):
        return layout[0].to(device), layout[1].to(device)
    return layout.to(device)


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


# --- tensors for wrappers to find
#
# `fully_shard` of torch before 2.13 finds the tensors of an output through pytree, and silently
# leaves a model without gradients whose output is a dataclass that is not registered.


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
