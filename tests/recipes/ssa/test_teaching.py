"""Targets as tensors, placebos by name, and the step that teaches."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from overt import models, supervise
from overt.attention import AttentionMap, grid, words
from overt.data.batch import Batch
from overt.data.source import Source
from overt.errors import BadInput
from overt.recipes.ssa import teaching as ssa_teaching
from overt.recipes.ssa.recipe import Counts, Distance, Sees, Supervise, Target
from overt.recipes.ssa.teaching import (
    Lesson,
    by_gradient,
    from_data,
    gathered,
    placebo_of,
    portions,
    rivals_of,
    taught,
)
from overt.supervise.targets import fitted
from overt.train.loop import Progress
from overt.train.recording import sealed
from tests.recipes.han.test_building import Waits

CPU = torch.device("cpu")
IDS = tuple(f"s{n}" for n in range(6))
START = Progress(0, 10, 0)


def pictures(count: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    cells = torch.rand(count, 64, generator=generator)
    return Batch(
        IDS[:count],
        images,
        labels=torch.arange(count) % 3,
        target=AttentionMap.from_cells(cells, grid(8, 8)),
    )


def network() -> models.AttentiveCNN:
    torch.manual_seed(0)
    return models.AttentiveCNN(3, (4, 4, 4, 4), 4)


def maps(ids: Any) -> AttentionMap:
    """A map of each sample, the most on the cell of its own number."""
    rows = torch.tensor([IDS.index(one) for one in ids])
    weights = torch.full((len(rows), 64), 0.5 / 63)
    weights[torch.arange(len(rows)), rows] = 0.5
    return AttentionMap.from_cells(weights, grid(8, 8)).normalize()


class Toy:
    name, split = "toy", "train"

    def __len__(self) -> int:
        return 6

    def batch(self, rows: Any) -> Batch:
        return pictures().select(torch.tensor(list(rows)))

    def digest(self) -> str:
        return "toy"


# --- targets


def test_gathered_targets_are_those_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssa_teaching, "PORTION", 4)
    held = gathered(portions(maps, IDS), CPU)
    asked = ("s5", "s0", "s0")
    torch.testing.assert_close(held(asked).weights, maps(asked).weights)
    assert held(asked).keys.spans[0].shape == (8, 8)


def test_gathered_words_are_as_wide_as_the_longest_and_fit_any_batch() -> None:
    def texts(width: int) -> AttentionMap:
        there = torch.ones(1, width, dtype=torch.bool)
        return AttentionMap.from_cells(torch.ones(1, width), words(width), there).normalize()

    held = gathered([(("a",), texts(2)), (("b",), texts(5))], CPU)
    assert held(("a",)).weights.shape[-1] == 5
    assert held(("a",)).visible.sum() == 2
    torch.testing.assert_close(fitted(held(("a",)), texts(3)).weights.sum(), torch.tensor(1.0))
    with pytest.raises(BadInput, match="no samples"):
        gathered([], CPU)


@pytest.mark.parametrize(
    "target", [t for t in Target if t.value not in ("none", "truth", "gradcam")]
)
def test_placebos_by_name(target: Target) -> None:
    classes = {one: n % 2 for n, one in enumerate(IDS)}
    found = placebo_of(target, maps, IDS, lambda: classes)(IDS).weights[:, 0, 0, 0]
    own = maps(IDS).weights[:, 0, 0, 0]
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(6))
    match target:
        case Target.SURROGATE | Target.OWN:
            torch.testing.assert_close(found, own)
        case Target.UNIFORM:
            torch.testing.assert_close(found, torch.full_like(own, 1 / 64))
        case Target.SHUFFLED:
            peaks = found.argmax(dim=-1).tolist()
            assert sorted(peaks) == list(range(6)) and all(p != n for n, p in enumerate(peaks))
        case Target.IN_CLASS:
            peaks = found.argmax(dim=-1).tolist()
            assert all(p != n and p % 2 == n % 2 for n, p in enumerate(peaks))
        case Target.SCATTERED:
            torch.testing.assert_close(found.sort(dim=-1).values, own.sort(dim=-1).values)
        case _:
            assert not torch.allclose(found, own)


def test_gradcam_rests_on_what_the_right_answer_rests_on() -> None:
    net = network().eval()
    ((ids, found),) = by_gradient(net, Toy(), "image", CPU)
    assert ids == IDS and found.weights.shape == (6, 1, 1, 1, 64)
    batch = pictures()
    features = net.encode(batch)
    cells = features.values.detach().requires_grad_()
    logs = net.decide(replace(features, values=cells)).prediction.log_softmax(dim=-1)
    logs[torch.arange(6), batch.labels].sum().backward()
    slow = (cells * cells.grad.mean(dim=1, keepdim=True)).sum(dim=-1).clamp_min(0).detach()
    slow = slow / slow.sum(dim=-1, keepdim=True).clamp_min(1e-30)
    torch.testing.assert_close(found.weights[:, 0, 0, 0], slow)


def test_truth_that_is_not_there_is_refused() -> None:
    assert from_data(pictures(), "image").weights.sum() == pytest.approx(6)
    with pytest.raises(BadInput, match="does not say where to look in text"):
        from_data(pictures(), "text")


# --- the step


@pytest.mark.parametrize("loss", list(Distance))
def test_every_loss_gives_the_task_and_the_distance(loss: Distance) -> None:
    plan, batch = Supervise(loss=loss), pictures()
    torch.manual_seed(1)
    net = taught(network(), plan, ("image",), batch, 0)
    found = Lesson(plan, {"image": maps})(net, batch, START)
    assert {"task", "attention_image", "gamma_image"} == set(found["model"])
    assert ("rival" in found) is (loss is Distance.ADVERSARIAL)
    gradient = torch.autograd.grad(found["model"]["attention_image"].total, net.model.inner.weight)
    assert gradient[0].abs().sum() > 0
    # with the scale found, the distance counts as much as the task
    task, far = found["model"]["task"], found["model"]["attention_image"]
    torch.testing.assert_close(far.mean(), task.mean(), rtol=1e-4, atol=1e-4)


def test_plain_weights_are_taken_as_they_are() -> None:
    plan, batch = Supervise(loss=Distance.MSE, counts=Counts.PLAIN, weight=3.0), pictures()
    net = taught(network(), plan, ("image",), batch, 0)
    assert not net.teachers and not rivals_of(net, plan)
    found = Lesson(plan, {"image": maps})(net, batch, START)["model"]["attention_image"]
    seen = net.model(batch).looking_at("image").over_heads()
    assert found.weight == 3.0
    torch.testing.assert_close(found.total, supervise.mse(seen, maps(batch.ids)).total)


def test_the_truth_comes_with_the_batch() -> None:
    plan, batch = Supervise(Target.TRUTH, Distance.KL, counts=Counts.PLAIN), pictures()
    found = Lesson(plan, {"image": None})(network(), batch, START)["model"]["attention_image"]
    seen = network()(batch).looking_at("image")
    torch.testing.assert_close(found.total, supervise.kl(seen, batch.target.normalize()).total)


def test_rivals_have_parameters_of_their_own() -> None:
    plan, batch = Supervise(), pictures()
    net = taught(network(), plan, ("image",), batch, 0)
    theirs = {id(p) for p in rivals_of(net, plan)["rival"].parameters}
    assert theirs and not theirs & {id(p) for p in net.model.parameters()}
    found = Lesson(plan, {"image": maps})(net, batch, START)
    mine = found["rival"]["rival_image"].total
    left = torch.autograd.grad(mine, list(net.model.parameters()), allow_unused=True)
    assert all(one is None for one in left)


def test_a_rival_may_be_shown_what_a_map_takes_from_the_cells() -> None:
    plan, batch = Supervise(sees=Sees.ATTENDED), pictures()
    net = taught(network(), plan, ("image",), batch, 0)
    values = net.model.encode(batch).values.shape[-1]
    assert net.rival_image.values == values
    found = Lesson(plan, {"image": maps})(net, batch, START)
    assert found["rival"]["rival_image"].total.isfinite()
    gradient = torch.autograd.grad(found["model"]["attention_image"].total, net.model.inner.weight)
    assert gradient[0].abs().sum() > 0
    with pytest.raises(BadInput, match=r"sees=attended are for networks whose cells.*str are read"):
        ssa_teaching._values("texts as a whole", "text")


def test_a_rival_that_is_shown_nothing_cannot_tell_whose_target_is_whose() -> None:
    batch = pictures()
    handed_round = maps(batch.ids[1:] + batch.ids[:1])
    paid = {}
    for sees in (Sees.NOTHING, Sees.MEAN):
        plan = Supervise(sees=sees)
        torch.manual_seed(3)
        net = taught(network(), plan, ("image",), batch, 0).eval()  # without dropout
        paid[sees] = [
            Lesson(plan, {"image": lambda ids, one=one: one})(net, batch, START)["rival"][
                "rival_image"
            ].total
            for one in (maps(batch.ids), handed_round)
        ]
        assert (net.rival_image.context == 0) is (sees is Sees.NOTHING)
    torch.testing.assert_close(*paid[Sees.NOTHING])
    assert not torch.isclose(*paid[Sees.MEAN])


def test_several_right_answers_count_as_much_as_each_is_right() -> None:
    batch = replace(pictures(), answers=torch.eye(3)[torch.arange(6) % 3])
    output = network()(batch)
    found, wanted = ssa_teaching.task(output, batch), ssa_teaching.task(output, pictures())
    torch.testing.assert_close(found.mean(), wanted.mean())


# --- steps to be recorded


def test_data_with_targets_are_the_data_with_other_targets() -> None:
    aimed = ssa_teaching.Aimed(Toy(), maps)
    assert isinstance(aimed, Source)
    assert (aimed.name, aimed.split, len(aimed), aimed.digest()) == ("toy", "train", 6, "toy")
    found = aimed.batch([4, 1])
    assert found.ids == ("s4", "s1")
    torch.testing.assert_close(found.target.weights, maps(found.ids).weights)
    assert torch.equal(found.images[found.image_index], pictures().images[[4, 1]])


def test_scales_keep_steps_apart_until_they_are_found() -> None:
    plan, batch = Supervise(loss=Distance.MSE), pictures()
    net = taught(network(), plan, ("image",), batch, 0)
    net.gamma_image.batches = 3
    lesson, said = Lesson(plan, {"image": maps}), []
    for number in range(5):
        said.append(ssa_teaching.measuring(net, Progress(number, 10, 0)))
        lesson(net, batch, START)
    assert said == [0, 1, 2, None, None]
    assert ssa_teaching.measuring(network(), START) is None  # nothing to be measured


@pytest.mark.parametrize("loss", [one for one in Distance if one is not Distance.EMD])
def test_a_step_to_be_recorded_never_waits_and_reads_no_id(loss: Distance) -> None:
    """Forward and backward, as `fit` records them once the scale is found."""
    plan, aimed = Supervise(loss=loss), ssa_teaching.Aimed(Toy(), maps)
    net = taught(network(), plan, ("image",), aimed.batch(range(6)), 0)
    net.gamma_image.batches = 1
    lesson = Lesson(plan, {"image": None})
    lesson(net, aimed.batch(range(6)), START)
    still = sealed(aimed.batch(range(6)))
    torch.manual_seed(7)
    with Waits() as waits:
        found = lesson(net, still, START)
        for losses in found.values():
            sum(one.weight * one.total for one in losses.values()).backward(retain_graph=True)
    assert waits.found == set()
    torch.manual_seed(7)
    wanted = Lesson(plan, {"image": maps})(net, pictures(), START)  # by their ids
    for name, one in found["model"].items():
        torch.testing.assert_close(one.total, wanted["model"][name].total)
    with pytest.raises(BadInput, match="cannot be recorded"):
        Lesson(plan, {"image": maps})(net, sealed(pictures()), START)
