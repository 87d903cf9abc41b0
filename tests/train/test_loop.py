"""The loop: exact resume, exact division, sets that do not touch, and stops that lose nothing."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from overt import files
from overt.errors import BadInput, Damaged, Failed, Stopped
from overt.supervise.loss import Loss
from overt.train import Limits, Monitor, ParameterSet, doubling, fit, warm_then_cosine
from overt.train.loop import mixed, seed_everything
from tests.train import toys


def weights(net: nn.Module) -> str:
    data = b"".join(tensor.numpy().tobytes() for tensor in net.state_dict().values())
    return hashlib.sha256(data).hexdigest()


def fingerprint(out: Path) -> dict[str, str]:
    """What the newest checkpoint and the log of a run hold, clock times aside."""
    newest = sorted((out / "checkpoints" / "train").glob("step-*"))[-1]
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(newest.iterdir())
        if path.suffix == ".safetensors" or path.name.endswith("optimizer.json")
    }
    found["log"] = hashlib.sha256((out / "log.jsonl").read_bytes()).hexdigest()
    return found | {"step": newest.name}


class Interrupted(Exception):
    pass


def stop_at(step_number: int):  # type: ignore[no-untyped-def]
    """The toy step, but it breaks off in the forward pass of one step, as a crash would."""

    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        if progress.step == step_number:
            raise Interrupted
        return toys.step(model, batch, progress)

    return step


@pytest.mark.parametrize("crash", [1, 3, 4, 6, 11])
def test_a_run_that_broke_off_goes_on_bit_for_bit(tmp_path: Path, crash: int) -> None:
    whole = toys.train(tmp_path / "whole")
    net, sets = toys.make()
    with pytest.raises(Interrupted):
        fit(
            net,
            toys.Numbers(),
            stop_at(crash),
            sets,
            toys.LIMITS,
            out=tmp_path / "broken",
            seed=0,
            device="cpu",
        )
    if (tmp_path / "broken" / "checkpoints").exists():
        resumed = toys.train(tmp_path / "broken", resume=True)
    else:
        resumed = toys.train(tmp_path / "broken")
    assert weights(resumed) == weights(whole)
    assert fingerprint(tmp_path / "broken") == fingerprint(tmp_path / "whole")


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    assert weights(toys.train(tmp_path / "a")) != weights(toys.train(tmp_path / "b", seed=1))


def test_loading_in_other_processes_changes_nothing(tmp_path: Path) -> None:
    plain = toys.train(tmp_path / "a")
    workers = toys.train(tmp_path / "b", limits=replace(toys.LIMITS, workers=2))
    assert weights(plain) == weights(workers)


def test_accumulating_equals_one_large_batch(tmp_path: Path) -> None:
    """Uneven rows: the count is taken over the window, not a mean of means."""
    nets = []
    for name, batch, accumulate in (("one", 16, 1), ("two", 8, 2), ("four", 4, 4)):
        net, sets = toys.make(dropout=0.0)
        net.double()
        data = toys.Numbers(48)
        data.features = data.features.double()
        limits = Limits(epochs=2, batch=batch, accumulate=accumulate)
        fit(net, data, toys.step, sets, limits, out=tmp_path / name, seed=0, device="cpu")
        nets.append(net)
    for other in nets[1:]:
        for a, b in zip(nets[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_gradient_is_that_of_the_mean_over_rows(tmp_path: Path) -> None:
    """One step of plain SGD moves the weights by the gradient that autograd finds for the means."""
    torch.manual_seed(0)
    net = toys.Net(dropout=0.0)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    data = toys.Numbers(10)
    batch = data.batch(range(10))
    losses = toys.step(net, batch, None)["model"]  # type: ignore[arg-type]
    objective = sum(loss.weight * loss.total / loss.count for loss in losses.values())
    own = [*net.main.parameters(), *net.head.parameters()]
    expected = torch.autograd.grad(objective, own, allow_unused=True)
    sets = {
        "model": ParameterSet(torch.optim.SGD(own, lr=1.0)),
        "adversary": ParameterSet(torch.optim.SGD(net.adversary.parameters(), lr=1.0)),
    }
    fit(net, data, toys.step, sets, Limits(1, 10), out=str(tmp_path), seed=0, device="cpu")
    after = dict(net.named_parameters())
    names = [name for name, _ in net.named_parameters() if not name.startswith("adversary")]
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(before[name] - gradient, after[name])


def test_sets_never_touch_each_other(tmp_path: Path) -> None:
    """The fooling loss reaches the adversary's weights through autograd, and must not move them."""

    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        losses = toys.step(model, batch, progress)
        nothing = losses["adversary"]["guess"]
        return {"model": losses["model"], "adversary": {"guess": 0.0 * nothing}}

    net, sets = toys.make()
    before = net.adversary.weight.detach().clone()
    main = net.head.weight.detach().clone()
    fit(net, toys.Numbers(), step, sets, Limits(1, 8), out=tmp_path, seed=0, device="cpu")
    assert torch.equal(net.adversary.weight, before)
    assert not torch.equal(net.head.weight, main)


