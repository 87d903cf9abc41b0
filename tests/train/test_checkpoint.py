"""Checkpoints: exact resume, memory formats, corrupt files and wrong models."""

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from overt import io
from overt.errors import CorruptFileError, RunError, UserError
from overt.train import checkpoint
from overt.train.checkpoint import TrainState

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95)),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "plain": lambda p: torch.optim.SGD(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "tensor-rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.5),
}


def net() -> nn.Module:
    """A network with buffers and a weight that never has a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    return model


def train_net(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for number in range(first, last):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def parameter_groups(parameters: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": parameters[:1], "lr": 1e-3}, {"params": parameters[1:]}]


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    tensors, rest = checkpoint.pack_optimizer_state(optimizer.state_dict())
    values = [*model.state_dict().values(), *(tensors[name] for name in sorted(tensors))]
    return b"".join(value.numpy().tobytes() for value in values) + json.dumps(rest).encode()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_resumes_bit_for_bit(tmp_path: Path, name: str) -> None:
    reference = net()
    one = OPTIMIZERS[name](parameter_groups([*reference.parameters()]))
    train_net(reference, one, 0, 3)
    state = TrainState(
        "train", 7, step=3, epoch=1, samples=24, best=0.1 + 0.2, meters={"a": [1 / 3, 2.0]}
    )
    folder = checkpoint.save(tmp_path, state, reference, {"model": one})
    fresh = net()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(1)
    two = OPTIMIZERS[name](parameter_groups([*fresh.parameters()]))
    assert checkpoint.load(folder, fresh, {"model": two}) == state
    assert state_bytes(fresh, two) == state_bytes(reference, one)
    train_net(reference, one, 3, 8)
    train_net(fresh, two, 3, 8)
    assert state_bytes(fresh, two) == state_bytes(reference, one)


MORE_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **OPTIMIZERS,
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "fused-adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "fused-momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}


def conv_net(memory_format: torch.memory_format, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(1)
    )
    model.append(nn.Linear(4 * 6 * 6, 2))
    return model.to(device).to(memory_format=memory_format)  # type: ignore[call-overload,no-any-return]


def train_conv_net(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int
) -> None:
    for number in range(first, last):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x.to(next(model.parameters()).device)).square().mean().backward()
        optimizer.step()


def strides(tensor: torch.Tensor) -> list[int]:
    """Strides of the axes longer than one."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1]


FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("name", MORE_OPTIMIZERS)
def test_resume_is_exact_in_every_memory_format(
    tmp_path: Path, name: str, memory_format: str
) -> None:
    """Restored state tensors have the strides and the bits of an uninterrupted run."""
    reference, fresh = (conv_net(FORMATS[memory_format]) for _ in range(2))
    one, two = (MORE_OPTIMIZERS[name](model.parameters()) for model in (reference, fresh))
    train_conv_net(reference, one, 0, 2)
    folder = checkpoint.save(tmp_path, TrainState("train", 0), reference, {"model": one})
    checkpoint.load(folder, fresh, {"model": two})
    for kept, loaded in zip(one.state.values(), two.state.values(), strict=True):
        for slot, value in kept.items():
            if isinstance(value, torch.Tensor):
                assert strides(loaded[slot]) == strides(value), slot
                assert loaded[slot].dtype == value.dtype, slot
    for parameter, original in zip(fresh.parameters(), reference.parameters(), strict=True):
        assert parameter.stride() == original.stride()
    train_conv_net(reference, one, 2, 5)
    train_conv_net(fresh, two, 2, 5)
    assert state_bytes(fresh, two) == state_bytes(reference, one)


