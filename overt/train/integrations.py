"""Attention losses in other training loops: Hugging Face Trainer, Lightning, your own.

Sums are divided here by the counts over all processes and accumulated batches, as in `fit`.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, make_dataclass, replace
from functools import cache, update_wrapper
from typing import Any

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from overt.attention import AttentionMap
from overt.capture.discovery import format_names
from overt.capture.trace import AttentionTrace
from overt.losses.answer_grounding import ANSWER_INPUTS, TARGET, answer_grounding
from overt.losses.attention_losses import kl
from overt.losses.loss import Loss
from overt.nn.wrappers.hf_inputs import extract_prediction
from overt.nn.wrappers.wrapped_model import LayoutSource, WrappedModel, wrap

# Additional fields of a Hugging Face output: the weighted loss sum and its count.
TOTAL, ROWS = "attention_loss", "attention_rows"


# --- distributed mean, gradient check


def distributed_mean(loss: Loss) -> Float[Tensor, ""]:
    """Return the mean loss over the rows of all processes; 0 without rows.

    For models inside `DistributedDataParallel` or `fully_shard`, which average gradients: each
    process gets its sum times the number of processes, divided by all rows. All processes must call
    it.

    Args:
        loss: The loss of this process.

    Returns:
        The mean, to be differentiated.

    Example:
        >>> distributed_mean(Loss(torch.tensor(6.0), torch.tensor(3.0)))
        tensor(2.)
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return loss.mean()
    count = loss.count.detach().to(loss.total, copy=True)  # all_reduce writes in place
    torch.distributed.all_reduce(count)
    # DDP divides gradients by the number of processes: multiply by it first
    whole = replace(loss, total=loss.total * torch.distributed.get_world_size(), count=count)
    return whole.mean()


def check_gradient_flow(model: nn.Module, loss: Loss | Float[Tensor, ""]) -> tuple[str, ...]:
    """Return the names of the parameters that get no gradient from a loss.

    An attention loss can be computed and logged without changing any weight. Call this once before
    training, with the attention loss alone. No `.grad` is changed and the graph is kept.

    Args:
        model: The model.
        loss: A loss that was computed from it.

    Returns:
        The names of trainable parameters without a gradient; empty if all have one.

    Raises:
        ValueError: No parameter gets a gradient, or the batch has no supervised row.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> check_gradient_flow(model, model[0](torch.ones(1, 2)).sum())  # no gradient
        ('1.weight', '1.bias')
    """
    total = loss.total if isinstance(loss, Loss) else loss
    if isinstance(loss, Loss) and not bool(loss.count):
        raise ValueError(
            "no row of this batch is supervised, so its loss has no gradient: use a batch with a "
            "target"
        )
    if not total.requires_grad:
        raise ValueError(
            "the loss has no gradient: was it computed under no_grad, from detached weights, or "
            "with .item()?"
        )
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if not named:
        raise ValueError("all parameters of the model are frozen: none can learn from this loss")
    # autograd.grad instead of backward, so that `.grad` is left alone
    gradients = torch.autograd.grad(
        total, [one for _, one in named], retain_graph=True, allow_unused=True
    )
    without = [
        name
        for (name, _), gradient in zip(named, gradients, strict=True)
        # a gradient of zeros teaches as little as none
        if gradient is None or not bool(gradient.any())
    ]
    if len(without) == len(named):
        raise ValueError(
            f"the gradient of the loss reaches none of the {len(named)} parameters of the model "
            f"({format_names([name for name, _ in named], most=3)}): is the loss computed from "
            "another model, or from frozen layers only?"
        )
    return tuple(without)


# --- Hugging Face


