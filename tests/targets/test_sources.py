"""Sources of targets: datasets, Grad-CAM, cached maps."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from overt.attention import AttentionMap, Form, grid, words
from overt.attribution.cam import grad_cam as foreign_grad_cam
from overt.geometry import PixelGeometry
from overt.targets.sources import (
    cached_targets,
    dataset_targets,
    grad_cam_target,
    match_keys,
    move_target,
)
from overt.testing import toy_batch
from tests.losses.maps import rows_of
from tests.targets.test_placebos import EMPTY, IDS, image_targets, text_targets


def test_dataset_targets_are_normalised_and_missing_ones_raise():
    batch = toy_batch()
    target = AttentionMap.from_cells(torch.tensor([[3.0, 1.0]] * 4), words(2))
    found = dataset_targets(lambda ids: replace(batch, target=target))(batch.ids)
    assert found.weights.flatten(1).tolist() == [[0.75, 0.25]] * 4
    with pytest.raises(ValueError, match="no target"):
        dataset_targets(lambda ids: batch)(batch.ids)


def test_grad_cam_target_agrees_with_module_grad_cam():
    """The same network as a module over images and as a head over its cells."""
    torch.manual_seed(0)
    trunk = torch.nn.Conv2d(3, 5, 3, padding=1).double()
    head = torch.nn.Linear(5, 4).double()
    net = torch.nn.Sequential(
        trunk, torch.nn.Tanh(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), head
    )
    images, labels = torch.randn(3, 3, 4, 6).double(), torch.tensor([0, 3, 1])
    expected = foreign_grad_cam(net, images, labels, trunk)

    def score(cells: torch.Tensor) -> torch.Tensor:
        return head(cells.tanh().mean(dim=1)).gather(1, labels[:, None])[:, 0]

    cells = trunk(images).flatten(2).transpose(1, 2)
    found = grad_cam_target(cells, grid(4, 6), score)
    torch.testing.assert_close(found.weights, expected.normalize().weights)
    assert not found.weights.requires_grad
    assert all(p.grad is None for p in net.parameters())


def test_finding_19_a_view_instead_of_a_transpose_scrambles_the_map():
    """Positions are the second axis; a view of the same numbers moves the target."""
    features = torch.zeros(1, 3, 2, 2)
    features[0, :, 1, 0] = torch.tensor([1.0, 2.0, 3.0])  # only cell 2 is nonzero

    def score(cells: torch.Tensor) -> torch.Tensor:
        return cells.sum(dim=(1, 2))

    right = grad_cam_target(features.flatten(2).transpose(1, 2), grid(2, 2), score)
    assert right.weights.flatten().tolist() == [0, 0, 1, 0]
    wrong = grad_cam_target(features.reshape(1, 4, 3), grid(2, 2), score)
    assert wrong.weights.flatten()[2] < 0.5


def test_negative_grad_cam_is_zero_and_works_under_no_grad():
    cells = torch.tensor([[[1.0], [2.0]], [[1.0], [2.0]]])
    with torch.no_grad():
        found = grad_cam_target(cells, words(2), lambda x: torch.stack([x[0].sum(), -x[1].sum()]))
    assert found.weights[0].flatten().tolist() == pytest.approx([1 / 3, 2 / 3])
    assert not found.weights[1].any()


def test_grad_cam_of_text_ignores_padding():
    torch.manual_seed(0)
    cells, there = torch.randn(1, 5, 3), torch.tensor([[True, True, True, False, False]])
    head = torch.randn(3)

    def score(x: torch.Tensor) -> torch.Tensor:
        return ((x * there[..., : x.shape[1], None]).sum(dim=1).tanh() * head).sum(dim=-1)

    found = grad_cam_target(cells, words(5), score, there)
    alone = grad_cam_target(cells[:, :3], words(3), score)
    torch.testing.assert_close(found.weights[..., :3], alone.weights)
    assert not found.weights[..., 3:].any() and torch.equal(found.visible[:, 0], there)


def test_grad_cam_of_an_overt_model_is_a_target_source():
    """Networks of overt are run through `encode` and `decide`."""
    from overt.nn import AttentiveCNN

    torch.manual_seed(0)
    net, batch = AttentiveCNN(3, channels=(4, 4, 4, 5)).eval(), toy_batch()

    def targets(ids: Sequence[str]) -> AttentionMap:
        features = net.encode(batch.select(torch.tensor([batch.ids.index(one) for one in ids])))

        def score(cells: torch.Tensor) -> torch.Tensor:
            return net.decide(replace(features, values=cells)).prediction[:, 0]

        return grad_cam_target(features.values, features.layout, score)

    found = cached_targets(targets, batch.ids, portion=3)(batch.ids[::-1])
    torch.testing.assert_close(found.weights, targets(batch.ids).weights.flip(0))
    found.check()
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("form", Form)
def test_match_keys_adds_and_removes_padding_only(form):
    target = text_targets(["s0", "s1"])  # of 2 and 3 words
    if form is Form.LOG:
        target = replace(target, values=target.log_weights, form=form)
    attention = text_targets(["s4"])
    longer = match_keys(target, attention)
    assert longer.keys is attention.keys and longer.weights.shape[-1] == 6
    longer.check()
    torch.testing.assert_close(longer.weights[..., :3], target.weights)
    assert (
        torch.equal(longer.visible[..., :3], target.visible) and not longer.visible[..., 3:].any()
    )
    back = match_keys(longer, target)
    torch.testing.assert_close(back.weights, target.weights)
    assert torch.equal(back.visible, target.visible)
    with pytest.raises(ValueError, match="the 2 keys"):
        match_keys(target, text_targets(["s0"]))


@pytest.mark.parametrize("targets", [text_targets, image_targets])
@pytest.mark.parametrize("portion", [1, 5, 64])
def test_cached_targets_are_equal_and_computed_once(targets, portion):
    asked: list[str] = []

    def expensive_targets(ids: Sequence[str]) -> AttentionMap:
        asked.extend(ids)
        return targets(ids)

    kept = cached_targets(expensive_targets, IDS, portion)
    for ids in (IDS, IDS[::-1], ["s3", "s0"], ["s0"], [EMPTY]):
        found, expected = kept(ids), targets(ids)
        torch.testing.assert_close(found.weights, expected.weights)
        assert torch.equal(found.visible, expected.visible)
        assert found.keys.spans[0].shape == expected.keys.spans[0].shape
        assert found.kind is expected.kind
    assert asked == IDS


def test_targets_that_cannot_be_cached_raise():
    with pytest.raises(ValueError, match="'other'"):
        cached_targets(image_targets, IDS)(["s0", "other"])
    with pytest.raises(ValueError, match="ids is empty"):
        cached_targets(image_targets, [])
    mixed = AttentionMap(torch.rand(1, 1, 1, 1, 6), words(2) + grid(2, 2)).normalize()
    with pytest.raises(ValueError, match="'text', 'image'"):
        cached_targets(lambda ids: mixed, ["a"])
    assert rows_of([1.0]).kind is cached_targets(lambda ids: rows_of([1.0]), ["a"])(["a"]).kind


def test_a_moved_target_keeps_its_axes_and_sums():
    """Every layer, head and query moves with its own sample."""
    torch.manual_seed(0)
    target = AttentionMap(torch.rand(2, 3, 2, 5, 16), grid(4, 4), words(5)).normalize()
    views = [PixelGeometry.identity(1, (8, 8)) for _ in range(2)]
    before = PixelGeometry.join(views)
    after = PixelGeometry.join([views[0].flip(), views[1].crop(2, 0, 8, 8)])
    found = move_target(target, before, after)
    assert (found.keys, found.queries, found.kind) == (target.keys, target.queries, target.kind)
    cells = target.weights.reshape(2, 3, 2, 5, 4, 4)
    torch.testing.assert_close(found.weights[0], cells[0].flip(-1).flatten(-2))
    up = torch.nn.functional.pad(cells[1, ..., 1:, :], (0, 0, 0, 1)).flatten(-2)
    torch.testing.assert_close(found.weights[1], up / up.sum(dim=-1, keepdim=True))
    torch.testing.assert_close(move_target(target, before, before).weights, target.weights)


def test_a_target_that_is_cropped_away_is_not_supervised():
    corner = AttentionMap.from_cells(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), grid(2, 2)).normalize()
    photo = PixelGeometry.identity(1, (8, 8))
    assert move_target(corner, photo, photo.crop(4, 4, 4, 4)).weights.abs().sum() == 0


def test_targets_that_cannot_move_raise():
    photo = PixelGeometry.identity(1, (8, 8))
    with pytest.raises(ValueError, match="got text"):
        move_target(AttentionMap.from_cells(torch.ones(1, 4), words(4)), photo, photo)
    target = AttentionMap.from_cells(torch.ones(2, 4), grid(2, 2))
    with pytest.raises(ValueError, match=r"2 rows.* 1"):
        move_target(target, photo, photo)
