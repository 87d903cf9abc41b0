"""Compare FSDP through Accelerate with one process: `python -m tests.trust.accelerated OUT`.

A small BERT with an attention loss trains for three steps; three of eight sentences are supervised,
so that two processes have unequal shards. One process uses a GPU with NCCL; two share it with gloo,
because NCCL does not support two processes on one GPU. Every launch writes a JSON file in OUT, and
fsdp.json has all of them and the row for the table.

Accelerate supports FSDP on GPUs only. Without a GPU, `fully_shard` runs in two processes on the
CPU: this tests the program and gives no row.
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
from overt.capture.session import watch
from overt.capture.trace import AttentionTrace
from overt.losses import Loss, classification, cross_entropy
from overt.nn.wrappers.wrapped_model import WrappedModel, wrap
from overt.train.integrations import distributed_mean

ROOT = Path(__file__).resolve().parents[2]
WORDS, ROWS, STEPS = 15, 8, 3
SUPERVISED = (1, 2, 6)  # of eight rows: two in the first half, one in the second
LAYOUT = Layout(
    (Span("class", (1,), slice(0, 1)), Span("text", (WORDS,), slice(1, WORDS + 1))), WORDS + 1
)
TOLERANCE = 1e-5  # float32, three steps
TEST = "test_18_accelerate.py::test_fsdp_through_accelerate_takes_the_same_steps_as_one_process"
THRESHOLD = "FSDP through Accelerate on a GPU: losses, gradients and weights of one process to 1e-5"
OUTSIDE = "attention alone, outside"
CHOICES = {"fsdp2": 2, "fsdp1": 1, "hand": 0}

Mean = Callable[[Loss], Tensor]
Reported = Callable[[Loss], float]
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
    """Eight sentences of unequal length; three have a target word."""
    generator = torch.Generator().manual_seed(1)
    target = torch.zeros(ROWS, WORDS)
    for row in SUPERVISED:
        target[row, row % 5] = 1
    mask = torch.ones(ROWS, WORDS + 1, dtype=torch.long)
    for row in range(ROWS):
        mask[row, WORDS + 1 - row % 4 :] = 0
    batch = {
        "input_ids": torch.randint(1, 40, (ROWS, WORDS + 1), generator=generator),
        "attention_mask": mask,
        "labels": torch.arange(ROWS) % 3,
        "target": target,
    }
    return {name: value.to(device) for name, value in batch.items()}


def target_word_loss(trace: AttentionTrace, inputs: Mapping[str, Any]) -> Loss:
    """Loss on the attention of the last layer from the class token to the target word."""
    target = AttentionMap.from_cells(inputs["target"], words(WORDS)).normalize()
    return cross_entropy(
        AttentionTrace([trace.calls[-1]], trace.layout).log_block("class", "text"), target
    )


def make_model() -> WrappedModel:
    """BERT with the attention loss inside the forward pass that is wrapped."""
    return wrap(bert(), layout=LAYOUT, loss=target_word_loss)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD, because AdamW amplifies rounding errors of gradients near zero."""
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def shard(batch: Parts, rank: int, world: int) -> dict[str, Tensor]:
    """Return the rows of one process."""
    size = ROWS // world
    return {name: value[rank * size : (rank + 1) * size] for name, value in batch.items()}


# --- steps with any wrapper


def losses_of(model: nn.Module, batch: Parts) -> list[Loss]:
    """Task and attention."""
    output = model(dict(batch))
    return [classification(output.prediction, batch["labels"]), output.loss]


