"""FSDP through Accelerate on a card, beside one process: `python -m tests.trust.accelerated OUT`.

A small BERT with a loss on its attention takes three steps; of eight sentences three are
supervised, so that two processes have unequal shares. One process has the card to itself (NCCL),
two share it (gloo, because NCCL refuses two processes on one card). Every launch leaves a JSON file
in OUT, and fsdp.json holds them all with the row for the table of trust.

Accelerate has FSDP for cards alone. Without a card the same is done by `fully_shard` itself, in two
processes on the CPU: that tries this program, and gives no row.
"""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from transformers import BertConfig, BertForSequenceClassification

from overt.attention import AttentionMap, Layout, Span, words
from overt.capture.seen import Seen
from overt.capture.watching import watch
from overt.models.adopting.adopted import Adopted, adopt
from overt.supervise import Loss, classification, cross_entropy
from overt.train.trainer import shared_mean

ROOT = Path(__file__).resolve().parents[2]
WORDS, ROWS, STEPS = 15, 8, 3
SUPERVISED = (1, 2, 6)  # of eight rows: two in the first half, one in the second
LAYOUT = Layout(
    (Span("class", (1,), slice(0, 1)), Span("text", (WORDS,), slice(1, WORDS + 1))), WORDS + 1
)
MARK = 1e-5  # float32, three steps
TEST = "test_18_accelerate.py::test_fsdp_through_accelerate_takes_the_steps_of_one"
ASKED = "FSDP through Accelerate on a GPU: losses, gradients and weights of one process to 1e-5"
OUTSIDE = "attention alone, outside"
CHOICES = {"fsdp2": 2, "fsdp1": 1, "hand": 0}

Mean = Callable[[Loss], Tensor]
Told = Callable[[Loss], float]
Parts = Mapping[str, Tensor]


# --- the task


def bert() -> BertForSequenceClassification:
    """Four layers of 64, without dropout; the same weights in every process."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=32, num_labels=3, initializer_range=0.2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return BertForSequenceClassification(config)


def sentences(device: torch.device) -> dict[str, Tensor]:
    """Eight sentences of unequal length; of three it is known which word counts."""
    drawn = torch.Generator().manual_seed(1)
    target = torch.zeros(ROWS, WORDS)
    for row in SUPERVISED:
        target[row, row % 5] = 1
    mask = torch.ones(ROWS, WORDS + 1, dtype=torch.long)
    for row in range(ROWS):
        mask[row, WORDS + 1 - row % 4 :] = 0
    batch = {
        "input_ids": torch.randint(1, 40, (ROWS, WORDS + 1), generator=drawn),
        "attention_mask": mask,
        "labels": torch.arange(ROWS) % 3,
        "target": target,
    }
    return {name: value.to(device) for name, value in batch.items()}


def evidence(seen: Seen, inputs: Mapping[str, Any]) -> Loss:
    """The last layer should look from the class token at the word that counts."""
    target = AttentionMap.from_cells(inputs["target"], words(WORDS)).normalize()
    return cross_entropy(Seen([seen.calls[-1]], seen.layout).log_block("class", "text"), target)


def supervised() -> Adopted:
    """The loss on attention is computed inside the forward pass, which is then wrapped."""
    return adopt(bert(), layout=LAYOUT, loss=evidence)


def mover(model: nn.Module) -> torch.optim.Optimizer:
    """SGD: AdamW would blow up rounding where a gradient is nearly zero."""
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def share(batch: Parts, rank: int, world: int) -> dict[str, Tensor]:
    """The rows of one process."""
    size = ROWS // world
    return {name: value[rank * size : (rank + 1) * size] for name, value in batch.items()}


# --- steps, however the model is wrapped


def losses_of(model: nn.Module, batch: Parts) -> list[Loss]:
    """Task and attention."""
    output = model(dict(batch))
    return [classification(output.prediction, batch["labels"]), output.loss]


def taken(
    model: nn.Module,
    optimizer: Any,
    batch: Parts,
    mean: Mean,
    told: Told,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps: the loss of each over all rows, and the whole gradients of the first."""
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        task, attention = losses_of(model, batch)
        backward(mean(task) + mean(attention))
        if step == 0:
            first = gradients(model)
        optimizer.step()
        losses.append(told(task) + told(attention))
    return losses, first


