"""Mid-epoch resume for the five methods: all later losses are equal bit for bit."""

import itertools
from pathlib import Path

import pytest

from overt.experiments import settings
from overt.experiments.recipe import RunContext
from overt.papers.catalog import build, find_recipe
from overt.targets.surrogate import store
from overt.train import Reporter, loop
from overt.train.loop import derive_seed, seed_everything
from tests.papers.a2 import small as a2
from tests.papers.vgp import small as vgp
from tests.trust import child_process

EPOCHS = 7  # of four steps each: twenty follow the last interruption
COMMON = [f"train.epochs={EPOCHS}", "train.batch=2", "train.accumulate=2", "train.save_every=1"]
SMALLER = ["data.limit=16", "data.train=16", "data.val=2", "data.test=2", "model.layers=1"]
SMALLER += [f"critic.epochs={EPOCHS}", "critic.draws=2", "align.fuse=decay"]
METHODS = {
    "ltpa": ("ltpa-scenes", ["data.limit=16", "model.width=0.05"]),
    "ssa": ("ssa-scenes", ["data.limit=16", "model.width=0.25"]),
    "han": ("han-scenes", ["data.limit=16", "model.width=0.25"]),
    "vgp": ("vgp-scenes", [*vgp.SETS, "data.limit=16", "train.steps=28"]),
    "a2": ("a2-scenes", [*a2.SETS, *SMALLER]),
}
SURROGATES = "surrogates"
STAGES = {
    "ltpa": ["train"],
    "ssa": ["baseline", SURROGATES, "train"],
    "han": ["train"],
    "vgp": ["tune"],
    "a2": ["train", "critic"],
}


class Interrupted(BaseException):
    """Interrupts a run; nothing catches it and nothing is saved."""


def recipe(method: str):
    name, sets = METHODS[method]
    return settings.apply(find_recipe(name), [*sets, *COMMON])


class InterruptedRun:
    """Runs all stages of a recipe with the planned interruptions."""

    def __init__(self, patch: pytest.MonkeyPatch, interrupt: bool) -> None:
        self.losses: dict[tuple[str, int], object] = {}
        self.interruptions: list[tuple[str, str]] = []
        self.steps: dict[str, int] = {}
        self.latest: dict[str, int] = {}
        self.strict = True
        self.patch, self.interrupt = patch, interrupt

    def interruption_kind(self, run, micro: int) -> str:
        """Return the kind of the interruption before a forward pass, or an empty string."""
        first = run.steps_per_epoch
        kinds = {first: "first", first + first // 2: "middle", 2 * first - 1: "last"}
        if micro == 0:
            return kinds.get(run.state.step, "")
        return "within a window" if run.state.step == 2 * first and micro == 1 else ""

    def forward(self, original):
        def forward(run, part, micro):
            kind = self.interrupt and self.interruption_kind(run, micro)
            if kind and (run.stage, kind) not in self.interruptions:
                self.interruptions.append((run.stage, kind))
                self.latest[run.stage] = run.state.step
                raise Interrupted
            return original(run, part, micro)

        return forward

    def update(self, original):
        def update(run, window):
            found = original(run, window)
            key = run.stage, run.state.step
            if self.losses.setdefault(key, found) != found:  # a repeated step
                assert not self.strict
            self.steps[run.stage] = run.steps
            return found

        return update

    def write_shard(self, original):
        def write_shard(*arguments):
            if self.interrupt and (SURROGATES, "between shards") not in self.interruptions:
                self.interruptions.append((SURROGATES, "between shards"))
                raise Interrupted
            original(*arguments)

        return write_shard

    def run(self, recipe, out: Path) -> str:
        """Run all stages and return the hash of the weights."""
        with self.patch.context() as patch:
            patch.setattr(loop._FitLoop, "forward", self.forward(loop._FitLoop.forward))
            patch.setattr(loop._FitLoop, "update", self.update(loop._FitLoop.update))
            patch.setattr(store, "write_shard", self.write_shard(store.write_shard))
            for attempt in itertools.count():
                try:
                    seed_everything(derive_seed(0, recipe.name, "build"))
                    experiment = build(recipe, RunContext(out, 0, "cpu", None))
                    for stage in experiment.stages:
                        stage.run(attempt > 0, Reporter(enabled=False))
                    return child_process.weights(experiment.model)
                except Interrupted:
                    continue
        raise AssertionError


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_interrupted_training_resumes_bit_for_bit(
    tmp_path, monkeypatch, record_result, method
) -> None:
    uninterrupted = InterruptedRun(monkeypatch, interrupt=False)
    expected = uninterrupted.run(recipe(method), tmp_path / "whole")
    interrupted = InterruptedRun(monkeypatch, interrupt=True)
    assert interrupted.run(recipe(method), tmp_path / "broken") == expected
    assert interrupted.losses == uninterrupted.losses
    logs = [(tmp_path / name / "log.jsonl").read_bytes() for name in ("whole", "broken")]
    assert logs[0] == logs[1]
    stages = STAGES[method]
    kinds = {kind for _, kind in interrupted.interruptions}
    assert {"first", "middle", "last", "within a window"} <= kinds
    assert {stage for stage, _ in interrupted.interruptions} == set(stages)
    after = min(
        interrupted.steps[stage] - interrupted.latest[stage]
        for stage in stages
        if stage != SURROGATES
    )
    assert after >= 20
    record_result(
        4,
        "first, middle and last step of an epoch, within a window: 20 losses bit-equal",
        f"{len(interrupted.interruptions)} interruptions in {' and '.join(stages)}: "
        f"all {len(uninterrupted.losses)} losses, weights and log bit-equal, "
        f"{after} steps after the last",
    )


@pytest.mark.long
def test_resuming_with_new_random_numbers_gives_other_losses(
    tmp_path, monkeypatch, record_result
) -> None:
    """Weights and optimizers are restored, the order of samples and random numbers are not."""
    uninterrupted = InterruptedRun(monkeypatch, interrupt=False)
    expected = uninterrupted.run(recipe("ltpa"), tmp_path / "whole")
    naive = InterruptedRun(monkeypatch, interrupt=True)
    naive.strict = False
    original = loop.derive_seed
    with monkeypatch.context() as patch:
        patch.setattr(
            loop, "derive_seed", lambda *parts: original(*parts, len(naive.interruptions))
        )
        found = naive.run(recipe("ltpa"), tmp_path / "naive")
    different = sum(naive.losses[key] != loss for key, loss in uninterrupted.losses.items())
    assert found != expected and different > 0
    record_result(
        4, "must fail", "fails", f"{different} of {len(uninterrupted.losses)} losses differ"
    )
