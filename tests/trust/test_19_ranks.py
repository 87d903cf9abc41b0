"""Trust 19: a process that dies takes the others along, and the run goes on as if it had not."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from overt import files
from overt.train import checkpoint
from tests.train import many
from tests.trust import together

MODULE = "tests.train.many"
LAST = Path("checkpoints", "train", "step-000000028")
KEPT = ("model.safetensors", "model.optimizer.safetensors", "adversary.optimizer.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that nobody disturbed, one that was poisoned, one that was stopped."""
    out = tmp_path_factory.mktemp("whole")
    together.done(together.start(MODULE, str(out), "long", "poison", "stop"))
    return out


def same_bytes(ours: Path, theirs: Path) -> None:
    """Weights, optimizers and log of two finished runs."""
    for name in KEPT:
        assert files.digest(ours / LAST / name) == files.digest(theirs / LAST / name), name
    assert (ours / "log.jsonl").read_bytes() == (theirs / "log.jsonl").read_bytes()


def ends(out: Path, case: str, rank: int) -> dict[str, object]:
    return files.read_json(out / f"{case}-ends" / f"rank-{rank}.json")


@pytest.mark.long
def test_one_process_is_killed_and_the_other_ends_and_a_restart_is_exact(
    whole: Path, tmp_path: Path, reached
) -> None:
    """Nobody looks after these two: the one that is left finds out by itself."""
    for _ in range(5):  # somebody may have taken the port meanwhile
        survivor, killed = together.start_apart(MODULE, str(tmp_path), "killed")
        killed.communicate(timeout=300)
        died = time.monotonic()
        said, _ = survivor.communicate(timeout=300)
        waited = time.monotonic() - died
        if "EADDRINUSE" not in said:
            break
    assert killed.returncode == -9 and survivor.returncode not in (0, -9), said
    assert waited < 60
    assert (tmp_path / "killed" / "checkpoints" / "train" / "step-000000008").is_dir()
    naive = weights_alone(tmp_path / "killed")
    (tmp_path / "killed").rename(tmp_path / "long")
    together.done(together.start(MODULE, str(tmp_path), "long:resume"))
    same_bytes(tmp_path / "long", whole / "long")
    expected = files.read_tensors(whole / "long" / LAST / "model.safetensors")
    moved = max(float((naive[n] - one).abs().max()) for n, one in expected.items())
    assert moved > 1e-4
    reached(
        19,
        "one process killed: the other ends, not with 0, within 60 s; the restart is exact",
        "it does; weights, optimizers and log have the same bytes",
        f"weights loaded without the rest: up to {moved:.2f} away",
    )


def weights_alone(out: Path) -> dict[str, torch.Tensor]:
    """How a run ends that takes up the weights of a checkpoint and begins the rest anew."""
    found, _ = files.newest(out / "checkpoints" / "train", checkpoint.PREFIX)
    assert found is not None
    net = many.Net()
    checkpoint.load_model(found, net)
    own = [p for name, p in net.named_parameters() if not name.startswith("adversary")]
    sets = {
        "model": many.ParameterSet(torch.optim.AdamW(own, lr=1e-2, weight_decay=0.1), clip=1.0),
        "adversary": many.ParameterSet(
            torch.optim.SGD(net.adversary.parameters(), lr=1e-2, momentum=0.9)
        ),
    }
    rest = replace(many.LONG, steps=20)
    data = many.Numbers(50)
    many.fit(net, data, many.step, sets, rest, out=out / "naive", seed=0, device="cpu")
    return {name: value.detach() for name, value in net.state_dict().items()}


@pytest.mark.long
def test_torchrun_starts_a_killed_run_again_and_it_goes_on(
    whole: Path, tmp_path: Path, reached
) -> None:
    launcher = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    started = together.start(MODULE, str(tmp_path), "mortal:elastic", launcher=launcher)
    together.done(started)
    same_bytes(tmp_path / "mortal", whole / "long")
    assert [ends(tmp_path, "mortal", rank)["ended"] for rank in (0, 1)] == ["done 28 200"] * 2
    once = [*launcher[:-1], "1"]
    usual = together.start(MODULE, str(tmp_path / "usual"), "mortal", launcher=once)
    said, _ = usual.communicate(timeout=300)
    assert usual.returncode != 0 and "already holds checkpoints" in said
    reached(
        19,
        "elastic restart: torchrun --max-restarts goes on by itself",
        "killed at step 10, resumed from step 8, same bytes at the end",
        "a program that does not look for what it left is started again in vain",
    )


@pytest.mark.long
def test_two_processes_then_one_then_two_end_as_one(whole: Path, tmp_path: Path, reached) -> None:
    many.run(many.CASES["long"], tmp_path / "alone")
    (whole / "stop").rename(tmp_path / "stop-first")
    many.run(many.CASES["stop-first"], tmp_path / "stop-first", resume=True)
    assert str(ends(tmp_path, "stop-first", 0)["ended"]).startswith("Stopped: stopped at step 10")
    (tmp_path / "stop-first").rename(tmp_path / "long")
    together.done(together.start(MODULE, str(tmp_path), "long:resume"))
    alone = files.read_tensors(tmp_path / "alone" / LAST / "model.safetensors")
    found = files.read_tensors(tmp_path / "long" / LAST / "model.safetensors")
    apart = max(
        float((found[name] - one).abs().max())
        for name, one in alone.items()
        if not name.startswith("norm.")  # batch norm sees the share of its process
    )
    assert apart < 1e-9
    assert [ends(tmp_path, "long", rank)["ended"] for rank in (0, 1)] == ["done 28 200"] * 2
    usual = a_batch_a_process(tmp_path / "usual")
    moved = max(
        float((usual[n] - one).abs().max()) for n, one in alone.items() if not n.startswith("norm.")
    )
    assert moved > 1e-3
    reached(
        19,
        "world size 2, then 1, then 2 loads",
        f"it does, and ends {apart:.0e} from one process at most",
        f"a batch of fixed size in each process: one alone ends up to {moved:.2f} away",
    )


def a_batch_a_process(out: Path) -> dict[str, torch.Tensor]:
    """How one process ends where the batch belongs to a process and not to the run."""
    half = replace(many.LONG, batch=many.LONG.batch // 2)
    many.run(replace(many.CASES["long"], limits=half), out)
    found, _ = files.newest(out / "checkpoints" / "train", checkpoint.PREFIX)
    assert found is not None
    return files.read_tensors(found / "model.safetensors")


@pytest.mark.long
def test_a_number_that_is_none_on_one_process_stops_all_at_once(
    whole: Path, tmp_path: Path, reached
) -> None:
    first, second = (ends(whole, "poison", rank) for rank in (0, 1))
    assert first["ended"] == second["ended"]
    assert str(first["ended"]).startswith("Failed: loss adversary/guess")
    assert first["same"] and second["same"]  # no weight has moved since
    assert not (whole / "poison" / "checkpoints").exists()
    together.done(together.start("tests.trust.together", str(tmp_path), "poisoned"))
    finite = [files.read_json(tmp_path / f"poisoned-rank-{n}.json")["finite"] for n in (0, 1)]
    assert finite == [False, True]
    reached(
        15,
        "not finite on one process: all stop together, nothing saved",
        "both stop at the same step with the same sentence, weights as before it",
        "each looks at its own loss: the healthy one steps, and its weights are no numbers",
    )