def one_row(loss: Loss) -> float:
    """The loss of one row of this process."""
    return float(loss.mean())


def one_row_of_all(loss: Loss) -> float:
    """The loss of one row over the rows of all processes."""
    both = torch.stack([loss.total.detach(), loss.count.to(loss.total)])
    torch.distributed.all_reduce(both)
    return float(both[0] / both[1])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradient of every parameter, however it is cut up; all processes must ask."""
    named = model.named_parameters()
    return {plain(name): whole(p.grad) for name, p in named if p.grad is not None}


def whole(one: Tensor) -> Tensor:
    """A tensor in one piece."""
    return (one.full_tensor() if isinstance(one, DTensor) else one).detach().double().cpu()


def plain(name: str) -> str:
    """The name of a parameter without what a wrapper has put into it."""
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


def apart(ours: Parts, theirs: Parts) -> float:
    """The length of a difference as a share of what it should be; endless where parts are gone."""
    if set(ours) != set(theirs):
        return float("inf")
    names = sorted(theirs)
    one, two = (torch.cat([each[n].double().flatten() for n in names]) for each in (ours, theirs))
    return float((one - two).norm() / two.norm())


def alone(device: torch.device) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, first gradients and last weights of one process without any wrapper."""
    model = supervised().to(device)
    losses, first = taken(model, mover(model), sentences(device), Loss.mean, one_row)
    return losses, first, {name: whole(p) for name, p in model.named_parameters()}


# --- ways to wrap


@dataclass(frozen=True)
class Launch:
    """A process among others: `prepare` wraps a model and its optimizer."""

    device: torch.device
    rank: int
    world: int
    prepare: Callable[[nn.Module, Any], tuple[nn.Module, Any]]
    backward: Callable[[Tensor], None]