def test_a_parameter_in_two_sets_is_refused(tmp_path: Path) -> None:
    net = toys.Net()
    sets = {name: ParameterSet(torch.optim.SGD(net.parameters(), lr=1)) for name in "ab"}
    with pytest.raises(ValueError, match="share a parameter"):
        fit(net, toys.Numbers(), toys.step, sets, Limits(1, 8), out=tmp_path, seed=0, device="cpu")


def test_batch_level_losses_refuse_accumulation(tmp_path: Path) -> None:
    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        loss = toys.step(model, batch, progress)["model"]["task"]
        return {"model": {"mmd": Loss(loss.total, loss.count, batch_level=True)}}

    net, sets = toys.make()
    with pytest.raises(BadInput, match=r"train\.accumulate=1"):
        fit(net, toys.Numbers(), step, sets, toys.LIMITS, out=tmp_path, seed=0, device="cpu")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_not_finite_stops_before_any_weight_moves(
    tmp_path: Path, accumulate: int
) -> None:
    seen = {}

    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        losses = toys.step(model, batch, progress)
        if progress.step == 3:
            seen["weights"] = weights(model)
            bad = Loss(losses["adversary"]["guess"].total * float("nan"), torch.tensor(1.0))
            return {**losses, "adversary": {"guess": bad}}
        return losses

    net, sets = toys.make()
    limits = Limits(2, 8, accumulate=accumulate, save_every=1)
    with pytest.raises(Failed, match=r"adversary/guess.*step 3.*number-"):
        fit(net, toys.Numbers(), step, sets, limits, out=tmp_path, seed=0, device="cpu")
    assert weights(net) == seen["weights"]
    newest = sorted((tmp_path / "checkpoints" / "train").glob("step-*"))[-1]
    assert newest.name == "step-000000003"


def test_a_loss_without_rows_is_zero_with_finite_gradient(tmp_path: Path) -> None:
    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        losses = dict(toys.step(model, batch, progress)["model"])
        total = model.hidden(batch).sum() * 0
        return {"model": {**losses, "none": Loss(total, torch.tensor(0))}}

    net, sets = toys.make()
    fit(net, toys.Numbers(), step, sets, Limits(1, 8), out=tmp_path, seed=0, device="cpu")
    assert all(p.isfinite().all() for p in net.parameters())


def test_signals_save_and_name_the_way_on(tmp_path: Path) -> None:
    whole = toys.train(tmp_path / "whole")

    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        if progress.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return toys.step(model, batch, progress)

    net, sets = toys.make()
    out = tmp_path / "stopped"
    with pytest.raises(Stopped, match="--resume") as stop:
        fit(net, toys.Numbers(), step, sets, toys.LIMITS, out=out, seed=0, device="cpu")
    assert stop.value.code == 143
    assert (out / "checkpoints" / "train" / "step-000000006").is_dir()
    assert weights(toys.train(out, resume=True)) == weights(whole)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_in_the_last_step_is_not_lost(tmp_path: Path) -> None:
    """Another stage may follow, and whoever sent it will not wait for that."""

    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        if progress.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return toys.step(model, batch, progress)

    net, sets = toys.make()
    limits = Limits(epochs=1, batch=10)
    with pytest.raises(Stopped, match="step 5 of 5"):
        fit(net, toys.Numbers(), step, sets, limits, out=tmp_path, seed=0, device="cpu")
    before = weights(net)
    fitted = fit(
        net, toys.Numbers(), step, sets, limits, out=tmp_path, seed=0, device="cpu", resume=True
    )
    assert fitted.steps == 5 and weights(net) == before


