"""Supervision of attention: targets as tensors, placebo targets, and the supervised step."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from overt import nn
from overt.attention import AttentionMap, grid, words
from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.data.in_memory_images import (
    ShiftFlip,
    apply_shift_flip,
    draw_shift_flip,
    random_shift_flip,
)
from overt.errors import UserError
from overt.geometry import PixelGeometry
from overt.losses import Loss, kl, mse
from overt.papers.ssa import supervision as ssa_teaching
from overt.papers.ssa.config import (
    SsaDiscriminatorInput,
    SsaLoss,
    SsaSupervise,
    SsaTarget,
    SsaWeighting,
)
from overt.papers.ssa.supervision import (
    SsaStep,
    discriminator_sets,
    gather_targets,
    grad_cam_targets,
    placebo_targets,
    supervised_model,
    target_chunks,
    truth_target,
)
from overt.targets.sources import match_keys
from overt.targets.surrogate import mean_map
from overt.train.cuda_graph import static_copy
from overt.train.loop import Progress
from tests.data.test_in_memory_images import slow_shift_flip
from tests.papers.han.test_train import SynchronizationRecorder

CPU = torch.device("cpu")
IDS = tuple(f"s{n}" for n in range(6))
START = Progress(0, 10, 0)


def make_batch(count: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    cells = torch.rand(count, 64, generator=generator)
    return Batch(
        IDS[:count],
        images,
        labels=torch.arange(count) % 3,
        target=AttentionMap.from_cells(cells, grid(8, 8)),
    )


def make_network() -> nn.AttentiveCNN:
    torch.manual_seed(0)
    return nn.AttentiveCNN(3, (4, 4, 4, 4), 4)


def peaked_maps(ids: Any) -> AttentionMap:
    """Make one map per sample, with its peak on the cell of the sample's number."""
    rows = torch.tensor([IDS.index(one) for one in ids])
    weights = torch.full((len(rows), 64), 0.5 / 63)
    weights[torch.arange(len(rows)), rows] = 0.5
    return AttentionMap.from_cells(weights, grid(8, 8)).normalize()


class ToyDataset:
    name, split = "toy", "train"

    def __len__(self) -> int:
        return 6

    def batch(self, rows: Any) -> Batch:
        return make_batch().select(torch.tensor(list(rows)))

    def digest(self) -> str:
        return "toy"


# --- targets


def test_gathered_targets_equal_those_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssa_teaching, "PORTION", 4)
    gathered = gather_targets(target_chunks(peaked_maps, IDS), CPU)
    ids = ("s5", "s0", "s0")
    torch.testing.assert_close(gathered(ids).weights, peaked_maps(ids).weights)
    assert gathered(ids).keys.spans[0].shape == (8, 8)


def test_gathered_text_targets_are_padded_and_match_any_batch() -> None:
    def texts(width: int) -> AttentionMap:
        mask = torch.ones(1, width, dtype=torch.bool)
        return AttentionMap.from_cells(torch.ones(1, width), words(width), mask).normalize()

    gathered = gather_targets([(("a",), texts(2)), (("b",), texts(5))], CPU)
    assert gathered(("a",)).weights.shape[-1] == 5
    assert gathered(("a",)).visible.sum() == 2
    torch.testing.assert_close(
        match_keys(gathered(("a",)), texts(3)).weights.sum(), torch.tensor(1.0)
    )
    with pytest.raises(UserError, match="empty"):
        gather_targets([], CPU)


@pytest.mark.parametrize(
    "target", [t for t in SsaTarget if t.value not in ("none", "truth", "gradcam")]
)
def test_each_placebo_target(target: SsaTarget) -> None:
    classes = {one: n % 2 for n, one in enumerate(IDS)}
    found = placebo_targets(target, peaked_maps, IDS, lambda: classes)(IDS).weights[:, 0, 0, 0]
    own = peaked_maps(IDS).weights[:, 0, 0, 0]
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(6))
    match target:
        case SsaTarget.SURROGATE | SsaTarget.OWN:
            torch.testing.assert_close(found, own)
        case SsaTarget.UNIFORM:
            torch.testing.assert_close(found, torch.full_like(own, 1 / 64))
        case SsaTarget.SHUFFLED:
            peaks = found.argmax(dim=-1).tolist()
            assert sorted(peaks) == list(range(6)) and all(p != n for n, p in enumerate(peaks))
        case SsaTarget.IN_CLASS:
            peaks = found.argmax(dim=-1).tolist()
            assert all(p != n and p % 2 == n % 2 for n, p in enumerate(peaks))
        case SsaTarget.SCATTERED:
            torch.testing.assert_close(found.sort(dim=-1).values, own.sort(dim=-1).values)
        case _:
            assert not torch.allclose(found, own)