@contextmanager
def add_attention_loss(
    model: nn.Module,
    loss: Callable[[AttentionTrace, Mapping[str, Any]], Loss | None],
    layout: LayoutSource | None = None,
    layers: Collection[int | str] | None = None,
    only: Collection[str] = (),
    heads: Sequence[int] | None = None,
) -> Iterator[nn.Module]:
    """Let a Hugging Face model compute an attention loss in its forward pass, in a `with` block.

    Its outputs then also have `attention_loss`, a sum, and `attention_rows`, its count. The model
    is patched, not wrapped: DDP, FSDP, saving and resuming work as before. A deep copy made inside
    the block is of the original model. The loop adds `attention_loss` to its loss, as
    `AttentionLossMixin` does; a warning says so if it was never trained.

    Args:
        model: A Hugging Face model.
        loss: Function `(trace, inputs)` that returns the loss; None for a batch without targets.
        layout: Layout of the tokens, or a function of the inputs that returns it.
        layers: Layers to capture; all by default.
        only: Names of inputs for `loss` and `layout`, which the model does not receive.
        heads: Heads to capture, the same in each layer; all by default. For others in each layer,
            use `trace.layer(4).heads([1])` in `loss`.

    Yields:
        The model.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from overt import losses
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = BertForSequenceClassification(BertConfig(vocab_size=9, **sizes))
        >>> def to_itself(trace, inputs):
        ...     return losses.mse(trace.map(), trace.map().detach())
        >>> with add_attention_loss(model, to_itself):
        ...     output = model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([0]))
        >>> output.attention_loss.item(), output.attention_rows.item()
        (0.0, 3.0)
    """
    # an attribute on the instance hides the method of the class; deleting it restores the method
    before, own = model.forward, "forward" in vars(model)
    wrapped = wrap(model, layout=layout, layers=layers, heads=heads, loss=loss)
    training = _GradientRecord()
    model.forward = _ForwardWithLoss(before, wrapped, only, training)
    try:
        yield model
        training.warn_if_untrained()
    finally:
        if own:
            model.forward = before
        else:
            del model.forward


@contextmanager
def supervise_answers(
    model: nn.Module,
    layers: Collection[int | str] | None = None,
    heads: Sequence[int] | None = None,
    compare: Callable[[AttentionMap, AttentionMap], Loss] = kl,
    weight: float = 1.0,
) -> Iterator[nn.Module]:
    """Supervise where a vision-language model looks when it writes answer words, in a `with` block.

    `add_attention_loss` with `overt.losses.answer_grounding`, for any Hugging Face model that reads
    image tokens and words in one sequence. Batches are those of `collate_answer_targets`.

    Args:
        model: A Hugging Face model; parallelize it afterwards.
        layers: Layers to supervise, by name or index, -1 for the last; all of the decoder by
            default.
        heads: Heads to supervise in these layers; all by default.
        compare: Loss of two maps.
        weight: Factor of the loss.

    Yields:
        The model.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        >>> model = BertModel(BertConfig(vocab_size=9, **sizes))
        >>> with supervise_answers(model, layers=[-1], weight=0.5):
        ...     output = model(
        ...         input_ids=torch.tensor([[1, 2, 3]]),
        ...         grounded_words=torch.tensor([[2]]),
        ...         grounded_tokens=torch.tensor([[0, 1]]),
        ...         grounded_target=torch.tensor([[[1.0, 0.0]]]),
        ...     )
        >>> output.attention_rows.item()
        1.0
    """

    def loss(trace: AttentionTrace, inputs: Mapping[str, Any]) -> Loss | None:
        found = answer_grounding(trace, inputs, compare, heads)
        return None if found is None else weight * found

    # targets say where the image tokens are: no layout is inferred, which some models cannot
    with add_attention_loss(model, loss, lambda inputs: None, layers, ANSWER_INPUTS):
        yield model