DTYPES = [torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda kind: str(kind).removeprefix("torch."))
@pytest.mark.parametrize("name", ["asgd", "nadam", "radam", "adamw", "adafactor"])
def test_resume_is_exact_in_every_dtype(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Float32 state beside a parameter of another dtype is not rounded to it."""
    reference, fresh = (nn.Sequential(*(nn.Linear(3, 3) for _ in range(6))) for _ in range(2))
    fresh.load_state_dict(reference.state_dict())
    one, two = (MORE_OPTIMIZERS[name](m.to(dtype).parameters()) for m in (reference, fresh))

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3, dtype=dtype)).square().mean().backward()
            optimizer.step()

    steps(reference, one)
    folder = checkpoint.save(tmp_path, TrainState("train", 0), reference, {"model": one})
    checkpoint.load(folder, fresh, {"model": two})
    for continued in (False, True):
        if continued:
            steps(reference, one)
            steps(fresh, two)
        for left, right in zip(reference.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(left, right)
            for slot, value in one.state[left].items():
                assert two.state[right][slot].dtype == value.dtype, slot
                assert torch.equal(two.state[right][slot], value), slot
    assert list(two.state_dict()["state"]) == [*range(12)]


def test_the_step_count_of_a_scalar_parameter_keeps_its_device() -> None:
    """It has the shape of the parameter, but may be on the CPU when the parameter is not."""
    scale = nn.Parameter(torch.ones((), device="meta"))
    optimizer = torch.optim.Adam([scale])
    step, mean = torch.tensor(3.0), torch.zeros((), device="meta")
    optimizer.state[scale] = {"step": step, "exp_avg": mean}
    checkpoint.match_memory_format(optimizer)
    assert optimizer.state[scale]["step"] is step and step.device.type == "cpu"


def test_a_scalar_and_a_vector_resume_exactly(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.shift = nn.Parameter(torch.tensor([0.1, 0.2]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * x + self.shift

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.tensor([1.0, 2.0])).square().sum().backward()
            optimizer.step()

    reference, fresh = Scaled(), Scaled()
    one, two = (torch.optim.AdamW(model.parameters(), lr=0.1) for model in (reference, fresh))
    steps(reference, one, 2)
    folder = checkpoint.save(tmp_path, TrainState("train", 0), reference, {"model": one})
    checkpoint.load(folder, fresh, {"model": two})
    steps(reference, one, 3)
    steps(fresh, two, 3)
    assert state_bytes(fresh, two) == state_bytes(reference, one)


def test_several_optimizers_are_saved_before_the_first_step(tmp_path: Path) -> None:
    model = net()
    both = {
        "a": torch.optim.AdamW(model[0].parameters()),
        "b": torch.optim.SGD(model[2].parameters(), lr=1.0, momentum=0.1),
    }
    folder = checkpoint.save(tmp_path, TrainState("train", 0), model, both)
    assert sorted(path.name for path in folder.iterdir()) == [
        "a.optimizer.json",
        "a.optimizer.safetensors",
        "b.optimizer.json",
        "b.optimizer.safetensors",
        io.MANIFEST,
        "model.safetensors",
        "state.json",
    ]
    assert checkpoint.load(folder, net(), both) == TrainState("train", 0)


def test_tied_and_half_precision_weights_are_restored(tmp_path: Path) -> None:
    def tied_model() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3, dtype=torch.bfloat16), nn.Linear(3, 3))
        model.add_module("again", model[1])
        return model

    model = tied_model()
    folder = checkpoint.save(tmp_path, TrainState("train", 0), model, {})
    other = tied_model()
    checkpoint.load(folder, other, {})
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    assert other.again is other[1]


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 100, 1000):
        checkpoint.save(tmp_path, TrainState("train", 0, step=step), net(), {}, keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step-000000100",
        "step-000001000",
    ]


def damage_checkpoint(folder: Path, rng: random.Random) -> str:
    """Damage one checkpoint at random and return a description."""
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    how = rng.choice(["flip", "cut", "grow", "zero", "swap", "drop", "add", "shift"])
    place = rng.randrange(max(1, len(data)))
    match how:
        case "flip":
            data[place] ^= 1 << rng.randrange(8)
        case "cut":
            del data[place:]
        case "grow":
            data += bytes(rng.randrange(1, 50))
        case "zero":
            stop = min(len(data), place + rng.randrange(1, 200))
            data[place:stop] = bytes(b ^ 255 for b in data[place:stop])
        case "shift":
            data.insert(place, 0)
        case "swap":
            other = rng.choice([p for p in sorted(folder.iterdir()) if p != path])
            data = bytearray(other.read_bytes())
        case "drop":
            path.unlink()
            return f"dropped {path.name}"
        case "add":
            (folder / "extra.safetensors").write_bytes(bytes(data))
            return "added a file"
    path.write_bytes(bytes(data))
    return f"{how} {path.name} at {place}"


def test_a_corrupt_checkpoint_never_loads(tmp_path: Path) -> None:
    """Each of 100 mutations raises CorruptFileError; model and optimizer do not change."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train_net(model, optimizer, 0, 2)
    folder = checkpoint.save(
        tmp_path / "a", TrainState("train", 0, step=2), model, {"m": optimizer}
    )
    fresh = net()
    other = torch.optim.AdamW(fresh.parameters())
    before = state_bytes(fresh, other)
    for seed in range(100):
        broken = tmp_path / "b" / folder.name
        shutil.copytree(folder, broken)
        how = damage_checkpoint(broken, random.Random(seed))
        with pytest.raises(CorruptFileError, match=str(broken)):
            checkpoint.load(broken, fresh, {"m": other})
        assert state_bytes(fresh, other) == before, how
        assert io.newest(tmp_path / "b", checkpoint.PREFIX) == (None, [broken])
        shutil.rmtree(broken)


def test_a_checkpoint_of_another_model_or_optimizer_raises_corrupt_file_error(
    tmp_path: Path,
) -> None:
    model = net()
    adam, sgd = (torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=1))
    train_net(model, adam, 0, 1)
    folder = checkpoint.save(tmp_path, TrainState("train", 0), model, {"m": adam})
    with pytest.raises(CorruptFileError, match="this model"):
        checkpoint.load(folder, nn.Linear(4, 6), {"m": adam})
    with pytest.raises(CorruptFileError, match=r"optimizer.*momentum"):
        checkpoint.load(folder, net(), {"m": sgd})
    with pytest.raises(CorruptFileError, match="this optimizer"):
        checkpoint.load(folder, net(), {"m": torch.optim.AdamW([*model.parameters()][:2])})
    with pytest.raises(CorruptFileError, match=r"other\.optimizer\.safetensors"):
        checkpoint.load(folder, net(), {"other": adam})