def test_grad_cam_targets_equal_grad_cam_of_the_true_class() -> None:
    net = make_network().eval()
    ((ids, found),) = grad_cam_targets(net, ToyDataset(), "image", CPU)
    assert ids == IDS and found.weights.shape == (6, 1, 1, 1, 64)
    batch = make_batch()
    features = net.encode(batch)
    cells = features.values.detach().requires_grad_()
    logs = net.decide(replace(features, values=cells)).prediction.log_softmax(dim=-1)
    logs[torch.arange(6), batch.labels].sum().backward()
    slow = (cells * cells.grad.mean(dim=1, keepdim=True)).sum(dim=-1).clamp_min(0).detach()
    slow = slow / slow.sum(dim=-1, keepdim=True).clamp_min(1e-30)
    torch.testing.assert_close(found.weights[:, 0, 0, 0], slow)


def test_missing_ground_truth_raises() -> None:
    assert truth_target(make_batch(), "image").weights.sum() == pytest.approx(6)
    with pytest.raises(UserError, match="truth over text"):
        truth_target(make_batch(), "text")


# --- the step


@pytest.mark.parametrize("loss", list(SsaLoss))
def test_each_loss_returns_task_and_attention_terms(loss: SsaLoss) -> None:
    plan, batch = SsaSupervise(loss=loss), make_batch()
    torch.manual_seed(1)
    net = supervised_model(make_network(), plan, ("image",), batch, 0)
    found = SsaStep(plan, {"image": peaked_maps})(net, batch, START)
    assert {"task", "attention_image", "gamma_image"} == set(found["model"])
    assert ("rival" in found) is (loss is SsaLoss.ADVERSARIAL)
    gradient = torch.autograd.grad(found["model"]["attention_image"].total, net.model.inner.weight)
    assert gradient[0].abs().sum() > 0
    # after calibration of the scale, the distance has the size of the task loss
    task, far = found["model"]["task"], found["model"]["attention_image"]
    torch.testing.assert_close(far.mean(), task.mean(), rtol=1e-4, atol=1e-4)


def test_plain_weighting_uses_the_weight_unchanged() -> None:
    plan, batch = (
        SsaSupervise(loss=SsaLoss.MSE, counts=SsaWeighting.PLAIN, weight=3.0),
        make_batch(),
    )
    net = supervised_model(make_network(), plan, ("image",), batch, 0)
    assert not net.loss_modules and not discriminator_sets(net, plan)
    found = SsaStep(plan, {"image": peaked_maps})(net, batch, START)["model"]["attention_image"]
    attention = net.model(batch).attention_to("image").over_heads()
    assert found.weight == 3.0
    torch.testing.assert_close(found.total, mse(attention, peaked_maps(batch.ids)).total)


def test_ground_truth_targets_come_from_the_batch() -> None:
    plan, batch = SsaSupervise(SsaTarget.TRUTH, SsaLoss.KL, counts=SsaWeighting.PLAIN), make_batch()
    found = SsaStep(plan, {"image": None})(make_network(), batch, START)["model"]["attention_image"]
    attention = make_network()(batch).attention_to("image")
    torch.testing.assert_close(found.total, kl(attention, batch.target.normalize()).total)


