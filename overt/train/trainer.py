"""Losses on attention in loops that are not ours: Hugging Face's Trainer, Lightning, your own.

Sums become means here, over all processes and accumulated batches, as `fit` does it by itself.
"""

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass, make_dataclass, replace
from functools import cache, update_wrapper
from typing import Any

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from overt.capture.places import few
from overt.capture.seen import Seen
from overt.models.adopting.adopted import Adopted, Laid, adopt
from overt.models.adopting.feeding import prediction_of
from overt.supervise.loss import Loss

# What a Hugging Face output carries besides its own: the weighted sum, and what to divide it by.
TOTAL, ROWS = "attention_loss", "attention_rows"


# --- one division, one check


def shared_mean(loss: Loss) -> Float[Tensor, ""]:
    """The loss of one row, over the rows of all processes; 0 when there are none.

    For models inside `DistributedDataParallel` or `fully_shard`, which average gradients: each
    process gets its sum times the number of processes, divided by all rows. All processes must ask.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return loss.mean()
    count = loss.count.detach().to(loss.total, copy=True)
    torch.distributed.all_reduce(count)
    whole = replace(loss, total=loss.total * torch.distributed.get_world_size(), count=count)
    return whole.mean()


def check_reaches(model: nn.Module, loss: Loss | Float[Tensor, ""]) -> tuple[str, ...]:
    """The names of the parameters that get no gradient from a loss; ValueError when none gets any.

    A loss on attention can be computed and logged for weeks without ever moving a weight. Ask once,
    before training, with the loss on attention alone. No `.grad` is touched and the graph is kept.
    """
    total = loss.total if isinstance(loss, Loss) else loss
    if isinstance(loss, Loss) and not bool(loss.count):
        raise ValueError(
            "no row of this batch is supervised, so its loss says nothing about gradients; ask "
            "with a batch that has a target"
        )
    if not total.requires_grad:
        raise ValueError(
            "the loss has no gradient at all: was it computed under no_grad, from detached "
            "weights, or from numbers such as .item() gives?"
        )
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if not named:
        raise ValueError("every parameter of the model is frozen; nothing can learn from this loss")
    gradients = torch.autograd.grad(
        total, [one for _, one in named], retain_graph=True, allow_unused=True
    )
    silent = [
        name
        for (name, _), gradient in zip(named, gradients, strict=True)
        if gradient is None or not bool(gradient.any())
    ]
    if len(silent) == len(named):
        raise ValueError(
            f"the loss has a gradient, and it reaches none of the {len(named)} parameters of the "
            f"model ({few([name for name, _ in named], most=3)}): is it computed from another "
            "model, or from frozen layers alone?"
        )
    return tuple(silent)


# --- Hugging Face


@contextmanager
def loss_inside(
    model: nn.Module,
    loss: Callable[[Seen, Mapping[str, Any]], Loss | None],
    layout: Laid | None = None,
    layers: Collection[int | str] | None = None,
    only: Collection[str] = (),
) -> Iterator[nn.Module]:
    """While this is open, a Hugging Face model computes a loss on its attention as it runs.

    Its outputs then also hold `attention_loss`, a sum, and `attention_rows`, its count. It stays
    the user's own model: wrappers for many processes, saving and resuming work as they did.
    `loss(seen, inputs)` and `layout(inputs)` get the inputs by name; those named in `only` are for
    them and are kept from the model. A loss of None, of a batch without targets, adds nothing. A
    deep copy that is made meanwhile is of the plain model.
    """
    before, own = model.forward, "forward" in vars(model)
    adopted = adopt(model, layout=layout, layers=layers, loss=loss)
    model.forward = _Inside(before, adopted, only)
    try:
        yield model
    finally:
        if own:
            model.forward = before
        else:
            del model.forward


class _Inside:
    """The forward of a model that is watched; it looks like the one it stands for."""

    def __init__(self, before: Callable[..., Any], adopted: Adopted, only: Collection[str]) -> None:
        update_wrapper(self, before)
        self.before, self.adopted, self.only = before, adopted, only
        self.names = inspect.signature(before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        extra = {name: kwargs.pop(name) for name in self.only if name in kwargs}
        bound = self.names.bind_partial(*args).arguments
        inputs = {**bound, **kwargs, **extra}
        return _seen_inside(self.adopted, inputs, lambda *_: self.before(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """For the copy of the model, its own plain forward: a copy of this would run ours."""
        return copy.deepcopy(self.before, memo)


def _seen_inside(adopted: Adopted, inputs: Mapping[str, Any], run: Callable[..., Any]) -> Any:
    output, seen = adopted.see(adopted.encode(inputs), run)
    if not is_dataclass(output) or not isinstance(output, Mapping):
        raise ValueError(
            f"the model returned a {type(output).__name__}, which has no room for a loss; use a "
            "Hugging Face model with return_dict=True, or overt.adopt(model, loss=...)"
        )
    judged = adopted.judge(seen, inputs, prediction_of(output))
    if judged is None:
        return output
    assert isinstance(judged, Loss)
    if judged.batch_level:
        raise ValueError(
            "this loss compares whole batches, and Trainer may accumulate several; train with fit"
        )
    found = {TOTAL: judged.weight * judged.total, ROWS: judged.count.to(judged.total)}
    return _wider(type(output))(**output, **found)


@cache
def _wider(kind: Any) -> Any:
    """An output class with room for the loss: a dataclass, as wrappers take outputs apart."""
    return make_dataclass(kind.__name__, [(TOTAL, Any, None), (ROWS, Any, None)], bases=(kind,))


Items = Num[Tensor, "..."] | int | None  # the labels in a step, as Trainer counts them


def label_loss(
    outputs: Mapping[str, Any], labels: Tensor | None, num_items_in_batch: Items = None
) -> Float[Tensor, ""]:
    """Cross-entropy of the labels, divided by their number in all accumulated batches.

    For `Trainer(..., compute_loss_func=label_loss)`. Some models take `num_items_in_batch` and do
    not use it (`BertForSequenceClassification` of transformers 5.22): left to themselves, two
    accumulated batches give them twice the gradient of one. Of a causal language model each
    position is asked for the label of the next one, as the model itself does.
    """
    if labels is None:
        raise ValueError("the batch has no labels to compute the loss of")
    if labels.is_floating_point():
        raise ValueError(
            f"label_loss is the cross-entropy of class numbers, and these labels are {labels.dtype}"
            " (a regression, or several classes at once); give Trainer a compute_loss_func of your "
            "own, or leave it out, so that the model computes its loss"
        )
    logits = outputs["logits"].float()
    if "CausalLM" in type(outputs).__name__:
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return total / _items(labels, num_items_in_batch)


def compute_loss(
    outputs: Mapping[str, Any], labels: Tensor | None, num_items_in_batch: Items = None
) -> Float[Tensor, ""]:
    """`label_loss`, and the loss on attention divided by the number of labels as well.

    For a plain `Trainer(..., compute_loss_func=compute_loss)`, which knows how many labels a step
    has and not how many rows are supervised; `AttentionLoss` divides by these, and logs.
    """
    task = label_loss(outputs, labels, num_items_in_batch)
    assert labels is not None
    return task + _total(outputs) / _items(labels, num_items_in_batch)


def _items(labels: Tensor, given: Items) -> Tensor | int:
    return labels.ne(-100).sum().clamp_min(1) if given is None else given


def _total(outputs: Mapping[str, Any]) -> Tensor:
    total = outputs.get(TOTAL)
    if not isinstance(total, Tensor):
        raise ValueError(
            "the output of the model has no loss on attention; train inside "
            "`with overt.train.loss_inside(model, loss, ...)`"
        )
    return total


class AttentionLoss:
    """What a Trainer needs to add a loss on attention: `class Mine(AttentionLoss, Trainer): ...`.

    The model's own loss, label smoothing or `compute_loss_func` stay as they are. The loss on
    attention is added, divided by the supervised rows of all accumulated batches and processes, and
    logged as `attention_loss` beside `loss`, which is the sum of both. Train inside `loss_inside`.
    """

    _window: Tensor | None = None  # rows of the step under way, on all processes
    _noted: tuple[Tensor, ...] = ()  # loss and rows of each batch since the last log
    _promised: tuple[Tensor, ...] = ()  # rows of each step since then

    def rows(self, inputs: Mapping[str, Any]) -> Tensor:
        """How many rows of a batch have a target: what the loss on attention will count.

        Here, the labels that are there. Override it when that is another number; two numbers that
        differ are an error at the next log.
        """
        found: Tensor = inputs["labels"].ne(-100).sum()
        return found

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """The batches of one step, whose rows are counted before the first of them is used."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        if batches:
            rows = torch.stack([torch.as_tensor(self.rows(one)) for one in batches]).sum()
            rows = rows.to(device, torch.float32)
            self._window = self._everywhere(rows)
            self._promised = (*self._promised, rows)
        return batches, items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss that Trainer computes, and the one on attention."""
        task, outputs = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if TOTAL not in outputs and not model.training:  # evaluation may go without targets
            return (task, outputs) if return_outputs else task
        attention = _total(outputs) / self._rows(model, outputs).clamp_min(1)
        if model.training:
            self._noted = (*self._noted, torch.stack([attention.detach(), outputs[ROWS].detach()]))
            attention = attention * self._share(num_items_in_batch)
        plain = {name: value for name, value in outputs.items() if name not in (TOTAL, ROWS)}
        loss = task + attention
        return (loss, plain) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the mean loss on attention of the steps since the last time."""
        if "loss" in logs and self._noted:
            total, rows = torch.stack(self._noted).sum(dim=0)
            promised, steps = torch.stack(self._promised).sum(), len(self._promised)
            self._noted, self._promised = (), ()
            if float(rows) != float(promised):
                raise ValueError(
                    f"the loss on attention counted {float(rows):g} rows where rows() had said "
                    f"{float(promised):g}, so it was divided by the wrong number; override "
                    f"{type(self).__name__}.rows to count the rows that have a target"
                )
            logs = {**logs, TOTAL: float(self._everywhere(total)) / steps}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _rows(self, model: nn.Module, outputs: Mapping[str, Any]) -> Tensor:
        """The rows of the step under way; in evaluation, of the batch."""
        if not model.training:
            rows: Tensor = outputs[ROWS]
            return rows
        if self._window is None:
            raise ValueError("nothing has counted the rows of this step: is AttentionLoss first?")
        return self._window

    def _share(self, items: Any) -> float:
        """What undoes the division by accumulation steps and the mean over processes to come."""
        trainer: Any = self
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            counted = trainer.model_accepts_loss_kwargs and items is not None
            scaled = counted or trainer.compute_loss_func is not None
        steps = 1 if scaled else trainer.current_gradient_accumulation_steps
        return float(steps * trainer.accelerator.num_processes)

    def _everywhere(self, value: Tensor) -> Tensor:
        found: Tensor = self.accelerator.gather(value.reshape(1)).sum()  # type: ignore[attr-defined]
        return found