def test_signals_to_the_whole_group_leave_the_loading_processes_alone(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of a terminal: one line is said, one checkpoint saved."""
    code = (
        "import os, signal, sys, pathlib, time\n"
        "from overt.data.batch import Batch\n"
        "from overt.errors import Stopped\n"
        "from overt.train import Limits, fit\n"
        "from tests.train import toys\n"
        "true, calls = Batch.to, []\n"
        "def to(batch, device):\n"
        "    calls.append(device)\n"
        "    if len(calls) == 3:  # the window of the second step is being loaded\n"
        "        os.killpg(0, getattr(signal, sys.argv[2]))\n"
        "        time.sleep(0.5)\n"
        "    return true(batch, device)\n"
        "Batch.to = to\n"
        "net, sets = toys.make()\n"
        "limits = Limits(epochs=1, batch=4, accumulate=2, workers=2)\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "try:\n"
        "    fit(net, toys.Numbers(), toys.step, sets, limits, out=out, seed=0, device='cpu')\n"
        "except Stopped as stop:\n"
        "    print(stop.code)\n"
    )
    for name, number in (("SIGINT", 130), ("SIGTERM", 143)):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / name), name],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )
        assert done.stdout.split() == [str(number)], done.stderr
        assert done.stderr.count("stopping after this step") == 1
        found = sorted((tmp_path / name / "checkpoints" / "train").iterdir())
        assert [path.name for path in found] == ["step-000000002"]


def test_a_second_interrupt_does_not_wait(tmp_path: Path) -> None:
    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        return toys.step(model, batch, progress)

    net, sets = toys.make()
    with pytest.raises(KeyboardInterrupt):
        fit(net, toys.Numbers(), step, sets, toys.LIMITS, out=tmp_path, seed=0, device="cpu")


def test_checkpoints_are_not_overwritten_unasked(tmp_path: Path) -> None:
    toys.train(tmp_path)
    with pytest.raises(BadInput, match="--resume"):
        toys.train(tmp_path)


def test_a_finished_stage_is_taken_as_it_is(tmp_path: Path) -> None:
    first = toys.train(tmp_path)
    log = (tmp_path / "log.jsonl").read_bytes()
    assert weights(toys.train(tmp_path, resume=True)) == weights(first)
    assert (tmp_path / "log.jsonl").read_bytes() == log


def test_a_damaged_newest_checkpoint_is_passed_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = toys.train(tmp_path)
    folders = sorted((tmp_path / "checkpoints" / "train").glob("step-*"))
    path = folders[-1] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert weights(toys.train(tmp_path, resume=True)) == weights(whole)
    assert "damaged" in capfd.readouterr().err
    for folder in (tmp_path / "checkpoints" / "train").glob("step-*"):
        (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(Damaged):
        toys.train(tmp_path, resume=True)


def test_early_stopping_puts_the_best_weights_back(tmp_path: Path) -> None:
    scores = [0.1, 0.5, 0.4, 0.3, 0.2, 0.9]
    seen: list[str] = []

    def measure(model: nn.Module) -> dict[str, float]:
        seen.append(weights(model))
        assert not model.training
        return {"score": scores[len(seen) - 1]}

    net, sets = toys.make()
    limits = Limits(epochs=6, batch=8, patience=1)
    fitted = fit(
        net,
        toys.Numbers(),
        toys.step,
        sets,
        limits,
        out=tmp_path,
        seed=0,
        device="cpu",
        monitor=Monitor(measure, "score"),
    )
    assert len(seen) == 4 and fitted.epochs == 4
    assert weights(net) == seen[1]
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["measures"]["score"] for row in rows if row["split"] == "val"] == scores[:4]


def test_a_measure_that_is_not_a_number_is_no_best(tmp_path: Path) -> None:
    scores = iter([float("nan"), 0.2, float("nan"), 0.1, 0.5])
    net, sets = toys.make()
    limits = Limits(epochs=5, batch=25, patience=1)
    monitor = Monitor(lambda model: {"score": next(scores)}, "score")
    fit(
        net, toys.Numbers(), toys.step, sets, limits, out=tmp_path, seed=0, device="cpu",
        monitor=monitor,
    )  # fmt: skip
    newest = sorted((tmp_path / "checkpoints" / "train").glob("step-*"))[-1]
    state = json.loads((newest / "state.json").read_text())
    assert (state["step"], state["best"], state["best_step"]) == (8, 0.2, 4)


def test_stages_share_a_log_and_a_folder(tmp_path: Path) -> None:
    """The second leaves the lines of the first; both are taken as they are once they are done."""

    def both(resume: bool, crash: int = -1) -> None:
        net, sets = toys.make()
        for stage in ("first", "second"):
            number = crash if stage == "second" else -1
            fit(
                net, toys.Numbers(), stop_at(number), sets, Limits(2, 25, log_every=1),
                out=tmp_path, seed=0, device="cpu", stage=stage, resume=resume,
            )  # fmt: skip

    both(resume=False)
    log = (tmp_path / "log.jsonl").read_bytes()
    stages = [json.loads(line)["stage"] for line in log.splitlines()]
    assert stages == ["first"] * 4 + ["second"] * 4
    both(resume=True)
    assert (tmp_path / "log.jsonl").read_bytes() == log
    shutil.rmtree(tmp_path / "checkpoints" / "second")
    with pytest.raises(Interrupted):
        both(resume=True, crash=2)
    both(resume=True)
    assert (tmp_path / "log.jsonl").read_bytes() == log


def test_a_run_goes_on_with_its_own_seed_only(tmp_path: Path) -> None:
    toys.train(tmp_path)
    with pytest.raises(BadInput, match="with seed 0, not 1"):
        toys.train(tmp_path, resume=True, seed=1)


@pytest.mark.parametrize("name", ["batch", "accumulate", "save_every", "log_every"])
def test_limits_below_one_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"{name} must be at least 1, not 0"):
        replace(toys.LIMITS, **{name: 0})


def test_nothing_to_train_on_is_refused(tmp_path: Path) -> None:
    net, sets = toys.make()
    with pytest.raises(BadInput, match="nothing to train on in stage 'train'"):
        fit(net, toys.Numbers(0), toys.step, sets, toys.LIMITS, out=tmp_path, seed=0, device="cpu")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_frozen_weights_stay_and_the_rest_learns(tmp_path: Path, accumulate: int) -> None:
    net, sets = toys.make()
    for parameter in net.main.parameters():
        parameter.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    limits = Limits(1, 8, accumulate=accumulate)
    fit(net, toys.Numbers(), toys.step, sets, limits, out=tmp_path, seed=0, device="cpu")
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before[name]) is name.startswith("main."), name


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_gives_the_wrong_losses_is_told(tmp_path: Path, accumulate: int) -> None:
    net, sets = toys.make()
    wrong = [(lambda *_: {}, "no loss at step 0"), (lambda *_: {"other": {}}, "sets are")]
    for step, sentence in wrong:
        with pytest.raises(ValueError, match=sentence):
            fit(
                net, toys.Numbers(), step, sets, Limits(1, 8, accumulate=accumulate),
                out=tmp_path, seed=0, device="cpu",
            )  # fmt: skip


def test_bf16_trains(tmp_path: Path) -> None:
    net = toys.train(tmp_path, limits=replace(toys.LIMITS, bf16=True))
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in net.parameters())


def test_steps_end_a_run_before_its_epochs(tmp_path: Path) -> None:
    net, sets = toys.make()
    limits = Limits(epochs=100, batch=8, steps=5)
    fitted = fit(net, toys.Numbers(), toys.step, sets, limits, out=tmp_path, seed=0, device="cpu")
    assert fitted.steps == 5 and fitted.samples == 40


def test_the_rate_climbs_then_falls() -> None:
    rate = warm_then_cosine(0.1)
    assert rate(0.05) == pytest.approx(0.5)
    assert rate(0.1) == pytest.approx(1.0)
    assert rate(0.55) == pytest.approx(0.5)
    assert rate(1.0) == pytest.approx(0.0, abs=1e-12)


def test_the_rate_doubles_until_it_is_there() -> None:
    """5e-6, doubled every 20 of 500 epochs up to 5e-4, at the beginning of each epoch."""
    rate = doubling(0.01, 20 / 500)
    for epoch in range(500):
        wanted = min(5e-4, 5e-6 * 2 ** (epoch // 20))
        assert 5e-4 * rate(epoch / 500) == pytest.approx(wanted)
    assert rate(1.0) == 1.0
    assert doubling(1.0)(0.0) == 1.0
    for first, every in ((0.0, 0.1), (2.0, 0.1), (0.5, 0.0)):
        with pytest.raises(ValueError, match="cannot start at"):
            doubling(first, every)


def test_seeds_are_mixed_the_same_everywhere() -> None:
    code = "from overt.train.loop import mixed; print(mixed(1, 'train', 2))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(found.stdout) == mixed(1, "train", 2)


def test_seeding_gives_the_numbers_that_torch_gives() -> None:
    seed_everything(7)
    ours = torch.rand(3), np.random.rand(), random.random()  # noqa: NPY002
    torch.manual_seed(7)
    assert torch.equal(ours[0], torch.rand(3))
    seed_everything(7)
    assert ours[1:] == (np.random.rand(), random.random())  # noqa: NPY002


@pytest.mark.parametrize("name", ["epochs", "steps", "patience", "workers"])
def test_limits_below_nothing_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"{name} must be at least 0, not -1"):
        replace(toys.LIMITS, **{name: -1})


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"epochs": 8}, "with steps 16, not 32; a run goes on only as it began"),
        ({"batch": 4, "accumulate": 4}, "with batch 8, not 4, accumulate 2, not 4"),
    ],
)
def test_a_run_goes_on_only_as_it_began(
    tmp_path: Path, changed: dict[str, int], sentence: str
) -> None:
    toys.train(tmp_path)
    with pytest.raises(BadInput, match=sentence):
        toys.train(tmp_path, resume=True, limits=replace(toys.LIMITS, **changed))


def test_a_checkpoint_that_does_not_tell_its_plan_goes_on(tmp_path: Path) -> None:
    toys.train(tmp_path)
    newest = sorted((tmp_path / "checkpoints" / "train").glob("step-*"))[-1]
    state = json.loads((newest / "state.json").read_text())
    assert state.pop("plan") == {"items": 50, "batch": 8, "accumulate": 2, "steps": 16}
    with files.writing(newest) as folder:
        for path in newest.iterdir():
            if path.name not in ("state.json", files.MANIFEST):
                shutil.copy(path, folder / path.name)
        files.write_json(folder / "state.json", state)
    toys.train(tmp_path, resume=True)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said to a mistake, by its name; types are checked here, and are not for users."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.train.mistakes", str(tmp_path_factory.mktemp("mistakes"))],
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(ended.stdout))


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("half an epoch", "epochs must be a whole number, not 1.5"),
        ("a list", "a list is not data that can be trained on"),
        ("a batch that is none", "the data gave a tuple, and not a Batch"),
        ("an optimizer", "parameters come in sets by name"),
        ("no set", "ParameterSet(optimizer)}, not as nothing"),
        ("a set that is an optimizer", "set 'model' is given as SGD, not as in"),
        ("a monitor that is a function", "the monitor is a function; give Monitor("),
        ("a tensor", "losses by parameter set; this one returned a Tensor"),
        ("no losses", "this one returned a NoneType"),
        ("a loss without a name", "losses by parameter set; 'model' is a Loss"),
        ("a loss without a count", "losses by parameter set; 'task' is a Tensor"),
        ("a count that is no tensor", "the count of loss 'task' is 8, not a tensor of one number"),
        ("a loss a row", "the total of loss 'task' is [3], not a tensor of one number"),
    ],
)
def test_mistakes_are_told_in_a_sentence(told: dict[str, str], mistake: str, sentence: str) -> None:
    assert sentence in told[mistake]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_without_a_gradient_is_refused(tmp_path: Path, accumulate: int) -> None:
    net, sets = toys.make()

    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            return toys.step(model, batch, progress)

    limits = Limits(1, 8, accumulate=accumulate)
    with pytest.raises(BadInput, match="no loss of set 'model' has a gradient"):
        fit(net, toys.Numbers(), step, sets, limits, out=tmp_path, seed=0, device="cpu")


def test_a_loss_of_zero_needs_no_gradient(tmp_path: Path) -> None:
    """It may come later, or have no rows in this batch."""
    net, sets = toys.make()

    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        losses = toys.step(model, batch, progress)
        return {**losses, "adversary": {"guess": Loss(torch.zeros(()), torch.tensor(8))}}

    before = net.adversary.weight.detach().clone()
    limits = Limits(1, 8, steps=2)
    fit(net, toys.Numbers(), step, sets, limits, out=tmp_path, seed=0, device="cpu")
    assert torch.equal(net.adversary.weight, before)


def test_parameters_that_no_checkpoint_would_hold_are_refused(tmp_path: Path) -> None:
    (net, sets), (_, others) = toys.make(), toys.make()
    sets["adversary"] = others["adversary"]
    with pytest.raises(BadInput, match="'adversary' moves 2 parameters that are not the model's"):
        fit(net, toys.Numbers(), toys.step, sets, toys.LIMITS, out=tmp_path, seed=0, device="cpu")


def test_patience_without_a_validation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="give a monitor, or leave patience out"):
        toys.train(tmp_path, limits=replace(toys.LIMITS, patience=1))


def test_a_monitor_that_lacks_its_measure_is_told(tmp_path: Path) -> None:
    net, sets = toys.make()
    monitor = Monitor(lambda model: {"accuracy": 1.0}, best="f1")
    with pytest.raises(BadInput, match="goes by 'f1', and measured accuracy"):
        fit(
            net, toys.Numbers(), toys.step, sets, toys.LIMITS,
            out=tmp_path, seed=0, device="cpu", monitor=monitor,
        )  # fmt: skip