def take_steps(
    model: nn.Module,
    optimizer: Any,
    batch: Parts,
    mean: Mean,
    report: Reported,
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> tuple[list[float], dict[str, Tensor]]:
    """Take three steps; return the loss of each over all rows and the full first gradients."""
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        task, attention = losses_of(model, batch)
        backward(mean(task) + mean(attention))
        if step == 0:
            first = gradients(model)
        optimizer.step()
        losses.append(report(task) + report(attention))
    return losses, first


def mean_of_process(loss: Loss) -> float:
    """Mean loss per row of this process."""
    return float(loss.mean())


def mean_of_all_processes(loss: Loss) -> float:
    """Mean loss per row of all processes."""
    both = torch.stack([loss.total.detach(), loss.count.to(loss.total)])
    torch.distributed.all_reduce(both)
    return float(both[0] / both[1])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the full gradient of every parameter; a collective call."""
    named = model.named_parameters()
    return {parameter_name(name): full_tensor(p.grad) for name, p in named if p.grad is not None}


def full_tensor(one: Tensor) -> Tensor:
    """Return an unsharded tensor in float64 on the CPU."""
    return (one.full_tensor() if isinstance(one, DTensor) else one).detach().double().cpu()


def parameter_name(name: str) -> str:
    """Return the name of a parameter without the prefixes of wrappers."""
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


def relative_error(ours: Parts, theirs: Parts) -> float:
    """Return the relative norm of the difference; infinity if names differ."""
    if set(ours) != set(theirs):
        return float("inf")
    names = sorted(theirs)
    one, two = (torch.cat([each[n].double().flatten() for n in names]) for each in (ours, theirs))
    return float((one - two).norm() / two.norm())


def train_alone(device: torch.device) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Train in one process without a wrapper: losses, first gradients and last weights."""
    model = make_model().to(device)
    losses, first = take_steps(
        model, make_optimizer(model), sentences(device), Loss.mean, mean_of_process
    )
    return losses, first, {name: full_tensor(p) for name, p in model.named_parameters()}


# --- ways to wrap


@dataclass(frozen=True)
class Launch:
    """One process of a launch: `prepare` wraps a model and its optimizer."""

    device: torch.device
    rank: int
    world: int
    prepare: Callable[[nn.Module, Any], tuple[nn.Module, Any]]
    backward: Callable[[Tensor], None]


def launch_accelerate(version: int) -> Launch:
    """Accelerate with FSDP: each layer of BERT is a unit, and the rest is one."""
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


def launch_fully_shard() -> Launch:
    """The same with `fully_shard` on CPUs."""
    torch.distributed.init_process_group("gloo")

    def prepare(model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        for layer in model.model.bert.encoder.layer:
            fully_shard(layer)
        fully_shard(model)
        return model, make_optimizer(model)

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return Launch(torch.device("cpu"), rank, world, prepare, Tensor.backward)


# --- one launch


def train_wrapped(way: str, out: Path) -> None:
    """Train in this process, compare with a single process, and write the result."""
    torch.backends.cuda.matmul.allow_tf32 = False
    version = CHOICES[way]
    launch = launch_accelerate(version) if version else launch_fully_shard()
    losses, first, last = train_alone(launch.device)
    model = make_model()
    model, optimizer = launch.prepare(model, make_optimizer(model))
    rows_of_process = shard(sentences(launch.device), launch.rank, launch.world)
    ours, found = take_steps(
        model, optimizer, rows_of_process, distributed_mean, mean_of_all_processes, launch.backward
    )
    result = {
        "way": way,
        "processes": launch.world,
        "backend": torch.distributed.get_backend(),
        "losses": ours,
        "alone": losses,
        "loss": max(abs(a - b) / abs(b) for a, b in zip(ours, losses, strict=True)),
        "gradients": None
        if version == 1
        else relative_error(found, first),  # FSDP1 has flat shards
        "weights": relative_error(weights(model), last),
        "cut up": sum(isinstance(p, DTensor) for p in model.parameters()),
        "naive": {} if version == 1 else naive(launch, rows_of_process, first),
    }
    if launch.rank == 0:
        (out / f"{way}-{launch.world}.json").write_text(json.dumps(result, indent=1) + "\n")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters unsharded."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {
                parameter_name(name): full_tensor(p).clone() for name, p in model.named_parameters()
            }
    return {parameter_name(name): full_tensor(p) for name, p in model.named_parameters()}


def naive(launch: Launch, rows_of_process: Parts, first: Parts) -> dict[str, Any]:
    """The usual way: a mean in each process, and the attention loss outside the wrapper."""
    found: dict[str, Any] = {}
    if launch.world > 1:
        model = fully_shard(make_model().to(launch.device))
        task, attention = losses_of(model, rows_of_process)
        (task.mean() + attention.mean()).backward()
        found["mean of means"] = relative_error(gradients(model), first)
    unwrapped = bert().to(launch.device)
    for layer in unwrapped.bert.encoder.layer:
        fully_shard(layer)
    fully_shard(unwrapped)
    inputs = {name: rows_of_process[name] for name in ("input_ids", "attention_mask")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with watch(unwrapped, layout=LAYOUT) as trace:
                unwrapped(**inputs)
        distributed_mean(target_word_loss(trace, rows_of_process)).backward()
        with_gradient = sum(p.grad is not None for p in unwrapped.parameters())
        found[OUTSIDE] = f"{with_gradient} of {len(first)} parameters have a gradient"
    except RuntimeError as error:
        found[OUTSIDE] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found


# --- all launches


def start_launch(out: Path, way: str, world: int) -> dict[str, Any]:
    """Start a launch; return its result or its error output."""
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


def table_row(found: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Return the row of the table, with the failed launches."""
    succeeded = [one for one in found if "failed" not in one]
    worst = {
        name: max(one[name] for one in succeeded if one[name] is not None)
        for name in ("loss", "gradients", "weights")
    }
    errors = ", ".join(f"{name} {value:.0e}" for name, value in worst.items())
    how = ", ".join(
        f"{one['way'].upper()} x {one['processes']} ({one['backend']})" for one in succeeded
    )
    failed = [f"{one['way'].upper()} x {one['processes']}" for one in found if "failed" in one]
    report = {name: value for one in succeeded for name, value in one["naive"].items()}
    naive_results = [f"computed outside: {report[OUTSIDE]}"] if OUTSIDE in report else []
    if "mean of means" in report:
        naive_results.insert(0, f"a mean of means: {report['mean of means']:.0%} off")
    return {
        "number": 18,
        "test": TEST,
        "mark": THRESHOLD,
        "figure": f"{errors} at most; {how}; {device}"
        + (f"; could not be started: {', '.join(failed)}" if failed else ""),
        "naive": "; ".join(naive_results),
        "full": True,
    }


def main(out: Path) -> dict[str, Any]:
    """Run every launch and write one file with all results."""
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
        found["launches"] = [
            start_launch(out, way, n) for way in ("fsdp2", "fsdp1") for n in (1, 2)
        ]
        if any("failed" not in one for one in found["launches"] if one["way"] == "fsdp2"):
            found["row"] = table_row(found["launches"], found["device"])
    else:
        found["launches"] = [start_launch(out, "hand", 2)]
    (out / "fsdp.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train_wrapped(sys.argv[2], Path(sys.argv[1]))
    else:
        print(json.dumps(main(Path(sys.argv[1])), indent=1))
