"""A checkpoint holds everything, comes back bit for bit, and never comes back changed."""

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from overt import files
from overt.errors import BadInput, Damaged
from overt.train import checkpoint
from overt.train.checkpoint import State

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95)),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "plain": lambda p: torch.optim.SGD(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "tensor-rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.5),
}


def net() -> nn.Module:
    """A network with buffers, and with a weight that never gets a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    return model


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for number in range(first, last):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def groups(parameters: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": parameters[:1], "lr": 1e-3}, {"params": parameters[1:]}]


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    tensors, rest = checkpoint.pack(optimizer.state_dict())
    values = [*model.state_dict().values(), *(tensors[name] for name in sorted(tensors))]
    return b"".join(value.numpy().tobytes() for value in values) + json.dumps(rest).encode()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    whole = net()
    one = OPTIMIZERS[name](groups([*whole.parameters()]))
    go_on(whole, one, 0, 3)
    state = State(
        "train", 7, step=3, epoch=1, samples=24, best=0.1 + 0.2, meters={"a": [1 / 3, 2.0]}
    )
    folder = checkpoint.save(tmp_path, state, whole, {"model": one})
    fresh = net()
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.add_(1)
    two = OPTIMIZERS[name](groups([*fresh.parameters()]))
    assert checkpoint.load(folder, fresh, {"model": two}) == state
    assert bits(fresh, two) == bits(whole, one)
    go_on(whole, one, 3, 8)
    go_on(fresh, two, 3, 8)
    assert bits(fresh, two) == bits(whole, one)


def test_a_checkpoint_before_the_first_step_and_several_optimizers(tmp_path: Path) -> None:
    model = net()
    both = {
        "a": torch.optim.AdamW(model[0].parameters()),
        "b": torch.optim.SGD(model[2].parameters(), lr=1.0, momentum=0.1),
    }
    folder = checkpoint.save(tmp_path, State("train", 0), model, both)
    assert sorted(path.name for path in folder.iterdir()) == [
        "a.optimizer.json",
        "a.optimizer.safetensors",
        "b.optimizer.json",
        "b.optimizer.safetensors",
        files.MANIFEST,
        "model.safetensors",
        "state.json",
    ]
    assert checkpoint.load(folder, net(), both) == State("train", 0)


def test_tied_and_half_precision_weights_come_back(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3, dtype=torch.bfloat16), nn.Linear(3, 3))
        model.add_module("again", model[1])
        return model

    model = tied()
    folder = checkpoint.save(tmp_path, State("train", 0), model, {})
    other = tied()
    checkpoint.load(folder, other, {})
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    assert other.again is other[1]


def test_the_newest_are_kept_and_the_rest_dropped(tmp_path: Path) -> None:
    for step in (5, 10, 100, 1000):
        checkpoint.save(tmp_path, State("train", 0, step=step), net(), {}, keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "step-000000100",
        "step-000001000",
    ]


def mutate(folder: Path, rng: random.Random) -> str:
    """Damage one checkpoint in one of the ways files get damaged; say how."""
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


def test_a_changed_checkpoint_never_loads(tmp_path: Path) -> None:
    """Each of 100 mutations is Damaged, and neither model nor optimizer has moved."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    go_on(model, optimizer, 0, 2)
    folder = checkpoint.save(tmp_path / "a", State("train", 0, step=2), model, {"m": optimizer})
    fresh = net()
    other = torch.optim.AdamW(fresh.parameters())
    before = bits(fresh, other)
    for seed in range(100):
        broken = tmp_path / "b" / folder.name
        shutil.copytree(folder, broken)
        how = mutate(broken, random.Random(seed))
        with pytest.raises(Damaged, match=str(broken)):
            checkpoint.load(broken, fresh, {"m": other})
        assert bits(fresh, other) == before, how
        assert files.newest(tmp_path / "b", checkpoint.PREFIX) == (None, [broken])
        shutil.rmtree(broken)


def test_a_whole_checkpoint_of_something_else_is_damaged_too(tmp_path: Path) -> None:
    model = net()
    adam, sgd = (torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=1))
    go_on(model, adam, 0, 1)
    folder = checkpoint.save(tmp_path, State("train", 0), model, {"m": adam})
    with pytest.raises(Damaged, match="does not fit this model"):
        checkpoint.load(folder, nn.Linear(4, 6), {"m": adam})
    with pytest.raises(Damaged, match=r"does not fit this optimizer: it lacks .*momentum"):
        checkpoint.load(folder, net(), {"m": sgd})
    with pytest.raises(Damaged, match="does not fit this optimizer"):
        checkpoint.load(folder, net(), {"m": torch.optim.AdamW([*model.parameters()][:2])})
    with pytest.raises(Damaged, match=r"other\.optimizer\.safetensors"):
        checkpoint.load(folder, net(), {"other": adam})


@pytest.mark.parametrize("state", [[], {"stage": "train"}, {"stage": "a", "seed": 0, "more": 1}])
def test_a_state_that_is_none_of_ours_is_damaged(tmp_path: Path, state: object) -> None:
    folder = tmp_path / "step-000000001"
    with files.writing(folder) as temporary:
        files.write_json(temporary / "state.json", state)
    with pytest.raises(Damaged, match=r"state\.json"):
        checkpoint.load(folder, net(), {})


def test_an_optimizer_that_cannot_be_saved_says_so(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be saved"):
        checkpoint.save(tmp_path, State("train", 0), model, {"m": optimizer})
    endless = torch.optim.SGD(model.parameters(), lr=float("inf"))
    with pytest.raises(ValueError, match="an optimizer setting is inf"):
        checkpoint.save(tmp_path, State("train", 0), model, {"m": endless})
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_is_not_a_number_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    model = net()
    state = State("train", 0, step=1)
    checkpoint.save(tmp_path, state, model, {})
    wrong = copy.copy(state)
    wrong.step, wrong.best = 2, float("nan")
    with pytest.raises(BadInput, match=r"state\.json"):
        checkpoint.save(tmp_path, wrong, model, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