def test_discriminators_have_separate_parameters() -> None:
    plan, batch = SsaSupervise(), make_batch()
    net = supervised_model(make_network(), plan, ("image",), batch, 0)
    theirs = {id(p) for p in discriminator_sets(net, plan)["rival"].parameters}
    assert theirs and not theirs & {id(p) for p in net.model.parameters()}
    found = SsaStep(plan, {"image": peaked_maps})(net, batch, START)
    mine = found["rival"]["rival_image"].total
    left = torch.autograd.grad(mine, list(net.model.parameters()), allow_unused=True)
    assert all(one is None for one in left)


def test_a_discriminator_can_use_the_attended_features() -> None:
    plan, batch = SsaSupervise(sees=SsaDiscriminatorInput.ATTENDED), make_batch()
    net = supervised_model(make_network(), plan, ("image",), batch, 0)
    values = net.model.encode(batch).values.shape[-1]
    assert net.rival_image.values == values
    found = SsaStep(plan, {"image": peaked_maps})(net, batch, START)
    assert found["rival"]["rival_image"].total.isfinite()
    gradient = torch.autograd.grad(found["model"]["attention_image"].total, net.model.inner.weight)
    assert gradient[0].abs().sum() > 0
    with pytest.raises(UserError, match=r"sees=attended.* str"):
        ssa_teaching._values("texts as a whole", "text")


def test_a_discriminator_without_input_cannot_assign_targets_to_samples() -> None:
    batch = make_batch()
    rolled = peaked_maps(batch.ids[1:] + batch.ids[:1])
    discriminator_losses = {}
    for sees in (SsaDiscriminatorInput.NOTHING, SsaDiscriminatorInput.MEAN):
        plan = SsaSupervise(sees=sees)
        torch.manual_seed(3)
        net = supervised_model(make_network(), plan, ("image",), batch, 0).eval()  # without dropout
        discriminator_losses[sees] = [
            SsaStep(plan, {"image": lambda ids, one=one: one})(net, batch, START)["rival"][
                "rival_image"
            ].total
            for one in (peaked_maps(batch.ids), rolled)
        ]
        assert (net.rival_image.context == 0) is (sees is SsaDiscriminatorInput.NOTHING)
    torch.testing.assert_close(*discriminator_losses[SsaDiscriminatorInput.NOTHING])
    assert not torch.isclose(*discriminator_losses[SsaDiscriminatorInput.MEAN])


def test_one_hot_soft_answers_equal_labels_in_the_task_loss() -> None:
    batch = replace(make_batch(), answers=torch.eye(3)[torch.arange(6) % 3])
    output = make_network()(batch)
    found, wanted = (
        ssa_teaching.task_loss(output, batch),
        ssa_teaching.task_loss(output, make_batch()),
    )
    torch.testing.assert_close(found.mean(), wanted.mean())


# --- cropped images


def slow_moved_target(target: AttentionMap, moves: ShiftFlip) -> torch.Tensor:
    """Spread each weight over the pixels of its cell, move them one by one, and sum them again."""
    pixels = target.weights.reshape(-1, 8, 8).repeat_interleave(4, 1).repeat_interleave(4, 2) / 16
    moved = slow_shift_flip(pixels[:, None].expand(-1, 3, -1, -1), moves)[:, 0]
    cells = moved.reshape(-1, 8, 4, 8, 4).sum(dim=(2, 4)).flatten(1)
    return cells / cells.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("source", [peaked_maps, None])
