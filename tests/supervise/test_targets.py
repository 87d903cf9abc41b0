"""Where targets come from: the truth, gradients, and maps kept in memory."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from overt.attention import AttentionMap, Form, grid, words
from overt.capture.derived.activations import grad_cam as foreign_grad_cam
from overt.supervise.targets import fitted, grad_cam, known, remembered
from overt.testing import toy_batch
from tests.supervise.maps import rows_of
from tests.supervise.test_placebo import EMPTY, IDS, pictures, texts


def test_what_is_known_is_normalised_and_its_absence_is_told():
    batch = toy_batch()
    target = AttentionMap.from_cells(torch.tensor([[3.0, 1.0]] * 4), words(2))
    found = known(lambda ids: replace(batch, target=target))(batch.ids)
    assert found.weights.flatten(1).tolist() == [[0.75, 0.25]] * 4
    with pytest.raises(ValueError, match="does not say where to look"):
        known(lambda ids: batch)(batch.ids)


def test_grad_cam_agrees_with_the_one_for_modules():
    """The same network asked as a module over images and as a head over its cells."""
    torch.manual_seed(0)
    trunk = torch.nn.Conv2d(3, 5, 3, padding=1).double()
    head = torch.nn.Linear(5, 4).double()
    net = torch.nn.Sequential(
        trunk, torch.nn.Tanh(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), head
    )
    images, labels = torch.randn(3, 3, 4, 6).double(), torch.tensor([0, 3, 1])
    expected = foreign_grad_cam(net, trunk, images, labels)

    def score(cells: torch.Tensor) -> torch.Tensor:
        return head(cells.tanh().mean(dim=1)).gather(1, labels[:, None])[:, 0]

    cells = trunk(images).flatten(2).transpose(1, 2)
    found = grad_cam(cells, grid(4, 6), score)
    torch.testing.assert_close(found.weights, expected.normalize().weights)
    assert not found.weights.requires_grad
    assert all(p.grad is None for p in net.parameters())


def test_finding_19_a_view_in_the_place_of_a_transpose_scrambles_the_picture():
    """Positions stand on the second axis; reading the same numbers by a view moves the target."""
    features = torch.zeros(1, 3, 2, 2)
    features[0, :, 1, 0] = torch.tensor([1.0, 2.0, 3.0])  # all that there is, is in cell 2

    def score(cells: torch.Tensor) -> torch.Tensor:
        return cells.sum(dim=(1, 2))

    right = grad_cam(features.flatten(2).transpose(1, 2), grid(2, 2), score)
    assert right.weights.flatten().tolist() == [0, 0, 1, 0]
    wrong = grad_cam(features.reshape(1, 4, 3), grid(2, 2), score)
    assert wrong.weights.flatten()[2] < 0.5


def test_what_speaks_against_is_no_target_and_works_without_gradients():
    cells = torch.tensor([[[1.0], [2.0]], [[1.0], [2.0]]])
    with torch.no_grad():
        found = grad_cam(cells, words(2), lambda x: torch.stack([x[0].sum(), -x[1].sum()]))
    assert found.weights[0].flatten().tolist() == pytest.approx([1 / 3, 2 / 3])
    assert not found.weights[1].any()


def test_padding_of_a_text_has_no_part_in_it():
    torch.manual_seed(0)
    cells, there = torch.randn(1, 5, 3), torch.tensor([[True, True, True, False, False]])
    head = torch.randn(3)

    def score(x: torch.Tensor) -> torch.Tensor:
        return ((x * there[..., : x.shape[1], None]).sum(dim=1).tanh() * head).sum(dim=-1)

    found = grad_cam(cells, words(5), score, there)
    alone = grad_cam(cells[:, :3], words(3), score)
    torch.testing.assert_close(found.weights[..., :3], alone.weights)
    assert not found.weights[..., 3:].any() and torch.equal(found.visible[:, 0], there)


def test_grad_cam_of_a_model_of_ours_is_a_source_like_any_other():
    """Our own networks are asked through `encode` and `decide`."""
    from overt.models import AttentiveCNN

    torch.manual_seed(0)
    net, batch = AttentiveCNN(3, channels=(4, 4, 4, 5)).eval(), toy_batch()

    def targets(ids: Sequence[str]) -> AttentionMap:
        features = net.encode(batch.select(torch.tensor([batch.ids.index(one) for one in ids])))

        def score(cells: torch.Tensor) -> torch.Tensor:
            return net.decide(replace(features, values=cells)).prediction[:, 0]

        return grad_cam(features.values, features.layout, score)

    found = remembered(targets, batch.ids, portion=3)(batch.ids[::-1])
    torch.testing.assert_close(found.weights, targets(batch.ids).weights.flip(0))
    found.check()
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("form", Form)
def test_padding_is_added_and_cut_and_nothing_else(form):
    target = texts(["s0", "s1"])  # of 2 and 3 words
    if form is Form.LOG:
        target = replace(target, values=target.log_weights, form=form)
    attention = texts(["s4"])
    longer = fitted(target, attention)
    assert longer.keys is attention.keys and longer.weights.shape[-1] == 6
    longer.check()
    torch.testing.assert_close(longer.weights[..., :3], target.weights)
    assert (
        torch.equal(longer.visible[..., :3], target.visible) and not longer.visible[..., 3:].any()
    )
    back = fitted(longer, target)
    torch.testing.assert_close(back.weights, target.weights)
    assert torch.equal(back.visible, target.visible)
    with pytest.raises(ValueError, match="weight beyond the 2 of the attention"):
        fitted(target, texts(["s0"]))


@pytest.mark.parametrize("targets", [texts, pictures])
@pytest.mark.parametrize("portion", [1, 5, 64])
def test_remembered_targets_are_the_same_and_asked_for_once(targets, portion):
    asked: list[str] = []

    def dear(ids: Sequence[str]) -> AttentionMap:
        asked.extend(ids)
        return targets(ids)

    kept = remembered(dear, IDS, portion)
    for ids in (IDS, IDS[::-1], ["s3", "s0"], ["s0"], [EMPTY]):
        found, expected = kept(ids), targets(ids)
        torch.testing.assert_close(found.weights, expected.weights)
        assert torch.equal(found.visible, expected.visible)
        assert found.keys.spans[0].shape == expected.keys.spans[0].shape
        assert found.kind is expected.kind
    assert asked == IDS


def test_what_cannot_be_remembered_is_told():
    with pytest.raises(ValueError, match="no target is kept for 'other'"):
        remembered(pictures, IDS)(["s0", "other"])
    with pytest.raises(ValueError, match="there are no samples"):
        remembered(pictures, [])
    mixed = AttentionMap(torch.rand(1, 1, 1, 1, 6), words(2) + grid(2, 2)).normalize()
    with pytest.raises(ValueError, match=r"one kind of key are remembered, not to \['text', 'im"):
        remembered(lambda ids: mixed, ["a"])
    assert rows_of([1.0]).kind is remembered(lambda ids: rows_of([1.0]), ["a"])(["a"]).kind
