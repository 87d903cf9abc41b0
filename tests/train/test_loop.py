"""`fit`: exact resume, loss division, parameter sets, signals, early stopping, argument checks."""

import hashlib
import json
import os
import random
import re
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

from overt import io
from overt.errors import CorruptFileError, RunError, RunInterrupted, UserError
from overt.losses.loss import Loss
from overt.train import (
    FitConfig,
    Monitor,
    ParameterSet,
    doubling_warmup,
    fit,
    loop,
    warmup_cosine,
)
from overt.train.loop import derive_seed, seed_everything
from tests.train import toys


def weights(net: nn.Module) -> str:
    data = b"".join(tensor.numpy().tobytes() for tensor in net.state_dict().values())
    return hashlib.sha256(data).hexdigest()


def fingerprint(out: Path) -> dict[str, str]:
    """Hash the newest checkpoint and the log of a run, without clock times."""
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
    """Return the toy step, which raises in the forward pass of one step, like a crash."""

    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        if progress.step == step_number:
            raise Interrupted
        return toys.step(model, batch, progress)

    return step


@pytest.mark.long
@pytest.mark.parametrize("crash", [1, 3, 4, 6, 11])
def test_a_crashed_run_resumes_bit_for_bit(tmp_path: Path, crash: int) -> None:
    uninterrupted = toys.train(tmp_path / "whole")
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
    assert weights(resumed) == weights(uninterrupted)
    assert fingerprint(tmp_path / "broken") == fingerprint(tmp_path / "whole")


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    assert weights(toys.train(tmp_path / "a")) != weights(toys.train(tmp_path / "b", seed=1))


def test_data_workers_do_not_change_the_weights(tmp_path: Path) -> None:
    plain = toys.train(tmp_path / "a")
    workers = toys.train(tmp_path / "b", config=replace(toys.LIMITS, workers=2))
    assert weights(plain) == weights(workers)


