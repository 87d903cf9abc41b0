"""Gradients that one process and two must agree on: `torchrun -m tests.train.wrapped OUT CASE...`.

Every process leaves OUT/CASE/rank-N.safetensors: the gradients that its wrapper left behind.
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

from overt import files
from overt.capture.watching import watch
from overt.models.adopting.adopted import Adopted, adopt
from overt.supervise import Loss, classification
from overt.train.trainer import label_loss, loss_inside, shared_mean
from tests.train.sentences import (
    LAYOUT,
    Sentences,
    Supervised,
    arguments,
    bert,
    everything,
    evidence,
)

UNEVEN = [[0, 1, 2, 3], [4, 5, 6, 7]]  # two supervised rows and one
NONE = [[1, 2, 6, 0], [3, 4, 5, 7]]  # three and none
Objective = Callable[[Loss, Loss], Tensor]


def both(task: Loss, attention: Loss) -> Tensor:
    return shared_mean(task) + shared_mean(attention)


def attention_alone(task: Loss, attention: Loss) -> Tensor:
    return shared_mean(attention)


def plain(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def unused(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def static(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, static_graph=True)


def sharded(model: nn.Module) -> nn.Module:
    assert isinstance(model, Adopted)
    for layer in model.model.bert.encoder.layer:
        fully_shard(layer)
    return fully_shard(model)


def sharded_whole(model: nn.Module) -> nn.Module:
    return fully_shard(model)


@dataclass(frozen=True)
class Case:
    wrap: Callable[[nn.Module], nn.Module]
    objective: Objective = both
    split: tuple[tuple[int, ...], ...] = tuple(map(tuple, UNEVEN))


CASES = {
    f"{wrap.__name__}-{objective.__name__}-{name}": Case(wrap, objective, tuple(map(tuple, split)))
    for wrap in (plain, unused, static, sharded, sharded_whole)
    for objective in (both, attention_alone)
    for name, split in (("uneven", UNEVEN), ("none", NONE))
}


def rows_of(indices: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: value[list(indices)] for name, value in everything().items()}


def make() -> Adopted:
    model = bert().double().train()
    return adopt(model, layout=LAYOUT, loss=evidence)


def gradients(
    model: nn.Module, batch: dict[str, Tensor], objective: Objective
) -> dict[str, Tensor]:
    """One forward and one backward pass; the whole gradient of every parameter."""
    batch["target"] = batch["target"].double()
    output = model(batch)
    objective(classification(output.prediction, batch["labels"]), output.loss).backward()
    return gathered(model)


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradient of every parameter that has one, however the model is wrapped."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[name.removeprefix("module.")] = whole.contiguous()
    return found


def warned() -> list[str]:
    """What `watch` says about a wrapped model."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch(plain(bert()))
    return [str(one.message) for one in caught]


def outside(wrap: Callable[[nn.Module], nn.Module], objective: Objective) -> str:
    """How it ends when the loss is computed outside the wrapper, as `watch` warns against."""
    model, batch = wrap(bert()), everything()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    try:
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with watch(model, layout=LAYOUT) as seen:
                    logits = model(**inputs).logits
            task = classification(logits, batch["labels"])
            objective(task, evidence(seen, batch)).backward()
    except RuntimeError as error:
        return str(error)
    return "done"


def trained(out: Path) -> dict[str, Tensor]:
    """Two steps of Trainer on the share of this process."""
    model = bert()
    with loss_inside(model, evidence, LAYOUT, only=["target"]):
        args = arguments(out, 2, accumulate=2)
        data = Sentences()
        Supervised(model, args, train_dataset=data, compute_loss_func=label_loss).train()
    return {name: p.detach().contiguous() for name, p in model.named_parameters()}


def main(out: Path, words: list[str]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for word in words:
        place = out / word
        place.mkdir(parents=True, exist_ok=True)
        if word == "warned":
            files.write_json(place / f"rank-{rank}.json", warned())
        elif word == "outside":
            told = {
                f"{wrap.__name__}-{objective.__name__}": outside(wrap, objective)
                for wrap in (plain, unused)
                for objective in (both, attention_alone)
            }
            files.write_json(place / f"rank-{rank}.json", told)
        elif word == "trained":
            files.write_tensors(place / f"rank-{rank}.safetensors", trained(out / "trainer"))
        else:
            case = CASES[word]
            found = gradients(case.wrap(make()), rows_of(case.split[rank]), case.objective)
            files.write_tensors(place / f"rank-{rank}.safetensors", found)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
