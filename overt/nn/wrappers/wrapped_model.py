"""Wrap any PyTorch model: `wrap(model)` predicts, returns its attention, and accepts masks.

A wrapped model takes a `Batch`, or whatever its `call` takes, and returns `Output`, so all losses,
metrics, figures and `fit` work with it. Attention is captured from outside. The parameters are
those of the user's model, which is a submodule and is not changed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils import _pytree

from overt.attention import AttentionMap
from overt.capture.session import unwrap_model, watch
from overt.capture.trace import AttentionTrace, Layouts
from overt.data.batch import Batch
from overt.nn.inner_checkpoint import load_inner_weights, load_saved_model, save_inner_model
from overt.nn.output import Output
from overt.nn.wrappers.hf_inputs import (
    Predict,
    extract_prediction,
    infer_layout,
    make_predict,
)
from overt.nn.wrappers.key_masking import Masks, call_filter, key_weights, mask_keys
from overt.nn.wrappers.map_selection import last_layer

LayoutSource = Layouts | Callable[[Any], Layouts | None]  # a layout, or a function of the batch
ReduceTrace = Callable[[AttentionTrace], AttentionMap | tuple[AttentionMap, ...]]
RemoveMasked = Callable[[Any, Masks], Any]  # returns the batch without the masked parts


@runtime_checkable
class SummedLoss(Protocol):
    """Loss before averaging: a dataclass such as `overt.losses.Loss`."""

    @property
    def total(self) -> Tensor:
        """The sum over the rows."""
        ...

    @property
    def count(self) -> Tensor:
        """The number of rows."""
        ...


# loss on the trace and its batch; None for a batch without a target
TraceLoss = Callable[[AttentionTrace, Any], SummedLoss | None]


@dataclass(frozen=True, eq=False)
class SupervisedOutput(Output):
    """Output with an attention loss computed inside the forward pass.

    `loss` is None for a batch without a target.
    """

    loss: SummedLoss | None = None


@dataclass(frozen=True, eq=False)
class WrappedInputs:
    """A batch and the layout of its positions."""

    batch: Any
    layout: Layouts | None


# --- the model


class WrappedModel(nn.Module):
    """Wrapper around any model with the interface of `AttentionModel`; made by `wrap`.

    `encode` cannot cache features of an unknown model: it stores the batch, and `decide` runs the
    whole model each time. `wrap` has defaults for `call` and `layout`.

    Args:
        model: the model; it becomes a submodule.
        call: runs the model on a batch and returns the prediction.
        layout: returns the meaning of the positions from the model and the batch.
        layers: layers to capture, all by default.
        heads: heads to capture, all by default.
        reduce: selects the output maps from the trace.
        remove: returns the batch without the masked parts, where hiding keys is not enough.
        loss: loss on the trace and the batch, returned as `output.loss`.

    Example:
        >>> from overt.attention import words
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        ...     def forward(self, x):
        ...         return self.attend(x, x, x, need_weights=False)[0].mean(dim=1)
        >>> model = wrap(Model(), call=lambda model, batch: model(batch), layout=words(5))
        >>> features = model.encode(torch.rand(1, 5, 8))
        >>> keep = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0]])
        >>> output = model.decide(features, {"text": keep})
        >>> output.attention_to("text").weights[0, 0, :, 0, 3:].tolist()  # hidden words
        [[0.0, 0.0], [0.0, 0.0]]
    """

    def __init__(
        self,
        model: nn.Module,
        call: Predict,
        layout: Callable[[nn.Module, Any], Layouts | None],
        layers: Collection[int | str] | None = None,
        heads: Sequence[int] | None = None,
        reduce: ReduceTrace = last_layer,
        remove: RemoveMasked | None = None,
        loss: TraceLoss | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.call, self.layout, self.reduce = call, layout, reduce
        self.layers, self.heads = layers, heads
        self.remove, self.loss = remove, loss
        self.preprocessors: tuple[Any, ...] = ()  # processor and tokenizer, saved with the model

    def encode(self, batch: Any) -> WrappedInputs:
        """Return the batch with its layout; the model itself runs in `decide`."""
        layout = self.layout(self.model, _with_own_images(batch))
        # layouts are built on the CPU: move them to the model
        first = next(self.model.parameters(), None)
        return WrappedInputs(batch, layout if first is None else _moved(layout, first.device))

    def decide(self, features: WrappedInputs, mask: Masks | None = None) -> Output:
        """Run the model; a mask by span name may remove words, cells or regions.

        Masked keys are hidden from every query of every layer, with fused kernels still in use. A
        masked position still has its own output row. If the model averages rows, that row
        contributes: pass `wrap` a `remove` function that takes the parts out of the batch instead.
        """
        result, trace = self.run_traced(features, self.call, mask)
        prediction = extract_prediction(result)
        reduced = self.reduce(trace)
        maps = reduced if isinstance(reduced, tuple) else (reduced,)
        if not prediction.ndim:
            raise ValueError(
                "the prediction is a scalar, expected one row per sample; choose it with "
                "wrap(model, call=lambda model, batch: ...)"
            )
        for attention in maps:
            if len(attention) != len(prediction):
                raise ValueError(
                    f"the map has {len(attention)} rows and the prediction {len(prediction)}: the "
                    "model attends inside windows or splits the batch; pass wrap() a reduce= "
                    "that merges the rows"
                )
        if self.loss is None:
            return Output(prediction, maps)
        loss = self.attention_loss(trace, features.batch, prediction)
        return SupervisedOutput(prediction, maps, loss=loss)

    def forward(self, batch: Any = None, /, **inputs: Any) -> Output:
        """Return the output for a batch, or for keyword inputs."""
        return self.decide(self.encode(inputs if batch is None else batch))

    def run_traced(
        self,
        features: WrappedInputs,
        call: Callable[[nn.Module, Any], Any],
        mask: Masks | None = None,
    ) -> tuple[Any, AttentionTrace]:
        """Run `call` while capturing attention; return its result and the trace."""
        batch, layout = _with_own_images(features.batch), features.layout
        watcher = watch(self.model, self.layers, self.heads, layout)
        if mask is not None and not isinstance(mask, Mapping):
            raise TypeError(
                f"expected a mapping from span name to mask, such as {{'image': keep}}, got "
                f"{type(mask).__name__}"
            )
        if not mask:
            with watcher as trace:
                return call(self.model, batch), trace
        # the user removes parts from the batch: no edit is needed
        if self.remove is not None:
            with watcher as trace:
                return call(self.model, self.remove(batch, mask)), trace
        kept = key_weights(layout, mask)
        edit, masked_calls = mask_keys(kept, call_filter(layout))
        # the edit covers all layers, also where only some are captured
        with watch(self.model, edit=edit), watcher as trace:
            result = call(self.model, batch)
        # a mask without effect is an error: metrics would compare the model with itself
        if not masked_calls:
            if isinstance(result, Tensor) and len(result) != len(kept):
                raise ValueError(f"the mask has {len(kept)} samples, the batch has {len(result)}")
            raise ValueError(
                "no attention call of the model matches the keys of the layout, so the mask has no "
                "effect; pass wrap() a remove= function"
            )
        return result, trace

    def attention_loss(
        self, trace: AttentionTrace, batch: Any, prediction: Tensor
    ) -> SummedLoss | None:
        """Return the loss on the trace, tied to the prediction (see `tie_gradient`)."""
        loss = None if self.loss is None else self.loss(trace, _with_own_images(batch))
        if loss is None:
            return None
        if not hasattr(loss, "total"):
            raise TypeError(
                "a loss on attention must be a Loss (a sum and a count), such as "
                "losses.cross_entropy(attention, target) or Loss(values.sum(), count), got "
                f"{type(loss).__name__}. The sum of two is a Tensor: combine those of the same "
                "rows with Loss(0.5 * a.total + 0.5 * b.total, a.count)"
            )
        # ties the last layers, which a loss on attention alone does not reach
        return replace(loss, total=tie_gradient(loss.total, prediction))  # type: ignore[type-var]

    # --- on disk

    def save_pretrained(self, folder: Path | str) -> None:
        """Write the wrapped model with its processor and tokenizer.

        A Hugging Face model is saved with its own library. The other arguments of `wrap` (`call`,
        `layout`, `reduce`, ...) are code: pass them to `from_pretrained` again.
        """
        save_inner_model(unwrap_model(self.model), folder, self.preprocessors)

    def load_pretrained(self, folder: Path | str) -> "WrappedModel":
        """Load weights written by `save_pretrained`."""
        load_inner_weights(unwrap_model(self.model), folder)
        return self

    @classmethod
    def from_pretrained(
        cls, folder: Path | str, model: nn.Module | None = None, **arguments: Any
    ) -> "WrappedModel":
        """Load a model written by `save_pretrained`, in eval mode.

        Args:
            folder: the saved folder.
            model: a custom module to load the weights into; not needed for models of Hugging Face,
                timm and overt.
            **arguments: arguments of `wrap`.
        """
        if model is None:
            model = load_saved_model(folder)
        else:
            load_inner_weights(model, folder)
        return wrap(model, **arguments).eval()


def wrap(
    model: nn.Module,
    call: Predict | None = None,
    layout: LayoutSource | None = None,
    processor: Any = None,
    tokenizer: Any = None,
    layers: Collection[int | str] | None = None,
    heads: Sequence[int] | None = None,
    reduce: ReduceTrace = last_layer,
    remove: RemoveMasked | None = None,
    loss: TraceLoss | None = None,
) -> WrappedModel:
    """Wrap any PyTorch model as an `AttentionModel` on the same parameters.

    Args:
        model: the model. For DDP or FSDP, wrap the bare model first and parallelise the result, so
            that an attention loss is computed inside the forward pass.
        call: runs the model on a batch and returns the prediction, one row per sample, or the
            output of a Hugging Face model. By default the model is a Hugging Face model with
            named inputs. For a `Batch`, this and `layout`, `remove` and `loss` get one image per
            sample.
        layout: meaning of the positions, for both axes or as a pair (queries, keys), or a function
            of the batch. Inferred for Hugging Face models; otherwise unnamed positions.
        processor: image processor, for normalisation and for the pixels of each position.
        tokenizer: tokenizer, for the characters of each position.
        layers: layers to capture, all by default.
        heads: heads to capture, all by default.
        reduce: selects the output maps from the trace: `last_layer`, `all_layers`, or a function.
        remove: returns the batch without the masked parts, where hiding keys is not enough.
        loss: loss on the trace and the batch, returned as `output.loss`; None for a batch without a
            target.

    Returns:
        The wrapped model.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `model` is already parallelised.

    Example:
        >>> import torch
        >>> from overt.attention import words
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.attend = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        ...     def forward(self, x):
        ...         return self.attend(x, x, x, need_weights=False)[0].mean(dim=1)
        >>> model = wrap(Model(), call=lambda model, batch: model(batch), layout=words(5))
        >>> model(torch.rand(3, 5, 8)).attention_to("text").weights.shape
        torch.Size([3, 1, 2, 1, 5])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    # a compiled model may be wrapped; by name, because importing its class would import Dynamo
    if unwrap_model(model) is not model and type(model).__name__ != "OptimizedModule":
        raise ValueError(
            f"the attention loss must run inside {type(model).__name__}: wrap the bare model "
            f"first, as in {type(model).__name__}(wrap(model, ...))"
        )
    # replicas run in threads on copies of the modules: hooks and results would mix
    if isinstance(model, nn.DataParallel):
        raise ValueError("DataParallel runs copies that cannot be captured: wrap model.module")
    made = WrappedModel(
        model,
        make_predict(processor) if call is None else call,
        _layout_function(layout, processor, tokenizer),
        layers,
        heads,
        reduce,
        remove,
        loss,
    )
    # saved beside the weights, so that the folder can be loaded without the original
    made.preprocessors = tuple(one for one in (processor, tokenizer) if one is not None)
    return made