def test_accumulating_equals_one_large_batch(tmp_path: Path) -> None:
    """With uneven rows the loss is divided by the count of the window, not a mean of means."""
    nets = []
    for name, batch, accumulate in (("one", 16, 1), ("two", 8, 2), ("four", 4, 4)):
        net, sets = toys.make(dropout=0.0)
        net.double()
        data = toys.Numbers(48)
        data.features = data.features.double()
        config = FitConfig(epochs=2, batch=batch, accumulate=accumulate)
        fit(net, data, toys.step, sets, config, out=tmp_path / name, seed=0, device="cpu")
        nets.append(net)
    for other in nets[1:]:
        for a, b in zip(nets[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_the_gradient_is_that_of_the_mean_over_rows(tmp_path: Path) -> None:
    """One step of plain SGD subtracts the gradient of the mean losses."""
    torch.manual_seed(0)
    net = toys.Net(dropout=0.0)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    data = toys.Numbers(10)
    batch = data.batch(range(10))
    losses = toys.step(net, batch, None)["model"]  # type: ignore[arg-type]
    objective = sum(loss.weight * loss.total / loss.count for loss in losses.values())
    main_parameters = [*net.main.parameters(), *net.head.parameters()]
    expected = torch.autograd.grad(objective, main_parameters, allow_unused=True)
    sets = {
        "model": ParameterSet(torch.optim.SGD(main_parameters, lr=1.0)),
        "adversary": ParameterSet(torch.optim.SGD(net.adversary.parameters(), lr=1.0)),
    }
    fit(net, data, toys.step, sets, FitConfig(1, 10), out=str(tmp_path), seed=0, device="cpu")
    after = dict(net.named_parameters())
    names = [name for name, _ in net.named_parameters() if not name.startswith("adversary")]
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(before[name] - gradient, after[name])


def test_parameter_sets_do_not_update_each_other(tmp_path: Path) -> None:
    """The fooling loss has a gradient for the adversary, which must not be applied."""

    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        losses = toys.step(model, batch, progress)
        nothing = losses["adversary"]["guess"]
        return {"model": losses["model"], "adversary": {"guess": 0.0 * nothing}}

    net, sets = toys.make()
    before = net.adversary.weight.detach().clone()
    main = net.head.weight.detach().clone()
    fit(net, toys.Numbers(), step, sets, FitConfig(1, 8), out=tmp_path, seed=0, device="cpu")
    assert torch.equal(net.adversary.weight, before)
    assert not torch.equal(net.head.weight, main)


def test_a_parameter_in_two_sets_raises(tmp_path: Path) -> None:
    net = toys.Net()
    sets = {name: ParameterSet(torch.optim.SGD(net.parameters(), lr=1)) for name in "ab"}
    with pytest.raises(ValueError, match="share a parameter"):
        fit(
            net,
            toys.Numbers(),
            toys.step,
            sets,
            FitConfig(1, 8),
            out=tmp_path,
            seed=0,
            device="cpu",
        )


def test_batch_level_losses_raise_with_accumulation(tmp_path: Path) -> None:
    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        loss = toys.step(model, batch, progress)["model"]["task"]
        return {"model": {"mmd": Loss(loss.total, loss.count, batch_level=True)}}

    net, sets = toys.make()
    with pytest.raises(UserError, match=r"train\.accumulate=1"):
        fit(net, toys.Numbers(), step, sets, toys.LIMITS, out=tmp_path, seed=0, device="cpu")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_non_finite_loss_raises_before_any_weight_changes(
    tmp_path: Path, accumulate: int
) -> None:
    recorded = {}

    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        losses = toys.step(model, batch, progress)
        if progress.step == 3:
            recorded["weights"] = weights(model)
            bad = Loss(losses["adversary"]["guess"].total * float("nan"), torch.tensor(1.0))
            return {**losses, "adversary": {"guess": bad}}
        return losses

    net, sets = toys.make()
    config = FitConfig(2, 8, accumulate=accumulate, save_every=1)
    with pytest.raises(RunError, match=r"adversary/guess.*step 3.*number-"):
        fit(net, toys.Numbers(), step, sets, config, out=tmp_path, seed=0, device="cpu")
    assert weights(net) == recorded["weights"]
    newest = sorted((tmp_path / "checkpoints" / "train").glob("step-*"))[-1]
    assert newest.name == "step-000000003"


def test_a_loss_without_rows_is_zero_with_finite_gradient(tmp_path: Path) -> None:
    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        losses = dict(toys.step(model, batch, progress)["model"])
        total = model.hidden(batch).sum() * 0
        return {"model": {**losses, "none": Loss(total, torch.tensor(0))}}

    net, sets = toys.make()
    fit(net, toys.Numbers(), step, sets, FitConfig(1, 8), out=tmp_path, seed=0, device="cpu")
    assert all(p.isfinite().all() for p in net.parameters())


def test_sigterm_saves_a_checkpoint_and_the_error_suggests_resume(tmp_path: Path) -> None:
    uninterrupted = toys.train(tmp_path / "whole")

    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        if progress.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return toys.step(model, batch, progress)

    net, sets = toys.make()
    out = tmp_path / "stopped"
    with pytest.raises(RunInterrupted, match="--resume") as stop:
        fit(net, toys.Numbers(), step, sets, toys.LIMITS, out=out, seed=0, device="cpu")
    assert stop.value.code == 143
    assert (out / "checkpoints" / "train" / "step-000000006").is_dir()
    assert weights(toys.train(out, resume=True)) == weights(uninterrupted)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_in_the_last_step_is_not_lost(tmp_path: Path) -> None:
    """Otherwise the next stage would start after the signal."""

    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        if progress.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return toys.step(model, batch, progress)

    net, sets = toys.make()
    config = FitConfig(epochs=1, batch=10)
    with pytest.raises(RunInterrupted, match="step 5 of 5"):
        fit(net, toys.Numbers(), step, sets, config, out=tmp_path, seed=0, device="cpu")
    before = weights(net)
    fitted = fit(
        net, toys.Numbers(), step, sets, config, out=tmp_path, seed=0, device="cpu", resume=True
    )
    assert fitted.steps == 5 and weights(net) == before


@pytest.mark.long
def test_signals_to_the_process_group_do_not_stop_the_data_workers(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of a terminal: one message, one checkpoint."""
    code = (
        "import os, signal, sys, pathlib, time\n"
        "from overt.data.batch import Batch\n"
        "from overt.errors import RunInterrupted\n"
        "from overt.train import FitConfig, fit\n"
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
        "limits = FitConfig(epochs=1, batch=4, accumulate=2, workers=2)\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "try:\n"
        "    fit(net, toys.Numbers(), toys.step, sets, limits, out=out, seed=0, device='cpu')\n"
        "except RunInterrupted as stop:\n"
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


def test_a_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        return toys.step(model, batch, progress)

    net, sets = toys.make()
    with pytest.raises(KeyboardInterrupt):
        fit(net, toys.Numbers(), step, sets, toys.LIMITS, out=tmp_path, seed=0, device="cpu")


def test_existing_checkpoints_raise_without_resume(tmp_path: Path) -> None:
    toys.train(tmp_path)
    with pytest.raises(UserError, match="--resume"):
        toys.train(tmp_path)


def test_resuming_a_finished_stage_changes_nothing(tmp_path: Path) -> None:
    first = toys.train(tmp_path)
    log = (tmp_path / "log.jsonl").read_bytes()
    assert weights(toys.train(tmp_path, resume=True)) == weights(first)
    assert (tmp_path / "log.jsonl").read_bytes() == log


def test_a_damaged_newest_checkpoint_is_skipped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    uninterrupted = toys.train(tmp_path)
    folders = sorted((tmp_path / "checkpoints" / "train").glob("step-*"))
    path = folders[-1] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    assert weights(toys.train(tmp_path, resume=True)) == weights(uninterrupted)
    assert "damaged" in capfd.readouterr().err
    for folder in (tmp_path / "checkpoints" / "train").glob("step-*"):
        (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CorruptFileError):
        toys.train(tmp_path, resume=True)


def test_early_stopping_restores_the_best_weights(tmp_path: Path) -> None:
    scores = [0.1, 0.5, 0.4, 0.3, 0.2, 0.9]
    recorded: list[str] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        recorded.append(weights(model))
        assert not model.training
        return {"score": scores[len(recorded) - 1]}

    net, sets = toys.make()
    config = FitConfig(epochs=6, batch=8, patience=1)
    fitted = fit(
        net,
        toys.Numbers(),
        toys.step,
        sets,
        config,
        out=tmp_path,
        seed=0,
        device="cpu",
        monitor=Monitor(evaluate, "score"),
    )
    assert len(recorded) == 4 and fitted.epochs == 4
    assert weights(net) == recorded[1]
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["measures"]["score"] for row in rows if row["split"] == "val"] == scores[:4]


def test_a_nan_metric_is_never_the_best(tmp_path: Path) -> None:
    scores = iter([float("nan"), 0.2, float("nan"), 0.1, 0.5])
    net, sets = toys.make()
    config = FitConfig(epochs=5, batch=25, patience=1)
    monitor = Monitor(lambda model: {"score": next(scores)}, "score")
    fit(
        net, toys.Numbers(), toys.step, sets, config, out=tmp_path, seed=0, device="cpu",
        monitor=monitor,
    )  # fmt: skip
    newest = sorted((tmp_path / "checkpoints" / "train").glob("step-*"))[-1]
    state = json.loads((newest / "state.json").read_text())
    assert (state["step"], state["best"], state["best_step"]) == (8, 0.2, 4)


def test_stages_share_a_log_and_a_folder(tmp_path: Path) -> None:
    """The second stage keeps the log lines of the first; finished stages do not run again."""

    def both(resume: bool, crash: int = -1) -> None:
        net, sets = toys.make()
        for stage in ("first", "second"):
            number = crash if stage == "second" else -1
            fit(
                net, toys.Numbers(), stop_at(number), sets, FitConfig(2, 25, log_every=1),
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


def test_resuming_with_another_seed_raises(tmp_path: Path) -> None:
    toys.train(tmp_path)
    with pytest.raises(UserError, match="seed 0.* 1"):
        toys.train(tmp_path, resume=True, seed=1)


@pytest.mark.parametrize("name", ["batch", "accumulate", "save_every", "log_every"])
def test_config_values_below_one_raise(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} .* 1, got 0"):
        replace(toys.LIMITS, **{name: 0})


def test_an_empty_dataset_raises(tmp_path: Path) -> None:
    net, sets = toys.make()
    with pytest.raises(UserError, match="empty.* 'train'"):
        fit(net, toys.Numbers(0), toys.step, sets, toys.LIMITS, out=tmp_path, seed=0, device="cpu")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_frozen_weights_do_not_change_and_the_others_do(tmp_path: Path, accumulate: int) -> None:
    net, sets = toys.make()
    for parameter in net.main.parameters():
        parameter.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    config = FitConfig(1, 8, accumulate=accumulate)
    fit(net, toys.Numbers(), toys.step, sets, config, out=tmp_path, seed=0, device="cpu")
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, before[name]) is name.startswith("main."), name


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_with_wrong_losses_raises(tmp_path: Path, accumulate: int) -> None:
    net, sets = toys.make()
    cases = [(lambda *_: {}, "step 0"), (lambda *_: {"other": {}}, "other")]
    for step, pattern in cases:
        with pytest.raises(ValueError, match=pattern):
            fit(
                net, toys.Numbers(), step, sets, FitConfig(1, 8, accumulate=accumulate),
                out=tmp_path, seed=0, device="cpu",
            )  # fmt: skip


def test_bf16_trains(tmp_path: Path) -> None:
    net = toys.train(tmp_path, config=replace(toys.LIMITS, bf16=True))
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in net.parameters())


def test_the_step_limit_ends_a_run_before_its_epochs(tmp_path: Path) -> None:
    net, sets = toys.make()
    config = FitConfig(epochs=100, batch=8, steps=5)
    fitted = fit(net, toys.Numbers(), toys.step, sets, config, out=tmp_path, seed=0, device="cpu")
    assert fitted.steps == 5 and fitted.samples == 40


def test_warmup_cosine_rises_then_falls() -> None:
    rate = warmup_cosine(0.1)
    assert rate(0.05) == pytest.approx(0.5)
    assert rate(0.1) == pytest.approx(1.0)
    assert rate(0.55) == pytest.approx(0.5)
    assert rate(1.0) == pytest.approx(0.0, abs=1e-12)


def test_doubling_warmup_doubles_up_to_the_full_rate() -> None:
    """The rate is 5e-6, doubled every 20 of 500 epochs up to 5e-4."""
    rate = doubling_warmup(0.01, 20 / 500)
    for epoch in range(500):
        wanted = min(5e-4, 5e-6 * 2 ** (epoch // 20))
        assert 5e-4 * rate(epoch / 500) == pytest.approx(wanted)
    assert rate(1.0) == 1.0
    assert doubling_warmup(1.0)(0.0) == 1.0
    for first, every in ((0.0, 0.1), (2.0, 0.1), (0.5, 0.0)):
        with pytest.raises(ValueError, match="got"):
            doubling_warmup(first, every)


@pytest.mark.long
def test_derive_seed_does_not_depend_on_the_hash_seed() -> None:
    code = "from overt.train.loop import derive_seed; print(derive_seed(1, 'train', 2))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(found.stdout) == derive_seed(1, "train", 2)


def test_seed_everything_seeds_torch_numpy_and_random() -> None:
    seed_everything(7)
    ours = torch.rand(3), np.random.rand(), random.random()  # noqa: NPY002
    torch.manual_seed(7)
    assert torch.equal(ours[0], torch.rand(3))
    seed_everything(7)
    assert ours[1:] == (np.random.rand(), random.random())  # noqa: NPY002


@pytest.mark.parametrize("name", ["epochs", "steps", "patience", "workers"])
def test_negative_config_values_raise(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} .* 0, got -1"):
        replace(toys.LIMITS, **{name: -1})


@pytest.mark.parametrize(
    ("changed", "pattern"),
    [
        ({"epochs": 8}, "steps 16.* 32"),
        ({"batch": 4, "accumulate": 4}, "batch 8.* 4.* accumulate 2.* 4"),
    ],
)
def test_resuming_with_another_config_raises(
    tmp_path: Path, changed: dict[str, int], pattern: str
) -> None:
    toys.train(tmp_path)
    with pytest.raises(UserError, match=pattern):
        toys.train(tmp_path, resume=True, config=replace(toys.LIMITS, **changed))


def test_a_checkpoint_without_a_plan_resumes(tmp_path: Path) -> None:
    toys.train(tmp_path)
    newest = sorted((tmp_path / "checkpoints" / "train").glob("step-*"))[-1]
    state = json.loads((newest / "state.json").read_text())
    assert state.pop("plan") == {"items": 50, "batch": 8, "accumulate": 2, "steps": 16}
    with io.atomic_folder(newest) as folder:
        for path in newest.iterdir():
            if path.name not in ("state.json", io.MANIFEST):
                shutil.copy(path, folder / path.name)
        io.write_json(folder / "state.json", state)
    toys.train(tmp_path, resume=True)


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Error messages by case, from a process without type checks, as users run it."""
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.train.invalid_arguments",
            str(tmp_path_factory.mktemp("run")),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(ended.stdout))


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "pattern"),
    [
        ("half an epoch", "epochs .*1.5"),
        ("a list", "a list.*data.batch"),
        ("a batch that is a tuple", "Batch, got a tuple"),
        ("an optimizer", r"\['adversary'\].* \['model'\]"),
        ("no set", "ParameterSet.* got no sets"),
        ("a set that is an optimizer", "'model' is a SGD"),
        ("a monitor that is a function", "Monitor.* got a function"),
        ("a tensor", "Loss.* got a Tensor"),
        ("no losses", "Loss.* got a NoneType"),
        ("a loss without a name", "'model' is a Loss"),
        ("a loss without a count", "'task' is a Tensor"),
        ("a count that is not a tensor", "count .*'task'.* got 8"),
        ("one loss per row", r"total .*'task'.* shape \[3\]"),
    ],
)
def test_invalid_arguments_raise_with_their_name(
    messages: dict[str, str], case: str, pattern: str
) -> None:
    assert re.search(pattern, messages[case]), messages[case]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_without_a_gradient_raises(tmp_path: Path, accumulate: int) -> None:
    net, sets = toys.make()

    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            return toys.step(model, batch, progress)

    config = FitConfig(1, 8, accumulate=accumulate)
    with pytest.raises(UserError, match="'model'.* gradient"):
        fit(net, toys.Numbers(), step, sets, config, out=tmp_path, seed=0, device="cpu")


