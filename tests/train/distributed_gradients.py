"""Compute gradients that are the same in one and two processes.

Run `torchrun -m tests.train.distributed_gradients OUT CASE...`. Every process writes its gradients
to OUT/CASE/rank-N.safetensors.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from overt import io
from overt.capture.session import watch
from overt.losses import Loss, classification
from overt.nn.wrappers.wrapped_model import WrappedModel, wrap
from overt.train.integrations import add_attention_loss, distributed_mean, label_loss
from tests.train.sentences import (
    LAYOUT,
    Sentences,
    Supervised,
    bert,
    full_batch,
    target_word_loss,
    training_arguments,
)

UNEVEN = [[0, 1, 2, 3], [4, 5, 6, 7]]  # two supervised rows in one process, one in the other
NONE = [[1, 2, 6, 0], [3, 4, 5, 7]]  # three supervised rows in one process, none in the other
Objective = Callable[[Loss, Loss], Tensor]


def task_and_attention(task: Loss, attention: Loss) -> Tensor:
    return distributed_mean(task) + distributed_mean(attention)


def attention_only(task: Loss, attention: Loss) -> Tensor:
    return distributed_mean(attention)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def ddp_find_unused(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def ddp_static_graph(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, static_graph=True)


def fsdp_per_layer(model: nn.Module) -> nn.Module:
    assert isinstance(model, WrappedModel)
    for layer in model.model.bert.encoder.layer:
        fully_shard(layer)
    return fully_shard(model)


def fsdp_whole_model(model: nn.Module) -> nn.Module:
    return fully_shard(model)


@dataclass(frozen=True)
class Case:
    wrap: Callable[[nn.Module], nn.Module]
    objective: Objective = task_and_attention
    split: tuple[tuple[int, ...], ...] = tuple(map(tuple, UNEVEN))


CASES = {
    f"{wrap.__name__}-{objective.__name__}-{name}": Case(wrap, objective, tuple(map(tuple, split)))
    for wrap in (ddp, ddp_find_unused, ddp_static_graph, fsdp_per_layer, fsdp_whole_model)
    for objective in (task_and_attention, attention_only)
    for name, split in (("uneven", UNEVEN), ("none", NONE))
}


def rows_of(indices: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: value[list(indices)] for name, value in full_batch().items()}


def make() -> WrappedModel:
    model = bert().double().train()
    return wrap(model, layout=LAYOUT, loss=target_word_loss)


def gradients(
    model: nn.Module, batch: dict[str, Tensor], objective: Objective
) -> dict[str, Tensor]:
    """Run one forward and backward pass and return the full gradient of every parameter."""
    batch["target"] = batch["target"].double()
    output = model(batch)
    objective(classification(output.prediction, batch["labels"]), output.loss).backward()
    return full_gradients(model)


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the full gradient of every parameter that has one, for any wrapper."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[name.removeprefix("module.")] = full.contiguous()
    return found


def watch_warnings() -> list[str]:
    """Return the warnings of `watch` about a wrapped model."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch(ddp(bert()))
    return [str(one.message) for one in caught]


def try_loss_outside(wrap: Callable[[nn.Module], nn.Module], objective: Objective) -> str:
    """Compute the loss outside the wrapper, against the warning; return the error or "done"."""
    model, batch = wrap(bert()), full_batch()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    try:
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with watch(model, layout=LAYOUT) as trace:
                    logits = model(**inputs).logits
            task = classification(logits, batch["labels"])
            objective(task, target_word_loss(trace, batch)).backward()
    except RuntimeError as error:
        return str(error)
    return "done"


def train_with_trainer(out: Path) -> dict[str, Tensor]:
    """Train two steps with Trainer on the shard of this process."""
    model = bert()
    with add_attention_loss(model, target_word_loss, LAYOUT, only=["target"]):
        args = training_arguments(out, 2, accumulate=2)
        data = Sentences()
        Supervised(model, args, train_dataset=data, compute_loss_func=label_loss).train()
    return {name: p.detach().contiguous() for name, p in model.named_parameters()}


def main(out: Path, words: list[str]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for word in words:
        folder = out / word
        folder.mkdir(parents=True, exist_ok=True)
        if word == "watch-warnings":
            io.write_json(folder / f"rank-{rank}.json", watch_warnings())
        elif word == "loss-outside":
            outcomes = {
                f"{wrap.__name__}-{objective.__name__}": try_loss_outside(wrap, objective)
                for wrap in (ddp, ddp_find_unused)
                for objective in (task_and_attention, attention_only)
            }
            io.write_json(folder / f"rank-{rank}.json", outcomes)
        elif word == "trainer-weights":
            io.write_tensors(
                folder / f"rank-{rank}.safetensors", train_with_trainer(out / "trainer")
            )
        else:
            case = CASES[word]
            found = gradients(case.wrap(make()), rows_of(case.split[rank]), case.objective)
            io.write_tensors(folder / f"rank-{rank}.safetensors", found)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