def test_a_cropped_image_is_trained_towards_its_cropped_target(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = make_batch()
    batch = replace(images, geometry=PixelGeometry.identity(6, (32, 32)))
    found: list[AttentionMap] = []

    def loss(attention: AttentionMap, target: AttentionMap) -> Loss:
        found.append(target)
        return mse(attention, target)

    monkeypatch.setitem(ssa_teaching.LOSSES, SsaLoss.MSE, loss)
    plan = SsaSupervise(loss=SsaLoss.MSE, counts=SsaWeighting.PLAIN)
    net = supervised_model(make_network(), plan, ("image",), batch, 0).eval()  # no dropout
    moves = draw_shift_flip(6, torch.Generator().manual_seed(4))
    step = SsaStep(
        plan,
        {"image": source},
        augment=lambda one: random_shift_flip(one, torch.Generator().manual_seed(4)),
    )
    losses = step(net, batch, START)["model"]
    target = truth_target(batch, "image") if source is None else source(batch.ids)
    wanted = slow_moved_target(target, moves)
    assert (wanted - target.weights.flatten(1)).abs().amax(dim=1).min() > 1e-3  # all have moved
    torch.testing.assert_close(found[0].weights.flatten(1), wanted)
    # the task is learned from the same cropped images
    shifted = replace(batch, images=apply_shift_flip(batch.images, moves))
    output = net.model.decide(net.model.encode(shifted))
    torch.testing.assert_close(losses["task"].mean(), ssa_teaching.task_loss(output, batch).mean())
    attention = mean_map(output.attention_to("image"))
    torch.testing.assert_close(losses["attention_image"].mean(), mse(attention, found[0]).mean())


def test_moving_targets_does_not_synchronize() -> None:
    batch = replace(make_batch(), geometry=PixelGeometry.identity(6, (32, 32)))
    moved, target = random_shift_flip(batch, torch.Generator()), peaked_maps(IDS)
    with SynchronizationRecorder() as recorder:
        ssa_teaching.target_of_view(target, batch, moved)
    assert recorder.found == set()


def test_cropped_images_without_geometry_raise() -> None:
    moved = replace(make_batch(), geometry=PixelGeometry.identity(6, (32, 32)))
    with pytest.raises(UserError, match="need a geometry"):
        ssa_teaching.target_of_view(peaked_maps(IDS), make_batch(), moved)


# --- steps in a CUDA graph


def test_a_targeted_dataset_is_the_dataset_with_other_targets() -> None:
    targeted = ssa_teaching.TargetedDataset(ToyDataset(), peaked_maps)
    assert isinstance(targeted, Dataset)
    assert (targeted.name, targeted.split, len(targeted), targeted.digest()) == (
        "toy",
        "train",
        6,
        "toy",
    )
    found = targeted.batch([4, 1])
    assert found.ids == ("s4", "s1")
    torch.testing.assert_close(found.target.weights, peaked_maps(found.ids).weights)
    assert torch.equal(found.images[found.image_index], make_batch().images[[4, 1]])


def test_graph_keys_differ_until_the_scales_are_calibrated() -> None:
    plan, batch = SsaSupervise(loss=SsaLoss.MSE), make_batch()
    net = supervised_model(make_network(), plan, ("image",), batch, 0)
    net.gamma_image.batches = 3
    step, keys = SsaStep(plan, {"image": peaked_maps}), []
    for number in range(5):
        keys.append(ssa_teaching.graph_key(net, Progress(number, 10, 0)))
        step(net, batch, START)
    assert keys == [0, 1, 2, None, None]
    assert ssa_teaching.graph_key(make_network(), START) is None  # there is no scale to calibrate


@pytest.mark.parametrize("loss", [one for one in SsaLoss if one is not SsaLoss.EMD])
def test_a_captured_step_does_not_synchronize_or_read_ids(loss: SsaLoss) -> None:
    """Run forward and backward, as `fit` captures them after the scale is calibrated."""
    plan, targeted = (
        SsaSupervise(loss=loss),
        ssa_teaching.TargetedDataset(ToyDataset(), peaked_maps),
    )
    net = supervised_model(make_network(), plan, ("image",), targeted.batch(range(6)), 0)
    net.gamma_image.batches = 1
    step = SsaStep(plan, {"image": None})
    step(net, targeted.batch(range(6)), START)
    static = static_copy(targeted.batch(range(6)))
    torch.manual_seed(7)
    with SynchronizationRecorder() as recorder:
        found = step(net, static, START)
        for losses in found.values():
            sum(one.weight * one.total for one in losses.values()).backward(retain_graph=True)
    assert recorder.found == set()
    torch.manual_seed(7)
    wanted = SsaStep(plan, {"image": peaked_maps})(net, make_batch(), START)  # by their ids
    for name, one in found["model"].items():
        torch.testing.assert_close(one.total, wanted["model"][name].total)
    with pytest.raises(UserError, match=r"train\.graph=false"):
        SsaStep(plan, {"image": peaked_maps})(net, static_copy(make_batch()), START)