def by_accelerate(version: int) -> Launch:
    """Accelerate with FSDP: every layer of BERT is a unit, and so is the rest."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, InitProcessGroupKwargs

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        reshard_after_forward=True if version == 2 else "FULL_SHARD",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["BertLayer"],
        use_orig_params=True,
    )
    several = int(os.environ["WORLD_SIZE"]) > 1
    handlers = [InitProcessGroupKwargs(backend="gloo")] if several else []
    launch = Accelerator(fsdp_plugin=plugin, kwargs_handlers=handlers)
    return Launch(
        launch.device,
        launch.process_index,
        launch.num_processes,
        launch.prepare,
        launch.backward,
    )


def by_hand() -> Launch:
    """The same by `fully_shard`, on CPUs."""
    torch.distributed.init_process_group("gloo")

    def prepare(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        for layer in model.model.bert.encoder.layer:
            fully_shard(layer)
        fully_shard(model)
        return model, mover(model)

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return Launch(torch.device("cpu"), rank, world, prepare, Tensor.backward)


# --- one launch


def wrapped(way: str, out: Path) -> None:
    """What this process came to beside one that is alone."""
    torch.backends.cuda.matmul.allow_tf32 = False
    version = CHOICES[way]
    launch = by_accelerate(version) if version else by_hand()
    losses, first, last = alone(launch.device)
    model = supervised()
    model, optimizer = launch.prepare(model, mover(model))
    mine = share(sentences(launch.device), launch.rank, launch.world)
    ours, found = taken(model, optimizer, mine, shared_mean, one_row_of_all, launch.backward)
    result = {
        "way": way,
        "processes": launch.world,
        "backend": torch.distributed.get_backend(),
        "losses": ours,
        "alone": losses,
        "loss": max(abs(a - b) / abs(b) for a, b in zip(ours, losses, strict=True)),
        "gradients": None if version == 1 else apart(found, first),  # its own are cut up flat
        "weights": apart(weights(model), last),
        "cut up": sum(isinstance(p, DTensor) for p in model.parameters()),
        "naive": {} if version == 1 else naive(launch, mine, first),
    }
    if launch.rank == 0:
        (out / f"{way}-{launch.world}.json").write_text(json.dumps(result, indent=1) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters in one piece."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {plain(name): whole(p).clone() for name, p in model.named_parameters()}
    return {plain(name): whole(p) for name, p in model.named_parameters()}


def naive(launch: Launch, mine: Parts, first: Parts) -> dict[str, Any]:
    """The usual way: a mean in each process; and the loss on attention taken outside."""
    found: dict[str, Any] = {}
    if launch.world > 1:
        model = fully_shard(supervised().to(launch.device))
        task, attention = losses_of(model, mine)
        (task.mean() + attention.mean()).backward()
        found["mean of means"] = apart(gradients(model), first)
    bare = bert().to(launch.device)
    for layer in bare.bert.encoder.layer:
        fully_shard(layer)
    fully_shard(bare)
    inputs = {name: mine[name] for name in ("input_ids", "attention_mask")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with watch(bare, layout=LAYOUT) as seen:
                bare(**inputs)
        shared_mean(evidence(seen, mine)).backward()
        taught = sum(p.grad is not None for p in bare.parameters())
        found[OUTSIDE] = f"{taught} of {len(first)} parameters have a gradient"
    except RuntimeError as error:
        found[OUTSIDE] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found


# --- all of them


def launched(out: Path, way: str, world: int) -> dict[str, Any]:
    """What a launch left, or how it ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), "-m", "tests.trust.accelerated", str(out), way]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env |= {} if way == "hand" else {"ACCELERATE_TORCH_DEVICE": "cuda:0"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    left = out / f"{way}-{world}.json"
    if done.returncode == 0 and left.is_file():
        return dict(json.loads(left.read_text()))
    return {"way": way, "processes": world, "failed": (done.stdout + done.stderr)[-3000:]}


def row_of(found: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """The row of the table of trust; launches that failed are named in it."""
    went = [one for one in found if "failed" not in one]
    worst = {
        name: max(one[name] for one in went if one[name] is not None)
        for name in ("loss", "gradients", "weights")
    }
    said = ", ".join(f"{name} {value:.0e}" for name, value in worst.items())
    how = ", ".join(f"{one['way'].upper()} x {one['processes']} ({one['backend']})" for one in went)
    lost = [f"{one['way'].upper()} x {one['processes']}" for one in found if "failed" in one]
    told = {name: value for one in went for name, value in one["naive"].items()}
    usual = [f"computed outside: {told[OUTSIDE]}"] if OUTSIDE in told else []
    if "mean of means" in told:
        usual.insert(0, f"a mean of means: {told['mean of means']:.0%} off")
    return {
        "number": 18,
        "test": TEST,
        "mark": ASKED,
        "figure": f"{said} at most; {how}; {device}"
        + (f"; could not be started: {', '.join(lost)}" if lost else ""),
        "naive": "; ".join(usual),
        "full": True,
    }


def main(out: Path) -> dict[str, Any]:
    """Every launch, and one file with all that was found."""
    import accelerate
    import transformers

    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "transformers": transformers.__version__,
        "steps": STEPS,
    }
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["launches"] = [launched(out, way, n) for way in ("fsdp2", "fsdp1") for n in (1, 2)]
        if any("failed" not in one for one in found["launches"] if one["way"] == "fsdp2"):
            found["row"] = row_of(found["launches"], found["device"])
    else:
        found["launches"] = [launched(out, "hand", 2)]
    (out / "fsdp.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    if len(sys.argv) > 2:
        wrapped(sys.argv[2], Path(sys.argv[1]))
    else:
        print(json.dumps(main(Path(sys.argv[1])), indent=1))