def _with_own_images(batch: Any) -> Any:
    """Return a batch with one image per sample for user functions, copying shared images."""
    return batch.with_own_images() if isinstance(batch, Batch) else batch


def _layout_function(
    layout: LayoutSource | None, processor: Any, tokenizer: Any
) -> Callable[[nn.Module, Any], Layouts | None]:
    if layout is None:
        return partial(infer_layout, processor=processor, tokenizer=tokenizer)
    return lambda model, batch: layout(batch) if callable(layout) else layout


def _moved(layout: Layouts | None, device: torch.device) -> Layouts | None:
    if layout is None:
        return None
    if isinstance(layout, tuple):
        return layout[0].to(device), layout[1].to(device)
    return layout.to(device)


# --- losses inside parallelised models


class _TieGradient(torch.autograd.Function):
    """Identity on the first tensor; its backward pass also gives zero gradients to the others."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, *others: Tensor) -> Tensor:
        ctx.like = [(one.shape, one.dtype, one.device) for one in others]
        return total.view_as(total)  # an input returned as it is would be a special case

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        # explicit zeros: with None the layers behind these tensors would still get no gradient
        zeros = [torch.zeros(s, dtype=t, device=d) for s, t, d in ctx.like]
        return gradient, *zeros


def tie_gradient(total: Float[Tensor, ""], *others: Tensor) -> Float[Tensor, ""]:
    """Return `total` with a backward pass that also sends zero gradients to `others`.

    A loss on attention alone leaves the last layers without a gradient. `DistributedDataParallel`
    would wait for them, and `fully_shard` does not restore the weights of a layer whose output has
    no gradient. It also connects the graph on a process without supervised rows.
    """
    tied: Tensor = _TieGradient.apply(total, *others)
    return tied


# --- pytree registration
#
# Before torch 2.13 `fully_shard` finds the tensors of an output through pytree. It silently drops
# the gradients of a model whose output is an unregistered dataclass.


def _flatten(value: Any) -> tuple[list[Any], Any]:
    """Return the fields of an output dataclass, for libraries that search it for tensors."""
    names = [one.name for one in fields(value)]
    parts = [getattr(value, name) for name in names]
    loss = getattr(value, "loss", None)
    if loss is not None:  # its class may be user-defined and not registered
        parts[names.index("loss")] = (loss.total, loss.count)
    return parts, (type(value), names, loss)


def _unflatten(parts: Any, context: Any) -> Any:
    kind, names, loss = context
    values = dict(zip(names, parts, strict=True))
    if loss is not None:
        total, count = values["loss"]
        values["loss"] = replace(loss, total=total, count=count)
    return kind(**values)


for _kind in (AttentionMap, Output, SupervisedOutput):
    _pytree.register_pytree_node(_kind, _flatten, _unflatten)