class _GradientRecord:
    """Which of the prediction and the loss on attention received a gradient."""

    def __init__(self) -> None:
        self.prediction = self.attention = False

    def watch(self, prediction: Tensor, loss: Tensor) -> None:
        """Record the gradients of a forward pass; those of a compiled one are not recorded."""
        if torch.compiler.is_compiling() or not (prediction.requires_grad and loss.requires_grad):
            return
        prediction.register_hook(self._on_prediction)
        loss.register_hook(self._on_attention)

    def warn_if_untrained(self) -> None:
        """Warn if the task was trained and the loss on attention was not."""
        if self.prediction and not self.attention:
            warnings.warn(
                "the attention loss was computed and never trained: use "
                "`class MyTrainer(AttentionLossMixin, Trainer)`, "
                "Trainer(compute_loss_func=compute_loss), or add output.attention_loss / "
                "output.attention_rows to the loss",
                stacklevel=4,
            )

    def _on_prediction(self, gradient: Tensor) -> None:
        self.prediction = True

    def _on_attention(self, gradient: Tensor) -> None:
        self.attention = True


class _ForwardWithLoss:
    """Forward method that captures attention and adds the loss; has the original signature."""

    def __init__(
        self,
        before: Callable[..., Any],
        wrapped: WrappedModel,
        only: Collection[str],
        training: _GradientRecord,
    ) -> None:
        # Trainer removes columns that `forward` does not name: the signature must stay the
        # original's
        update_wrapper(self, before)
        self.before, self.wrapped, self.only, self.training = before, wrapped, only, training
        self.names = inspect.signature(before)
        self.running = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.running:  # a layout is measured by running the model: without a loss
            return self.before(*args, **kwargs)
        self.running = True
        try:
            return self._run(*args, **kwargs)
        finally:
            self.running = False

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        # inputs of the loss that the model itself does not take
        extra = {name: kwargs.pop(name) for name in self.only if name in kwargs}
        bound = self.names.bind_partial(*args).arguments
        inputs = {**bound, **kwargs, **extra}
        return _forward_with_loss(
            self.wrapped, inputs, lambda *_: self.before(*args, **kwargs), self.training
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the original forward for a copy of the model: a copy of this would run `model`."""
        return copy.deepcopy(self.before, memo)


def _forward_with_loss(
    wrapped: WrappedModel,
    inputs: Mapping[str, Any],
    run: Callable[..., Any],
    training: _GradientRecord,
) -> Any:
    output, seen = wrapped.run_traced(wrapped.encode(inputs), run)
    if not is_dataclass(output) or not isinstance(output, Mapping):
        raise ValueError(
            f"expected a Hugging Face model output, got a {type(output).__name__}: use "
            "return_dict=True, or overt.wrap(model, loss=...)"
        )
    prediction = extract_prediction(output)
    judged = wrapped.attention_loss(seen, inputs, prediction)
    if judged is None:
        return output
    assert isinstance(judged, Loss)
    # Trainer divides sums by counts of all batches, which is wrong for a loss that is not a sum
    if judged.batch_level:
        raise ValueError(
            "batch-level losses cannot be used with Trainer, which may accumulate batches: use fit"
        )
    found = {TOTAL: judged.weight * judged.total, ROWS: judged.count.to(judged.total)}
    training.watch(prediction, found[TOTAL])
    return _output_with_loss(type(output))(**output, **found)


@cache
def _output_with_loss(kind: Any) -> Any:
    """Return an output class with fields for the loss: DDP and FSDP need a dataclass."""
    # cached: every forward pass must return the same class
    return make_dataclass(kind.__name__, [(TOTAL, Any, None), (ROWS, Any, None)], bases=(kind,))


Items = Num[Tensor, "..."] | int | None  # number of labels in a step, from Trainer


def label_loss(
    outputs: Mapping[str, Any], labels: Tensor | None, num_items_in_batch: Items = None
) -> Float[Tensor, ""]:
    """Compute the cross-entropy of the labels, divided by their number in all accumulated batches.

    For `Trainer(..., compute_loss_func=label_loss)`. Some models accept `num_items_in_batch` and
    ignore it (`BertForSequenceClassification` of transformers 5.22): with their own loss, two
    accumulated batches have twice the gradient of one. For causal language models the labels are
    shifted by one position, as in the model itself.

    Args:
        outputs: Model output with `logits`.
        labels: Class indices; -100 is ignored.
        num_items_in_batch: Number of labels in all accumulated batches.

    Returns:
        The mean loss.

    Raises:
        ValueError: There are no labels, or they are not class indices.

    Example:
        >>> outputs = {"logits": torch.zeros(2, 4)}
        >>> label_loss(outputs, torch.tensor([1, -100]))  # log 4
        tensor(1.3863)
    """
    if labels is None:
        raise ValueError("label_loss needs labels, and the batch has none")
    if labels.is_floating_point():
        raise ValueError(
            f"label_loss needs class indices, got labels of {labels.dtype} (regression, or several "
            "classes at once): pass Trainer your own compute_loss_func, or none, so that the model "
            "computes its loss"
        )
    logits = outputs["logits"].float()
    if "CausalLM" in type(outputs).__name__:
        # the logits at position i predict token i + 1
        logits, labels = logits[:, :-1], labels[:, 1:]
    # the sum: Trainer accumulates batches of different sizes, and a mean per batch would weigh them
    # equally
    total = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return total / _label_count(labels, num_items_in_batch)


def compute_loss(
    outputs: Mapping[str, Any], labels: Tensor | None, num_items_in_batch: Items = None
) -> Float[Tensor, ""]:
    """Compute `label_loss` plus the attention loss, both divided by the number of labels.

    For an unmodified `Trainer(..., compute_loss_func=compute_loss)`, which has the number of labels
    of a step but not the number of supervised rows. `AttentionLossMixin` divides by the supervised
    rows and also logs. Without gradients, as in evaluation, it is `label_loss` alone, so the best
    checkpoint is chosen by the task.

    Args:
        outputs: Model output inside `add_attention_loss`.
        labels: Class indices; -100 is ignored.
        num_items_in_batch: Number of labels in all accumulated batches.

    Returns:
        The sum of both losses.

    Example:
        >>> outputs = {"logits": torch.zeros(1, 4), "attention_loss": torch.tensor(0.5)}
        >>> compute_loss(outputs, torch.tensor([1]))  # log 4 + 0.5
        tensor(1.8863)
    """
    task = label_loss(outputs, labels, num_items_in_batch)
    if not torch.is_grad_enabled():
        return task
    assert labels is not None
    return task + _attention_total(outputs) / _label_count(labels, num_items_in_batch)


def _label_count(labels: Tensor, given: Items) -> Tensor | int:
    # -100 is the label that cross_entropy ignores
    return labels.ne(-100).sum().clamp_min(1) if given is None else given


def _attention_total(outputs: Mapping[str, Any]) -> Tensor:
    total = outputs.get(TOTAL)
    if not isinstance(total, Tensor):
        raise ValueError(
            "the model output has no attention loss: train inside "
            "`with overt.train.add_attention_loss(model, loss, ...)`"
        )
    return total


class AttentionLossMixin:
    """Mixin that adds an attention loss to a Hugging Face Trainer.

    Use it as `class MyTrainer(AttentionLossMixin, Trainer)`, and train inside `add_attention_loss`.
    The model's own loss, label smoothing and `compute_loss_func` are kept. The attention loss is
    divided by the supervised rows of all accumulated batches and processes, added to the loss, and
    logged as `attention_loss` beside `loss`, which is the sum of both.

    In evaluation nothing is added: `eval_loss`, which selects the best checkpoint, is the task loss
    alone. `eval_attention_loss` is logged if rows are supervised.

    Example:
        >>> AttentionLossMixin().rows({"labels": torch.tensor([0, -100, 2])})  # -100 has no label
        tensor(2)
    """

    _step_rows: Tensor | None = None  # rows of the current step, over all processes
    _train_losses: tuple[Tensor, ...] = ()  # loss and rows per batch since the last log
    _expected_rows: tuple[Tensor, ...] = ()  # rows per step since the last log
    _eval_losses: tuple[Tensor, ...] = ()  # sum and rows per batch of the current evaluation

    def rows(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return how many rows of a batch have a target, as the attention loss counts them.

        By default, the supervised words of `overt.losses.answer_grounding`, or the number of labels
        if there are none. Override it if the loss counts other rows; a difference raises
        `ValueError` at the next log.
        """
        found: Tensor
        if TARGET in inputs:
            found = (inputs[TARGET] > 0).any(dim=-1).sum()
        else:
            found = inputs["labels"].ne(-100).sum()
        return found

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Return the batches of one step, and count their rows in advance."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        if batches:
            # counted before the first backward pass of the step, because gradients are divided by
            # all rows
            rows = torch.stack([torch.as_tensor(self.rows(one)) for one in batches]).sum()
            rows = rows.to(device, torch.float32)
            self._step_rows = self._sum_over_processes(rows)
            self._expected_rows = (*self._expected_rows, rows)
        return batches, items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss of Trainer, plus the attention loss in training."""
        task, outputs = super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        # evaluation collects all outputs as predictions: the fields of the loss are none
        plain = {name: value for name, value in outputs.items() if name not in (TOTAL, ROWS)}
        if not model.training:
            if TOTAL in outputs:  # evaluation data may have no targets
                judged = torch.stack([outputs[TOTAL].detach(), outputs[ROWS].detach()])
                self._eval_losses = (*self._eval_losses, judged)
            return (task, plain if TOTAL in outputs else outputs) if return_outputs else task
        attention = _attention_total(outputs) / self._rows().clamp_min(1)
        self._train_losses = (
            *self._train_losses,
            torch.stack([attention.detach(), outputs[ROWS].detach()]),
        )
        loss = task + attention * self._scale(num_items_in_batch)
        return (loss, plain) if return_outputs else loss

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate, with the mean attention loss per supervised row as an additional metric."""
        self._eval_losses = ()
        found = super().evaluation_loop(  # type: ignore[misc]
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        device = self.accelerator.device  # type: ignore[attr-defined]
        total, rows = torch.stack([torch.zeros(2, device=device), *self._eval_losses]).sum(dim=0)
        total, rows = (
            self._sum_over_processes(total),
            self._sum_over_processes(rows),
        )  # a collective: all processes must call it
        if float(rows):
            found.metrics[f"{metric_key_prefix}_{TOTAL}"] = float(total / rows)
        self._eval_losses = ()
        return found

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the mean attention loss of the steps since the last log."""
        if "loss" in logs and self._train_losses:
            total, rows = torch.stack(self._train_losses).sum(dim=0)
            expected, steps = torch.stack(self._expected_rows).sum(), len(self._expected_rows)
            self._train_losses, self._expected_rows = (), ()
            # compared when logging, which synchronizes anyway
            if float(rows) != float(expected):
                raise ValueError(
                    f"the attention loss counted {float(rows):g} rows, rows() returned "
                    f"{float(expected):g}: override {type(self).__name__}.rows to count the rows "
                    "that have a target"
                )
            logs = {**logs, TOTAL: float(self._sum_over_processes(total)) / steps}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _rows(self) -> Tensor:
        """Return the rows of the current step."""
        if self._step_rows is None:
            raise ValueError(
                "the rows of this step were not counted: AttentionLossMixin must be the first base"
            )
        return self._step_rows

    def _scale(self, items: Any) -> float:
        """Return the factor that cancels the later division by steps and processes."""
        trainer: Any = self
        # Trainer divides the loss by the accumulation steps unless it was divided by a count
        # already, and DDP averages over processes: our loss is divided by the rows of all of them,
        # so undo both
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            counted = trainer.model_accepts_loss_kwargs and items is not None
            scaled = counted or trainer.compute_loss_func is not None
        steps = 1 if scaled else trainer.current_gradient_accumulation_steps
        return float(steps * trainer.accelerator.num_processes)

    def _sum_over_processes(self, value: Tensor) -> Tensor:
        found: Tensor = self.accelerator.gather(value.reshape(1)).sum()  # type: ignore[attr-defined]
        return found
