"""Mid-epoch resume for the five methods: the losses that follow are the same, bit for bit."""

import itertools
from pathlib import Path

import pytest

from overt.recipes import find, settings
from overt.recipes.recipe import Context
from overt.supervise.surrogate import kept
from overt.train import Reporter, loop
from overt.train.loop import mixed, seed_everything
from tests.recipes.a2 import small as a2
from tests.recipes.vgp import small as vgp
from tests.trust import lives

EPOCHS = 7  # of four steps: twenty are left after the last interruption
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
MADE = "surrogates"
STAGES = {
    "ltpa": ["train"],
    "ssa": ["baseline", MADE, "train"],
    "han": ["train"],
    "vgp": ["tune"],
    "a2": ["train", "critic"],
}


class Interrupted(BaseException):
    """What ends a life here; nothing catches it, and nothing is saved for it."""


def recipe(method: str):
    name, sets = METHODS[method]
    return settings.apply(find(name), [*sets, *COMMON])


class Lives:
    """Runs all stages of a recipe, through as many interruptions as are planned."""

    def __init__(self, patch: pytest.MonkeyPatch, interrupt: bool) -> None:
        self.losses: dict[tuple[str, int], object] = {}
        self.met: list[tuple[str, str]] = []
        self.steps: dict[str, int] = {}
        self.latest: dict[str, int] = {}
        self.strict = True
        self.patch, self.interrupt = patch, interrupt

    def point(self, run, micro: int) -> str:
        """What kind of moment a forward pass is, if one to interrupt."""
        first = run.steps_per_epoch
        where = {first: "first", first + first // 2: "middle", 2 * first - 1: "last"}
        if micro == 0:
            return where.get(run.state.step, "")
        return "within a window" if run.state.step == 2 * first and micro == 1 else ""

    def forward(self, true):
        def forward(run, part, micro):
            kind = self.interrupt and self.point(run, micro)
            if kind and (run.stage, kind) not in self.met:
                self.met.append((run.stage, kind))
                self.latest[run.stage] = run.state.step
                raise Interrupted
            return true(run, part, micro)

        return forward

    def update(self, true):
        def update(run, window):
            found = true(run, window)
            key = run.stage, run.state.step
            if self.losses.setdefault(key, found) != found:  # a step that is made again
                assert not self.strict
            self.steps[run.stage] = run.steps
            return found

        return update

    def keep(self, true):
        def keep(*arguments):
            if self.interrupt and (MADE, "between shards") not in self.met:
                self.met.append((MADE, "between shards"))
                raise Interrupted
            true(*arguments)

        return keep

    def run(self, recipe, out: Path) -> str:
        """All stages to their end; the hash of the weights."""
        with self.patch.context() as patch:
            patch.setattr(loop._Run, "forward", self.forward(loop._Run.forward))
            patch.setattr(loop._Run, "update", self.update(loop._Run.update))
            patch.setattr(kept, "keep", self.keep(kept.keep))
            for life in itertools.count():
                try:
                    seed_everything(mixed(0, recipe.name, "build"))
                    experiment = recipe.build(Context(out, 0, "cpu", None))
                    for stage in experiment.stages:
                        stage.run(life > 0, Reporter(enabled=False))
                    return lives.weights(experiment.model)
                except Interrupted:
                    continue
        raise AssertionError


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_interrupted_training_goes_on_bit_for_bit(tmp_path, monkeypatch, reached, method) -> None:
    whole = Lives(monkeypatch, interrupt=False)
    wanted = whole.run(recipe(method), tmp_path / "whole")
    broken = Lives(monkeypatch, interrupt=True)
    assert broken.run(recipe(method), tmp_path / "broken") == wanted
    assert broken.losses == whole.losses
    logs = [(tmp_path / name / "log.jsonl").read_bytes() for name in ("whole", "broken")]
    assert logs[0] == logs[1]
    stages = STAGES[method]
    kinds = {kind for _, kind in broken.met}
    assert {"first", "middle", "last", "within a window"} <= kinds
    assert {stage for stage, _ in broken.met} == set(stages)
    after = min(broken.steps[stage] - broken.latest[stage] for stage in stages if stage != MADE)
    assert after >= 20
    reached(
        4,
        "first, middle and last step of an epoch, within a window: 20 losses bit-equal",
        f"{len(broken.met)} interruptions in {' and '.join(stages)}: all {len(whole.losses)} "
        f"losses, weights and log bit-equal, {after} steps after the last",
    )


@pytest.mark.long
def test_a_loop_that_draws_anew_on_resume_fails_the_same_test(
    tmp_path, monkeypatch, reached
) -> None:
    """Weights and optimizers come back, the order of samples and the random numbers do not."""
    whole = Lives(monkeypatch, interrupt=False)
    wanted = whole.run(recipe("ltpa"), tmp_path / "whole")
    naive = Lives(monkeypatch, interrupt=True)
    naive.strict = False
    true = loop.mixed
    with monkeypatch.context() as patch:
        patch.setattr(loop, "mixed", lambda *parts: true(*parts, len(naive.met)))
        found = naive.run(recipe("ltpa"), tmp_path / "naive")
    wrong = sum(naive.losses[key] != loss for key, loss in whole.losses.items())
    assert found != wanted and wrong > 0
    reached(4, "must fail", "fails", f"{wrong} of {len(whole.losses)} losses differ")
