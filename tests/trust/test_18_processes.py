"""Trust 18: two processes have the gradients and metrics of one, whoever has supervised rows."""

import hashlib
import shutil
from pathlib import Path

import pytest
import torch

from overt import files
from overt.supervise import Surrogates
from tests.trust import together
from tests.trust.together import CASES, SUPERVISED, WRAPPERS, attention_alone, both

OBJECTIVES = (both, attention_alone)
MARK = 1e-6


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The length of the difference of two gradients, as a share of the second one's."""
    assert set(ours) == set(theirs)
    names = sorted(theirs)
    one, two = (torch.cat([each[n].double().flatten() for n in names]) for each in (ours, theirs))
    assert two.norm() > 1e-3
    return float((one - two).norm() / two.norm())


def read(out: Path, name: str, rank: int) -> dict[str, torch.Tensor]:
    return files.read_tensors(out / f"{name}-rank-{rank}.safetensors")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of it in one launch: most of the time goes into starting."""
    folder = tmp_path_factory.mktemp("two")
    words = [*CASES, "naive", "wrapped", "outside", "shared"]
    together.done(together.start("tests.trust.together", str(folder), *words))
    return folder


@pytest.mark.long
def test_two_processes_take_the_step_of_one(out: Path, tmp_path: Path, reached) -> None:
    """Uneven supervised rows, a process with none, an uneven last batch, accumulation 1, 2, 4."""
    alone = {name: together.one_step(case, tmp_path / name) for name, case in CASES.items()}
    worst = max(apart(read(out, name, rank), alone[name]) for name in CASES for rank in (0, 1))
    naive = {
        name: apart(read(out, f"naive-{name}", 0), alone[name]) for name in ("uneven-1", "none-1")
    }
    assert worst < MARK < 0.05 < min(naive.values())
    # and one process does not care how its batch was cut
    cut = max(
        apart(alone[f"{name}-{n}"], alone[f"{name}-1"]) for name in SUPERVISED for n in (2, 4)
    )
    assert cut < MARK
    reached(
        18,
        "gradients to 1e-6 after one step, accumulation 1, 2, 4",
        f"{worst:.0e} at worst in {len(CASES)} cases",
        f"a mean of means: {min(naive.values()):.0%} off or more",
    )


@pytest.mark.long
def test_a_loss_inside_the_wrapper_has_the_gradients_of_one_process(out: Path, reached) -> None:
    worst = dict.fromkeys((wrap.__name__ for wrap in WRAPPERS), 0.0)
    for objective in OBJECTIVES:
        for name, supervised in SUPERVISED.items():
            batch = together.aside_batch(supervised)
            alone = together.wrapped_gradients(together.adopted(), batch, objective)
            for wrap in worst:
                found = [read(out, f"{wrap}-{objective.__name__}-{name}", r) for r in (0, 1)]
                kept = [{n: g for n, g in one.items() if n in alone} for one in found]
                worst[wrap] = max(worst[wrap], *(apart(one, alone) for one in kept))
    assert max(worst.values()) < MARK
    told = files.read_json(out / "outside-rank-0.json")
    assert "mark a variable ready only once" in told["both-unused"]
    assert "mark a variable ready only once" in told["attention_alone-unused"]
    assert "did not receive grad" in told["attention_alone-plain"]
    reached(
        18,
        "DDP and FSDP, loss on attention inside the wrapped forward: gradients to 1e-6",
        f"{max(worst.values()):.0e} at worst in {len(worst)} wrappers",
        "computed outside, DDP raises: marked ready only once; did not receive grad",
    )


@pytest.mark.long
def test_scorecards_and_surrogates_of_two_processes_are_those_of_one(
    out: Path, tmp_path: Path, reached, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as in the other processes
    together.share_out(tmp_path / "one")
    ours, theirs = tree(out), tree(tmp_path / "one")
    assert len(ours) > 10 and ours == theirs
    for part in ("scorecard", "surrogates"):
        shutil.copytree(out / part, tmp_path / "half" / part)
    lost = remove_every_other(tmp_path / "half")
    together.share_out(tmp_path / "half")  # as after one of the two was killed
    assert lost > 2 and tree(tmp_path / "half") == ours
    off = mean_of_means(Surrogates(out / "surrogates"))
    assert off > 1e-3
    reached(
        18,
        "metrics equal exactly; shared work resumes",
        f"{len(ours)} files of a scorecard and of surrogates with the same bytes, also after "
        f"{lost} shards were lost",
        f"a mean of two processes' means: {off:.1%} off",
    )


def mean_of_means(found: Surrogates) -> float:
    """How far off a score is that each process averages over its own shards, and both over that."""
    scores = found.base(found.ids, found.names[0]).exp()
    turn = torch.arange(len(scores)) // 3 % 2  # shards of three, in turns
    halves = (scores[turn == 0].mean() + scores[turn == 1].mean()) / 2
    return float((halves / scores.mean() - 1).abs())


def remove_every_other(folder: Path) -> int:
    """Take away the shards of the second process."""
    shards = [*sorted(folder.glob("*/parts/part-*")), *sorted(folder.glob("*/shard-*"))]
    for shard in shards[1::2]:
        shutil.rmtree(shard)
    return len(shards[1::2])


def tree(folder: Path) -> dict[str, str]:
    """The bytes of everything that was made together, but for clocks and locks."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for part in ("scorecard", "surrogates")
        for path in sorted((folder / part).rglob("*"))
        if path.is_file() and path.name not in (".lock", "clock.json", "manifest.json")
    }