def test_a_loss_of_zero_needs_no_gradient(tmp_path: Path) -> None:
    """The loss may start later, or have no rows in this batch."""
    net, sets = toys.make()

    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        losses = toys.step(model, batch, progress)
        return {**losses, "adversary": {"guess": Loss(torch.zeros(()), torch.tensor(8))}}

    before = net.adversary.weight.detach().clone()
    config = FitConfig(1, 8, steps=2)
    fit(net, toys.Numbers(), step, sets, config, out=tmp_path, seed=0, device="cpu")
    assert torch.equal(net.adversary.weight, before)


def test_parameters_outside_the_model_raise(tmp_path: Path) -> None:
    (net, sets), (_, others) = toys.make(), toys.make()
    sets["adversary"] = others["adversary"]
    with pytest.raises(UserError, match="'adversary' has 2 "):
        fit(net, toys.Numbers(), toys.step, sets, toys.LIMITS, out=tmp_path, seed=0, device="cpu")


def test_patience_without_a_monitor_raises(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="monitor"):
        toys.train(tmp_path, config=replace(toys.LIMITS, patience=1))


def test_a_monitor_without_its_metric_raises(tmp_path: Path) -> None:
    net, sets = toys.make()
    monitor = Monitor(lambda model: {"accuracy": 1.0}, best="f1")
    with pytest.raises(UserError, match="'f1'.* accuracy"):
        fit(
            net, toys.Numbers(), toys.step, sets, toys.LIMITS,
            out=tmp_path, seed=0, device="cpu", monitor=monitor,
        )  # fmt: skip