@pytest.mark.parametrize("state", [[], {"stage": "train"}, {"stage": "a", "seed": 0, "more": 1}])
def test_a_state_file_with_wrong_fields_raises_corrupt_file_error(
    tmp_path: Path, state: object
) -> None:
    folder = tmp_path / "step-000000001"
    with io.atomic_folder(folder) as temporary:
        io.write_json(temporary / "state.json", state)
    with pytest.raises(CorruptFileError, match=r"state\.json"):
        checkpoint.load(folder, net(), {})


def test_an_optimizer_that_cannot_be_saved_raises(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="list"):
        checkpoint.save(tmp_path, TrainState("train", 0), model, {"m": optimizer})
    infinite_rate = torch.optim.SGD(model.parameters(), lr=float("inf"))
    with pytest.raises(ValueError, match="inf"):
        checkpoint.save(tmp_path, TrainState("train", 0), model, {"m": infinite_rate})
    assert list(tmp_path.iterdir()) == []


def test_saving_a_nan_state_raises_and_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    model = net()
    state = TrainState("train", 0, step=1)
    checkpoint.save(tmp_path, state, model, {})
    nan_state = copy.copy(state)
    nan_state.step, nan_state.best = 2, float("nan")
    with pytest.raises(UserError, match=r"state\.json"):
        checkpoint.save(tmp_path, nan_state, model, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def test_out_of_memory_while_loading_raises_run_error(tmp_path, monkeypatch):
    def raise_out_of_memory(*args, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    folder = checkpoint.save(tmp_path, checkpoint.TrainState("a", 0), net, {"model": optimizer})
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Optimizer, "load_state_dict", raise_out_of_memory)
        with pytest.raises(RunError, match=r"memory.*intact"):
            checkpoint.load(folder, net, {"model": optimizer})
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", raise_out_of_memory)
    with pytest.raises(RunError, match=r"memory.*intact"):
        checkpoint.load_model(folder, net)
