"""Trust 18: two processes have the same gradients and metrics as one, with uneven supervision."""

import hashlib
import shutil
from pathlib import Path

import pytest
import torch

from overt import io
from overt.targets import Surrogates
from tests.trust import two_processes
from tests.trust.two_processes import (
    CASES,
    SUPERVISED,
    WRAPPERS,
    attention_only,
    task_and_attention,
)

OBJECTIVES = (task_and_attention, attention_only)
TOLERANCE = 1e-6


def relative_error(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of two gradients, relative to the second."""
    assert set(ours) == set(theirs)
    names = sorted(theirs)
    one, two = (torch.cat([each[n].double().flatten() for n in names]) for each in (ours, theirs))
    assert two.norm() > 1e-3
    return float((one - two).norm() / two.norm())


def read(out: Path, name: str, rank: int) -> dict[str, torch.Tensor]:
    return io.read_tensors(out / f"{name}-rank-{rank}.safetensors")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all cases in one launch, because starting takes most of the time."""
    folder = tmp_path_factory.mktemp("two")
    words = [*CASES, "naive", "wrapped", "outside", "shared"]
    two_processes.wait(two_processes.start("tests.trust.two_processes", str(folder), *words))
    return folder


@pytest.mark.long
def test_two_processes_take_the_same_step_as_one(out: Path, tmp_path: Path, record_result) -> None:
    """Uneven supervised rows, a process with none, an uneven last batch, accumulation 1, 2, 4."""
    single_process = {
        name: two_processes.one_step(case, tmp_path / name) for name, case in CASES.items()
    }
    worst = max(
        relative_error(read(out, name, rank), single_process[name])
        for name in CASES
        for rank in (0, 1)
    )
    naive = {
        name: relative_error(read(out, f"naive-{name}", 0), single_process[name])
        for name in ("uneven-1", "none-1")
    }
    assert worst < TOLERANCE < 0.05 < min(naive.values())
    # one process does not depend on the size of its micro-batches
    accumulated = max(
        relative_error(single_process[f"{name}-{n}"], single_process[f"{name}-1"])
        for name in SUPERVISED
        for n in (2, 4)
    )
    assert accumulated < TOLERANCE
    record_result(
        18,
        "gradients to 1e-6 after one step, accumulation 1, 2, 4",
        f"{worst:.0e} at worst in {len(CASES)} cases",
        f"a mean of means: {min(naive.values()):.0%} off or more",
    )


@pytest.mark.long
def test_a_loss_inside_the_wrapper_has_the_same_gradients_as_one_process(
    out: Path, record_result
) -> None:
    worst = dict.fromkeys((wrap.__name__ for wrap in WRAPPERS), 0.0)
    for objective in OBJECTIVES:
        for name, supervised in SUPERVISED.items():
            batch = two_processes.side_batch(supervised)
            single_process = two_processes.wrapped_gradients(
                two_processes.wrapped_model(), batch, objective
            )
            for wrap in worst:
                found = [read(out, f"{wrap}-{objective.__name__}-{name}", r) for r in (0, 1)]
                common = [{n: g for n, g in one.items() if n in single_process} for one in found]
                worst[wrap] = max(
                    worst[wrap], *(relative_error(one, single_process) for one in common)
                )
    assert max(worst.values()) < TOLERANCE
    errors = io.read_json(out / "outside-rank-0.json")
    assert "mark a variable ready only once" in errors["task_and_attention-unused"]
    assert "mark a variable ready only once" in errors["attention_only-unused"]
    assert "did not receive grad" in errors["attention_only-plain"]
    record_result(
        18,
        "DDP and FSDP, loss on attention inside the wrapped forward: gradients to 1e-6",
        f"{max(worst.values()):.0e} at worst in {len(worst)} wrappers",
        "computed outside, DDP raises: marked ready only once; did not receive grad",
    )


@pytest.mark.long
def test_scorecards_and_surrogates_of_two_processes_equal_those_of_one(
    out: Path, tmp_path: Path, record_result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as in the child processes
    two_processes.run_shared_work(tmp_path / "one")
    ours, theirs = tree(out), tree(tmp_path / "one")
    assert len(ours) > 10 and ours == theirs
    for part in ("scorecard", "surrogates"):
        shutil.copytree(out / part, tmp_path / "half" / part)
    deleted = remove_every_other(tmp_path / "half")
    two_processes.run_shared_work(tmp_path / "half")  # as after the kill of one process
    assert deleted > 2 and tree(tmp_path / "half") == ours
    error = mean_of_means(Surrogates(out / "surrogates"))
    assert error > 1e-3
    record_result(
        18,
        "metrics equal exactly; shared work resumes",
        f"{len(ours)} files of a scorecard and of surrogates with the same bytes, also after "
        f"{deleted} shards were lost",
        f"a mean of two processes' means: {error:.1%} off",
    )


def mean_of_means(found: Surrogates) -> float:
    """Return the relative error of the mean of the means of two processes."""
    scores = found.base(found.ids, found.names[0]).exp()
    process = torch.arange(len(scores)) // 3 % 2  # shards of three, alternating
    halves = (scores[process == 0].mean() + scores[process == 1].mean()) / 2
    return float((halves / scores.mean() - 1).abs())


def remove_every_other(folder: Path) -> int:
    """Delete the shards of the second process."""
    shards = [*sorted(folder.glob("*/parts/part-*")), *sorted(folder.glob("*/shard-*"))]
    for shard in shards[1::2]:
        shutil.rmtree(shard)
    return len(shards[1::2])


def tree(folder: Path) -> dict[str, str]:
    """Hash the shared files, without clocks and locks."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for part in ("scorecard", "surrogates")
        for path in sorted((folder / part).rglob("*"))
        if path.is_file() and path.name not in (".lock", "clock.json", "manifest.json")
    }