# --- torch datasets, plain batches and scalar losses


class Pairs(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The toy numbers as pairs."""

    def __init__(self, count: int = 50) -> None:
        self.numbers = toys.Numbers(count)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.numbers.features[index, 0], self.numbers.labels[index]


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 3)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def loss_of_pair(model, batch, progress):  # type: ignore[no-untyped-def]
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train_pairs(out: Path, data, step=loss_of_pair, sets=sgd, **config: int) -> nn.Module:  # type: ignore[no-untyped-def]
    net = classifier()
    config = {"epochs": 2, "batch": 8, **config}
    fit(net, data, step, sets(net), FitConfig(**config), out=out, seed=0, device="cpu")
    return net


def explicit(model, batch, progress):  # type: ignore[no-untyped-def]
    """The step of `loss_of_pair` on a `Batch`, with sums and counts."""
    logits = model(batch.features[:, 0])
    each = nn.functional.cross_entropy(logits, batch.labels, reduction="none")
    return {"model": {"loss": Loss(each.sum(), torch.tensor(len(batch)))}}


def as_mapping(batch) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    return {"x": batch[0], "labels": batch[1]}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_torch_dataset_with_a_scalar_loss_equals_sums_and_counts(
    tmp_path: Path, accumulate: int
) -> None:
    """50 items in batches of 8: the last batch of each epoch has 2, and weighs a quarter."""
    wanted = train_pairs(
        tmp_path / "a", toys.Numbers(), explicit,
        lambda net: {"model": ParameterSet(sgd(net))}, accumulate=accumulate,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Pairs(), batch_size=8, shuffle=True)
    for number, data in enumerate((Pairs(), loader)):
        ours = train_pairs(tmp_path / f"b{number}", data, accumulate=accumulate)
        torch.testing.assert_close(ours.weight, wanted.weight)


def test_a_step_may_return_named_losses_of_one_set(tmp_path: Path) -> None:
    def named(model, batch, progress):  # type: ignore[no-untyped-def]
        count = torch.tensor(len(batch["x"]))
        task = nn.functional.cross_entropy(model(batch["x"]), batch["labels"])
        return {"task": task, "decay": 0.1 * Loss(count * model.weight.square().sum(), count)}

    def collate(items):  # type: ignore[no-untyped-def]
        return as_mapping(torch.utils.data.default_collate(items))

    loader = torch.utils.data.DataLoader(Pairs(), batch_size=8, collate_fn=collate)
    net = train_pairs(tmp_path, loader, named)
    assert not torch.equal(net.weight, classifier().weight)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert set(lines[-1]["losses"]) == {"task", "decay"}


def test_a_dataset_of_mappings_trains_and_resumes(tmp_path: Path) -> None:
    class Mappings(toys.Numbers):
        def batch(self, indices):  # type: ignore[no-untyped-def]
            return {**vars(super().batch(indices)), "ids": [f"m{one}" for one in indices]}

    def step(model, batch, progress):  # type: ignore[no-untyped-def]
        return Loss(model(batch["features"][:, 0]).square().sum(), torch.tensor(1))

    whole = train_pairs(tmp_path / "whole", Mappings(), step)
    train_pairs(tmp_path / "part", Mappings(), step, epochs=2, save_every=3)
    shutil.rmtree(sorted((tmp_path / "part/checkpoints/train").glob("step-*"))[-1])
    net = classifier()
    config = FitConfig(epochs=2, batch=8, save_every=3)
    fit(
        net, Mappings(), step, sgd(net), config, out=tmp_path / "part", seed=0, device="cpu",
        resume=True,
    )  # fmt: skip
    assert torch.equal(net.weight, whole.weight)


def test_errors_name_the_items_of_plain_batches(tmp_path: Path) -> None:
    def wrong(model, batch, progress):  # type: ignore[no-untyped-def]
        return model(batch[0]).sum() * torch.nan

    with pytest.raises(RunError, match=r"loss .*samples \d+"):
        train_pairs(tmp_path, Pairs(), wrong)


@pytest.mark.parametrize(
    ("step", "pattern"),
    [
        (lambda model, batch, progress: model(batch[0])[:, 0], r"'loss' .*\[8\]"),
        (lambda model, batch, progress: {"a": 1.0}, "'a' .*got float"),
        (lambda model, batch, progress: None, "got a NoneType"),
    ],
)
def test_wrong_losses_of_a_simple_step_raise(tmp_path: Path, step, pattern: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=pattern):
        train_pairs(tmp_path, Pairs(), step)


def test_the_processes_of_a_loader_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = torch.utils.data.DataLoader(Pairs(), batch_size=8, num_workers=3)
    data, config = loop.as_train_dataset(loader, FitConfig(epochs=1, batch=8))
    assert config.workers == 3 and len(data) == 50
    assert loop.as_train_dataset(loader, replace(config, workers=1))[1].workers == 1
    numbers = toys.Numbers()
    assert loop.as_train_dataset(numbers, config) == (numbers, config)
