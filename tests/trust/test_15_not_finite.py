"""Trust 15: a number that is not finite is found before an optimizer moves anything."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt import files
from overt.data.batch import Batch
from overt.errors import Failed
from overt.supervise.loss import Loss
from overt.train import Limits, Losses, Progress, fit, loop
from tests.train import toys

WHEN = 4  # the step that is poisoned
GUILTY = "number-"

Poison = Callable[[Losses, nn.Module, Batch], Losses]


def _more(losses: Losses, name: str, total: Tensor, one: str = "model") -> Losses:
    return {**losses, one: {**losses[one], name: Loss(total, torch.tensor(1.0))}}


def a_loss_of_nan(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    return _more(losses, "bad", losses["model"]["task"].total * float("nan"))


def a_loss_of_infinity(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    return _more(losses, "bad", losses["model"]["task"].total / 0)


def a_loss_of_minus_infinity(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    return _more(losses, "bad", (losses["model"]["task"].total * 0).log())


def a_loss_of_the_adversary(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    return _more(losses, "bad", losses["adversary"]["guess"].total * float("nan"), "adversary")


def a_gradient_of_nan(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    """The loss is finite: the root of zero, whose slope is not."""
    weight = model.head.weight
    return _more(losses, "bad", torch.where(weight > 9, weight, (weight * 0).sqrt()).sum())


def a_gradient_of_infinity(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    """The loss is finite, its slope is beyond 32 bits."""
    tiny = model.head.weight.detach() * 0 + 1e-30
    return _more(losses, "bad", ((model.head.weight * 0 + tiny).sqrt() * 1e30).sum() * 1e10)


def a_gradient_of_the_adversary(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    weight = model.adversary.weight
    return _more(losses, "bad", (weight * 0).abs().sqrt().sum(), "adversary")


def a_sample_of_nan(losses: Losses, model: nn.Module, batch: Batch) -> Losses:
    assert batch.features is not None
    features = batch.features.clone()
    features[-1, 0, 3] = torch.nan
    total = model.head(model.main(features[:, 0])).sum()
    return _more(losses, "bad", total)


POISONS: list[Poison] = [
    *(a_loss_of_nan, a_loss_of_infinity, a_loss_of_minus_infinity, a_loss_of_the_adversary),
    *(a_gradient_of_nan, a_gradient_of_infinity, a_gradient_of_the_adversary, a_sample_of_nan),
]


def state_of(net: nn.Module, sets: dict[str, Any]) -> str:
    """The weights and all that the optimizers remember, as one hash."""
    whole = hashlib.sha256()
    for tensor in net.state_dict().values():
        whole.update(tensor.numpy().tobytes())
    for one in sets.values():
        for slots in one.optimizer.state_dict()["state"].values():
            for _, value in sorted(slots.items()):
                whole.update(value.numpy().tobytes() if isinstance(value, Tensor) else b"")
    return whole.hexdigest()


def poisoned(poison: Poison, held: dict[str, Any]) -> Callable[..., Losses]:
    """The toy step with one bad batch; what stood before it is written down."""

    def step(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
        losses = toys.step(model, batch, progress)
        if progress.step != WHEN:
            return losses
        held.setdefault("before", state_of(model, held["sets"]))
        held.setdefault("ids", []).extend(batch.ids)
        return poison(losses, model, batch)

    return step


def limits(accumulate: int) -> Limits:
    return Limits(epochs=2, batch=8, accumulate=accumulate, save_every=WHEN)


def test_the_optimizer_never_sees_a_number_that_is_not_finite(
    tmp_path: Path, reached: Callable[..., None]
) -> None:
    """Stopped, the batch named, weights untouched, nothing saved; then the run goes on exactly."""
    cases = 0
    for accumulate in (1, 3):
        net, sets = toys.make()
        whole = tmp_path / f"whole-{accumulate}"
        fit(net, toys.Numbers(), toys.step, sets, limits(accumulate), out=whole, seed=0)
        wanted = state_of(net, sets)
        for poison in POISONS:
            out = tmp_path / f"{accumulate}-{poison.__name__}"
            net, sets = toys.make()
            held: dict[str, Any] = {"sets": sets}
            step = poisoned(poison, held)
            with pytest.raises(Failed) as caught:
                fit(net, toys.Numbers(), step, sets, limits(accumulate), out=out, seed=0)
            told = str(caught.value)
            assert f"is not finite at step {WHEN}" in told and "\n" not in told, poison
            named = told.partition("(samples ")[2].partition(" ...)")[0].split(", ")
            assert named[0].startswith(GUILTY) and set(named) <= set(held["ids"]), told
            assert state_of(net, sets) == held["before"], poison
            saved = sorted((out / "checkpoints/train").glob("step-*"))
            assert saved[-1].name == f"step-{WHEN:09d}" and files.is_whole(saved[-1])
            cases += 1
            if accumulate == 1:
                continue
            net, sets = toys.make()
            again = limits(accumulate)
            fit(net, toys.Numbers(), toys.step, sets, again, out=out, seed=0, resume=True)
            assert state_of(net, sets) == wanted, poison
    naive = sum(ruined(poison) for poison in POISONS)
    assert cases == 2 * len(POISONS) and naive == len(POISONS)
    reached(
        15,
        "found before the optimizer steps; batch named, weights untouched, nothing saved",
        f"{cases} of {cases}; resumed without the poison, {len(POISONS)} of {len(POISONS)} exact",
        f"a plain loop ends with weights that are not finite in {naive} of {len(POISONS)}",
    )


def ruined(poison: Poison) -> bool:
    """Whether the loop that everybody writes ends with weights that are not finite."""
    net, sets = toys.make()
    data = toys.Numbers()
    for number in range(WHEN + 2):
        batch = data.batch(range(8 * number % 40, 8 * number % 40 + 8))
        losses = toys.step(net, batch, Progress(number, 9, 0))
        if number == WHEN:
            losses = poison(losses, net, batch)
        for name, one in sets.items():
            one.optimizer.zero_grad()
            total = sum(loss.weight * loss.total for loss in losses[name].values())
            total.backward(inputs=one.parameters, retain_graph=True)  # type: ignore[union-attr]
        for one in sets.values():
            one.optimizer.step()
    return not all(bool(weight.isfinite().all()) for weight in net.parameters())


def test_weights_that_overflow_are_never_saved(
    tmp_path: Path, reached: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradient are finite; the step itself leads to infinity."""
    with pytest.raises(Failed, match=rf"adversary.* is not finite after step {WHEN + 1}"):
        overflow(tmp_path / "ours")
    saved = checkpoints(tmp_path / "ours")
    assert [folder.name for folder in saved][-1] == f"step-{WHEN:09d}"
    assert all(map(is_finite, saved))
    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "refuse_rotten", lambda run: None)
        with pytest.raises(AssertionError, match="with weights that are not finite"):
            overflow(tmp_path / "naive")
    rotten = [folder for folder in checkpoints(tmp_path / "naive") if not is_finite(folder)]
    assert len(rotten) == 1
    reached(
        15,
        "nothing saved after it",
        "weights that overflow in the step itself: 0 saved",
        f"a loop that looks at losses and gradients alone saves {len(rotten)}",
    )


def overflow(out: Path) -> None:
    """Train with a step that is too long for the numbers; it must not be built on."""
    net, sets = toys.make()
    pushed = sets["adversary"]
    pushed.rates = [1.0]
    pushed.schedule = lambda fraction: 1e30 if fraction * 14 > WHEN - 0.5 else 0.01

    def step(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
        assert progress.step <= WHEN, "a step was taken with weights that are not finite"
        losses = toys.step(model, batch, progress)
        if progress.step < WHEN:
            return losses
        push = (model.adversary.weight * 1e15).sum()
        return {**losses, "adversary": {"push": Loss(push, torch.tensor(1.0))}}

    every = Limits(epochs=2, batch=8, save_every=1)
    fit(net, toys.Numbers(), step, sets, every, out=out, seed=0)


def checkpoints(out: Path) -> list[Path]:
    return sorted((out / "checkpoints/train").glob("step-*"))


def is_finite(folder: Path) -> bool:
    kept = files.read_tensors(folder / "model.safetensors")
    return all(bool(tensor.isfinite().all()) for tensor in kept.values())
