"""Trust 15: non-finite losses, gradients and weights raise before they are used or saved."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt import io
from overt.data.batch import Batch
from overt.errors import RunError
from overt.losses.loss import Loss
from overt.train import FitConfig, Losses, Progress, fit, loop
from tests.train import toys

BAD_STEP = 4  # the step with the bad batch
ID_PREFIX = "number-"

Poison = Callable[[Losses, nn.Module, Batch], Losses]


def _add_loss(losses: Losses, name: str, total: Tensor, one: str = "model") -> Losses:
    return {**losses, one: {**losses[one], name: Loss(total, torch.tensor(1.0))}}


def a_loss_of_nan(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    return _add_loss(losses, "bad", losses["model"]["task"].total * float("nan"))


def a_loss_of_infinity(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    return _add_loss(losses, "bad", losses["model"]["task"].total / 0)


def a_loss_of_minus_infinity(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    return _add_loss(losses, "bad", (losses["model"]["task"].total * 0).log())


def a_loss_of_the_adversary(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    return _add_loss(losses, "bad", losses["adversary"]["guess"].total * float("nan"), "adversary")


def a_gradient_of_nan(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    """The loss is finite, but the gradient of the square root of zero is not."""
    weight = model.head.weight
    return _add_loss(losses, "bad", torch.where(weight > 9, weight, (weight * 0).sqrt()).sum())


def a_gradient_of_infinity(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    """The loss is finite, but its gradient overflows float32."""
    tiny = model.head.weight.detach() * 0 + 1e-30
    return _add_loss(losses, "bad", ((model.head.weight * 0 + tiny).sqrt() * 1e30).sum() * 1e10)


def a_gradient_of_the_adversary(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    weight = model.adversary.weight
    return _add_loss(losses, "bad", (weight * 0).abs().sqrt().sum(), "adversary")


def a_sample_of_nan(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    assert batch.features is not None
    features = batch.features.clone()
    features[-1, 0, 3] = torch.nan
    total = model.head(model.main(features[:, 0])).sum()
    return _add_loss(losses, "bad", total)


POISONS: list[Poison] = [
    *(a_loss_of_nan, a_loss_of_infinity, a_loss_of_minus_infinity, a_loss_of_the_adversary),
    *(a_gradient_of_nan, a_gradient_of_infinity, a_gradient_of_the_adversary, a_sample_of_nan),
]


def state_hash(net: nn.Module, sets: dict[str, Any]) -> str:
    """Hash the weights and the optimizer states."""
    reference = hashlib.sha256()
    for tensor in net.state_dict().values():
        reference.update(tensor.numpy().tobytes())
    for one in sets.values():
        for slots in one.optimizer.state_dict()["state"].values():
            for _, value in sorted(slots.items()):
                reference.update(value.numpy().tobytes() if isinstance(value, Tensor) else b"")
    return reference.hexdigest()


def step_with_bad_batch(poison: Poison, record: dict[str, Any]) -> Callable[..., Losses]:
    """Return the toy step with one bad batch; `record` gets the state before it."""

    def step(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
        losses = toys.step(model, batch, progress)
        if progress.step != BAD_STEP:
            return losses
        record.setdefault("before", state_hash(model, record["sets"]))
        record.setdefault("ids", []).extend(batch.ids)
        return poison(losses, model, batch)

    return step


def make_config(accumulate: int) -> FitConfig:
    return FitConfig(epochs=2, batch=8, accumulate=accumulate, save_every=BAD_STEP)


@pytest.mark.long
def test_non_finite_losses_and_gradients_never_reach_the_optimizer(
    tmp_path: Path, record_result: Callable[..., None]
) -> None:
    """The error lists the samples, nothing is changed or saved, and the run resumes exactly."""
    cases = 0
    for accumulate in (1, 3):
        net, sets = toys.make()
        reference = tmp_path / f"whole-{accumulate}"
        fit(net, toys.Numbers(), toys.step, sets, make_config(accumulate), out=reference, seed=0)
        expected = state_hash(net, sets)
        for poison in POISONS:
            out = tmp_path / f"{accumulate}-{poison.__name__}"
            net, sets = toys.make()
            record: dict[str, Any] = {"sets": sets}
            step = step_with_bad_batch(poison, record)
            with pytest.raises(RunError) as caught:
                fit(net, toys.Numbers(), step, sets, make_config(accumulate), out=out, seed=0)
            message = str(caught.value)
            assert f"is not finite at step {BAD_STEP}" in message and "\n" not in message, poison
            listed = message.partition("(samples ")[2].partition(" ...)")[0].split(", ")
            assert listed[0].startswith(ID_PREFIX) and set(listed) <= set(record["ids"]), message
            assert state_hash(net, sets) == record["before"], poison
            saved = sorted((out / "checkpoints/train").glob("step-*"))
            assert saved[-1].name == f"step-{BAD_STEP:09d}" and io.is_intact(saved[-1])
            cases += 1
            if accumulate == 1:
                continue
            net, sets = toys.make()
            config = make_config(accumulate)
            fit(net, toys.Numbers(), toys.step, sets, config, out=out, seed=0, resume=True)
            assert state_hash(net, sets) == expected, poison
    naive = sum(naive_loop_fails(poison) for poison in POISONS)
    assert cases == 2 * len(POISONS) and naive == len(POISONS)
    record_result(
        15,
        "error before the optimizer steps; samples listed, weights unchanged, nothing saved",
        f"{cases} of {cases}; resumed without the bad batch, "
        f"{len(POISONS)} of {len(POISONS)} exact",
        f"a plain loop ends with non-finite weights in {naive} of {len(POISONS)}",
    )


def naive_loop_fails(poison: Poison) -> bool:
    """Whether a plain training loop ends with non-finite weights."""
    net, sets = toys.make()
    data = toys.Numbers()
    for number in range(BAD_STEP + 2):
        batch = data.batch(range(8 * number % 40, 8 * number % 40 + 8))
        losses = toys.step(net, batch, Progress(number, 9, 0))
        if number == BAD_STEP:
            losses = poison(losses, net, batch)
        for name, one in sets.items():
            one.optimizer.zero_grad()
            total = sum(loss.weight * loss.total for loss in losses[name].values())
            total.backward(inputs=one.parameters, retain_graph=True)  # type: ignore[union-attr]
        for one in sets.values():
            one.optimizer.step()
    return not all(bool(weight.isfinite().all()) for weight in net.parameters())


def test_overflowed_weights_are_never_saved(
    tmp_path: Path, record_result: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradient are finite; the update overflows."""
    with pytest.raises(RunError, match=rf"adversary.*step {BAD_STEP + 1}"):
        train_with_overflow(tmp_path / "ours")
    saved = checkpoints(tmp_path / "ours")
    assert [folder.name for folder in saved][-1] == f"step-{BAD_STEP:09d}"
    assert all(map(is_finite, saved))
    with monkeypatch.context() as patch:
        patch.setattr(loop._FitLoop, "refuse_non_finite_weights", lambda run: None)
        with pytest.raises(AssertionError, match=r"non-finite weights"):
            train_with_overflow(tmp_path / "naive")
    non_finite = [folder for folder in checkpoints(tmp_path / "naive") if not is_finite(folder)]
    assert len(non_finite) == 1
    record_result(
        15,
        "nothing saved after an overflow",
        "weights that overflow in the update: 0 saved",
        f"a loop that checks only losses and gradients saves {len(non_finite)}",
    )


def train_with_overflow(out: Path) -> None:
    """Train with an update that overflows; no further step may run."""
    net, sets = toys.make()
    adversary = sets["adversary"]
    adversary.rates = [1.0]
    adversary.schedule = lambda fraction: 1e30 if fraction * 14 > BAD_STEP - 0.5 else 0.01

    def step(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
        assert progress.step <= BAD_STEP, "a step ran with non-finite weights"
        losses = toys.step(model, batch, progress)
        if progress.step < BAD_STEP:
            return losses
        push = (model.adversary.weight * 1e15).sum()
        return {**losses, "adversary": {"push": Loss(push, torch.tensor(1.0))}}

    config = FitConfig(epochs=2, batch=8, save_every=1)
    fit(net, toys.Numbers(), step, sets, config, out=out, seed=0)


def checkpoints(out: Path) -> list[Path]:
    return sorted((out / "checkpoints/train").glob("step-*"))


def is_finite(folder: Path) -> bool:
    kept = io.read_tensors(folder / "model.safetensors")
    return all(bool(tensor.isfinite().all()) for tensor in kept.values())
