"""VGG networks of the paper: sizes, grids, dropout, queries, masks, and saving."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overt import nn as overt_nn
from overt.attention import Kind
from overt.data.batch import Batch
from overt.errors import UserError
from overt.geometry import PixelGeometry
from overt.nn.learned_attention.attention import (
    CLASSIFIERS,
    SCORES,
    AttentionClassifier,
    DotCompatibility,
    attend,
    average_levels,
    concat_levels,
    dot_score,
    grid_shape,
    parametrised_score,
    registered_name,
    scaled_dot_score,
    uniform_score,
)
from overt.papers.ltpa.vgg import (
    AS_PUBLISHED,
    HEAD_ONLY,
    VGG,
    ConvBlocks,
    VGGAttention,
    VGGDropout,
    VGGGap,
    VGGProgressive,
    VGGSizes,
    VGGTrunk,
    average_gradients,
    conv_block,
    normalize_pixels,
    to_cells,
    vgg_attention,
)
from overt.testing import check_model, toy_batch

TINY = VGGSizes(3, 0.05, HEAD_ONLY)


def count_parameters(model: nn.Module) -> int:
    return sum(value.numel() for value in model.parameters())


def make_batch(height: int, width: int, samples: int = 2) -> Batch:
    """Make a batch of images of the given size."""
    images = torch.randint(0, 256, (samples, 3, height, width), dtype=torch.uint8)
    geometry = PixelGeometry.identity(samples, (height, width))
    return Batch(ids=tuple(map(str, range(samples))), images=images, geometry=geometry)


def make_attention_vgg(
    levels: int = 2, score: Callable = parametrised_score, **options: Any
) -> VGGAttention:
    torch.manual_seed(0)
    net = VGGAttention(TINY, levels, score, **options)
    for one in net.classify.scores:
        for value in one.parameters():
            value.data.normal_()
    return net


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "vgg": lambda: VGG(TINY),
    "gap": lambda: VGGGap(TINY),
    "pan": lambda: VGGProgressive(TINY),
    "att": lambda: make_attention_vgg(1),
    "att2-dp": lambda: make_attention_vgg(2, scaled_dot_score),
    "att2-indep": lambda: make_attention_vgg(2, decision=average_levels),
    "att3": lambda: make_attention_vgg(3),
    "att3-mean": lambda: make_attention_vgg(3, uniform_score),
}
seeded = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def build_model(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


# --- check_model


@pytest.mark.long
@seeded
def test_each_network_passes_check_model(make: Callable[[], nn.Module]) -> None:
    net: Any = build_model(make)
    idle = [f"{name}.bias" for name, one in net.named_modules() if isinstance(one, nn.Conv2d)]
    if hasattr(net, "classify") and not net.classify.uses_query:
        idle += ["query.", "classify.project."]
    check_model(lambda: build_model(make), toy_batch(), unreached=idle, tolerance=1e-4)


@seeded
def test_a_saved_network_gives_the_same_prediction(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    net: Any = build_model(make).eval()
    net.save_pretrained(tmp_path / "net")
    again = type(net).from_pretrained(tmp_path / "net")
    assert again.config() == net.config()
    torch.testing.assert_close(again(toy_batch()).prediction, net(toy_batch()).prediction)


@seeded
@pytest.mark.parametrize("size", [(32, 32), (80, 80), (40, 24), (7, 5), (1, 1)])
def test_any_image_size_works(make: Callable[[], nn.Module], size: tuple[int, int]) -> None:
    output = build_model(make).eval()(make_batch(*size))
    assert output.prediction.isfinite().all()
    for one in output.attention:
        one.check()
        assert one.keys.find("image").geometry.canvas == size  # type: ignore[union-attr]


@seeded
def test_a_batch_without_images_raises(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"batch.*images"):
        build_model(make)(replace(toy_batch(), images=None, geometry=None, image_of=None))


@seeded
def test_half_precision_and_autocast_work(make: Callable[[], nn.Module]) -> None:
    net = build_model(make).eval()
    with torch.autocast("cpu", torch.bfloat16):
        low = net(toy_batch())
    full = net(toy_batch())
    assert (low.prediction.float() - full.prediction).abs().max() < 0.3
    for one in low.attention:
        assert one.values.dtype == torch.float32  # even under autocast
    assert net.double()(toy_batch()).prediction.dtype == torch.float64


@seeded
def test_samples_that_share_an_image_equal_copies_of_it(
    make: Callable[[], nn.Module],
) -> None:
    net, batch = build_model(make).eval(), toy_batch(4)
    assert batch.images is not None and batch.geometry is not None
    apart = replace(
        batch,
        images=batch.images[batch.image_index],
        geometry=batch.geometry[batch.image_index],
        image_of=None,
    )
    torch.testing.assert_close(net(apart).prediction, net(batch).prediction)


# --- sizes


@pytest.mark.parametrize(
    ("make", "ten", "hundred"),
    [
        (VGG, 14_991_946, 15_038_116),
        (lambda s: VGGAttention(s, 1), 19_714_123, 19_760_293),
        (lambda s: VGGAttention(s, 2), 19_720_780, 19_813_030),
        (lambda s: VGGAttention(s, 2, dot_score), 19_719_754, 19_812_004),
        (lambda s: VGGAttention(s, 2, decision=average_levels), 19_720_790, 19_813_130),
        (lambda s: VGGAttention(s, 3), 19_856_461, 19_971_751),
        (VGGProgressive, 24_698_956, 24_745_126),
    ],
    ids=["vgg", "att-pc", "att2-pc", "att2-dp", "att2-indep-pc", "att3-pc", "pan"],
)
def test_t_lt_4_number_of_parameters(make: Callable, ten: int, hundred: int) -> None:
    with torch.device("meta"):
        assert count_parameters(make(VGGSizes(10))) == ten
        assert count_parameters(make(VGGSizes(100))) == hundred


def test_the_control_is_the_network_without_scores_and_query() -> None:
    with torch.device("meta"):
        net, control = VGGAttention(VGGSizes(10), 2), VGGAttention(VGGSizes(10), 2, uniform_score)
    extra = {name.split(".")[0] for name in net.state_dict().keys() - control.state_dict().keys()}
    assert extra == {"query", "classify"} and control.query is None
    assert count_parameters(net) - count_parameters(control) == 2 * 2_360_832 + 262_656 + 2 * 513
    shared = control.state_dict()
    assert all(net.state_dict()[name].shape == value.shape for name, value in shared.items())


def test_t_lt_4_grids_and_widths_of_the_levels() -> None:
    """Levels: 256 x 32 x 32, 512 x 16 x 16, 512 x 8 x 8; descriptor widths: 512, 1024, 1280."""
    for levels, width in ((1, 512), (2, 1024), (3, 1280)):
        with torch.device("meta"):
            net = VGGAttention(VGGSizes(10), levels)
        assert net.classify.decision.linear.in_features == width
        assert net.trunk.channels[-levels:] == [256, 512, 512][-levels:]
    features = make_attention_vgg(3).eval().encode(make_batch(32, 32))
    shapes = [grid_shape(one.layout) for one in features.cells]
    assert shapes == [(32, 32), (16, 16), (8, 8)]
    assert make_attention_vgg(3).eval().descriptor(features).shape == (2, sum((13, 26, 26)))


def test_images_of_80_pixels_have_the_same_grids_after_the_first_pooling() -> None:
    large = replace(TINY, first_pool=5)
    found = VGGAttention(large, 3).eval().encode(make_batch(80, 80))
    assert [grid_shape(one.layout) for one in found.cells] == [(80, 80), (16, 16), (8, 8)]
    assert grid_shape(VGG(large).eval().encode(make_batch(80, 80)).layout) == (2, 2)
    assert grid_shape(VGGGap(large).eval().encode(make_batch(80, 80)).layout) == (8, 8)


def test_weights_for_small_images_load_into_a_network_for_large_images() -> None:
    small, large = make_attention_vgg(2), VGGAttention(replace(TINY, classes=7, first_pool=5), 2)
    kept = {k: v for k, v in small.state_dict().items() if not k.startswith("classify.decision")}
    missing, unexpected = large.load_state_dict(kept, strict=False)
    assert not unexpected and all(name.startswith("classify.decision") for name in missing)


def test_dropout_rates() -> None:
    def rates(net: nn.Module) -> list[float]:
        return [one.p for one in net.modules() if isinstance(one, nn.Dropout)]

    with torch.device("meta"):
        published, plain = VGG(VGGSizes(10)), VGG(VGGSizes(10, dropout=HEAD_ONLY))
    assert rates(published) == [0.3, 0.4, *[0.4] * 6, 0.5, 0.5]
    assert rates(plain) == [0.5, 0.5]
    assert VGGSizes(10).dropout == AS_PUBLISHED == VGGDropout(0.3, 0.4, 0.5)


def test_weight_initialization() -> None:
    """He initialization by fan-out, zero biases, and batch norm with eps 1e-3."""
    torch.manual_seed(0)
    trunk = VGGTrunk((2, 2, 2, 2), width=0.5)
    last = trunk.stages[4][0]
    wanted = math.sqrt(2 / (9 * last.out_channels))
    assert float(last.weight.std()) == pytest.approx(wanted, rel=0.02)
    assert not last.bias.any()
    norms = [one for one in trunk.modules() if isinstance(one, nn.BatchNorm2d)]
    assert len(norms) == 13 and {one.eps for one in norms} == {1e-3}


def test_a_bias_before_batch_norm_is_skipped_in_training() -> None:
    """Features, gradients, running statistics and evaluation equal those of the plain layers."""
    torch.manual_seed(0)
    ours = ConvBlocks(*conv_block(3, 5, 0.0), *conv_block(5, 4, 0.0)).double()
    for value in ours.parameters():
        value.data.normal_()
    theirs = copy.deepcopy(ours)
    for _ in range(3):
        x = torch.randn(6, 3, 8, 8, dtype=torch.float64)
        one, other = ours(x), x
        for layer in theirs:
            other = layer(other)
        torch.testing.assert_close(one, other)
        for net, out in ((ours, one), (theirs, other)):
            net.zero_grad()
            out.pow(3).sum().backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if name in ("0.bias", "3.bias"):
            assert one.grad is None and float(other.grad.abs().max()) < 1e-9
        else:
            torch.testing.assert_close(one.grad, other.grad)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    torch.testing.assert_close(ours.eval()(x), nn.Sequential(*theirs).eval()(x))


def test_a_bias_before_a_frozen_norm_is_used() -> None:
    net = ConvBlocks(*conv_block(3, 5)).train()
    net[1].eval()
    x = torch.randn(2, 3, 4, 4)
    before = net(x)
    net[0].bias.data += 1
    assert not torch.allclose(net(x), before)
    net(x).sum().backward()
    assert net[0].bias.grad is not None


def test_two_forward_passes_before_one_backward_pass_work() -> None:
    net = ConvBlocks(*conv_block(3, 5)).train()
    (net(torch.randn(2, 3, 4, 4)).sum() + net(torch.randn(2, 3, 4, 4)).sum()).backward()
    assert net[0].weight.grad is not None


def test_uint8_images_are_normalized_and_float_images_are_unchanged() -> None:
    images = torch.tensor([0, 110, 255], dtype=torch.uint8).view(1, 1, 1, 3).expand(1, 3, 2, 3)
    found = normalize_pixels(images, torch.float32)
    torch.testing.assert_close(found[0, 0, 0], torch.tensor([-110 / 70, 0.0, 145 / 70]))
    assert torch.equal(normalize_pixels(found, torch.float32), found)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_cells_are_a_view_of_the_features() -> None:
    """With channels-last memory the features of a cell are contiguous, so there is no copy."""
    features = make_attention_vgg(3).eval().encode(make_batch(32, 32))
    for level in features.cells:
        assert level.values.is_contiguous() and level.values._base is not None


# --- single networks


def test_t_lt_14_the_mean_class_activation_plus_the_bias_is_the_logit() -> None:
    net = VGGGap(TINY).eval()
    features = net.encode(make_batch(32, 32, 4))
    classes = torch.tensor([0, 2, 1, 1])
    found = net.class_activation(features, classes)
    assert found.kind is Kind.SIGNED and grid_shape(found.keys) == (8, 8)
    logits = net.decide(features).prediction.gather(1, classes[:, None])[:, 0]
    torch.testing.assert_close(
        found.weights.mean(dim=-1).flatten() + net.decision.bias[classes], logits
    )


def test_t_lt_13_the_progressive_gate_is_a_sigmoid_per_cell() -> None:
    net = VGGProgressive(TINY).eval()
    net.gate.weight.data.normal_()
    batch = make_batch(32, 32)
    features = net.encode(batch)
    assert features.gate.kind is Kind.AMOUNT and grid_shape(features.gate.keys) == (16, 16)
    middle = net.trunk(normalize_pixels(batch.images, torch.float32), last=4)[-1]
    query = net.early(middle)
    by_hand = torch.zeros(2, 16, 16)
    for b in range(2):
        for y in range(16):
            for x in range(16):
                score = net.gate.weight @ (middle[b, :, y, x] + query[b]) + net.gate.bias
                by_hand[b, y, x] = 1 / (1 + torch.exp(-score))
    torch.testing.assert_close(features.gate.weights.reshape(2, 16, 16), by_hand)
    passed = net.trunk(middle * by_hand[:, None], first=4)[-1]
    torch.testing.assert_close(features.cells.values, passed.flatten(2).transpose(1, 2))


def test_t_lt_13_the_gate_depends_on_its_query() -> None:
    net = VGGProgressive(TINY).eval()
    net.gate.weight.data.normal_()
    cells = torch.randn(2, 26, 4, 4)
    one, other = (
        net.gate_values(cells, query) for query in (torch.zeros(2, 26), torch.ones(2, 26))
    )
    assert one.shape == (2, 1, 4, 4) and float((one - other).abs().max()) > 0.01


def test_progressive_masks_on_either_grid_give_the_same_prediction() -> None:
    net = VGGProgressive(TINY).eval()
    features = net.encode(make_batch(32, 32))
    coarse = torch.ones(2, 64)
    coarse[:, :32] = 0
    fine = torch.ones(2, 256)
    fine[:, :128] = 0
    one, other = (net.decide(features, {"image": keep}).prediction for keep in (coarse, fine))
    torch.testing.assert_close(one, other)
    assert not torch.equal(one, net.decide(features).prediction)


@pytest.mark.parametrize("score", [parametrised_score, scaled_dot_score])
def test_the_query_of_another_image_changes_dp_maps_and_not_pc_maps(score: Callable) -> None:
    """Appendix A.5 of the paper."""
    net = make_attention_vgg(2, score).eval()
    features = net.encode(make_batch(32, 32, 4))
    assert features.query is not None
    swapped = replace(features, query=features.query.roll(1, dims=0))
    one, other = net.decide(features), net.decide(swapped)
    apart = max(
        float((x.weights - y.weights).abs().max())
        for x, y in zip(one.attention, other.attention, strict=True)
    )
    if score is parametrised_score:
        assert apart < 1e-6
    else:
        assert apart > 1e-6


UNUSED_QUERY = {
    "att": lambda: make_attention_vgg(1),
    "att3": lambda: make_attention_vgg(3),
    "pan": MAKERS["pan"],
}


@pytest.mark.parametrize("make", UNUSED_QUERY.values(), ids=UNUSED_QUERY)
def test_an_unused_query_is_not_computed_in_training(make: Callable) -> None:
    """Maps, classes, gradients and statistics equal those with the query computed."""

    class QueryClassifier(AttentionClassifier):
        wants_query = True

    batch, found = make_batch(32, 32, 4), []
    for kind in (AttentionClassifier, QueryClassifier):
        net = build_model(make).double().train()
        for one in net.modules():
            if isinstance(one, nn.Dropout):
                one.p = 0.0
        net.classify.__class__ = kind
        assert (net.encode(batch).query is None) is (kind is AttentionClassifier)
        output = net(batch)
        output.prediction.pow(2).sum().backward()
        found.append((net, output))
    (short, ours), (full, theirs) = found
    torch.testing.assert_close(ours.prediction, theirs.prediction)
    for one, other in zip(ours.attention, theirs.attention, strict=True):
        torch.testing.assert_close(one.weights, other.weights)
    query_part = ("query.", "classify.project.")
    for (name, one), other in zip(short.named_parameters(), full.parameters(), strict=True):
        if name.startswith(query_part):
            assert one.grad is None
            assert other.grad is None or float(other.grad.abs().max()) < 1e-12
        elif one.grad is None:
            assert other.grad is None and name.endswith(".bias")
        else:
            torch.testing.assert_close(one.grad, other.grad)
    for (name, one), other in zip(short.named_buffers(), full.buffers(), strict=True):
        if not name.startswith(query_part):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("make", UNUSED_QUERY.values(), ids=UNUSED_QUERY)
def test_an_unused_query_keeps_its_initial_weights(make: Callable) -> None:
    net = build_model(make)
    biases = {f"{k}.bias" for k, one in net.named_modules() if isinstance(one, nn.Conv2d)}
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(make_batch(32, 32, 4)).prediction.pow(2).sum().backward()
        optimizer.step()
    after = net.state_dict()
    assert after.keys() == before.keys() and any(name.startswith("query.") for name in after)
    for name in after:
        query_part = name.startswith(("query.", "classify.project."))
        same = torch.equal(after[name], before[name])
        assert same is (query_part or name in biases), name
    assert net.eval().encode(make_batch(32, 32)).query is not None


@pytest.mark.parametrize("score", [scaled_dot_score, overt_nn.additive_score])
def test_a_used_query_is_trained(score: Callable) -> None:
    net = make_attention_vgg(3, score).train()
    net(make_batch(32, 32, 4)).prediction.pow(2).sum().backward()
    query_part = [net.query.one[0].weight, *net.classify.project.parameters()]
    assert all(value.grad is not None for value in query_part)
    assert max(float(value.grad.abs().max()) for value in query_part) > 0


def test_a_mask_on_any_level_removes_the_region_at_all_levels() -> None:
    net = make_attention_vgg(3).eval()
    features = net.encode(make_batch(32, 32))
    found = []
    for side in (32, 16, 8):
        keep = torch.ones(2, side, side)
        keep[:, : side // 2] = 0
        found.append(net.decide(features, {"image": keep.flatten(1)}).prediction)
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@pytest.mark.parametrize("levels", [0, 4])
def test_more_than_three_or_zero_levels_are_rejected(levels: int) -> None:
    with pytest.raises(ValueError, match=f"1, 2 or 3, got {levels}"):
        VGGAttention(TINY, levels)


def test_registered_strategies_are_saved_by_name_and_others_are_rejected(tmp_path: Path) -> None:
    for name, score in SCORES.items():
        assert registered_name(SCORES, score, "score") == name
    for name, decision in CLASSIFIERS.items():
        assert registered_name(CLASSIFIERS, decision, "decision") == name
    custom = VGGAttention(TINY, 1, lambda width: DotCompatibility(0.5))
    with pytest.raises(UserError, match="uniform, dot"):
        custom.save_pretrained(tmp_path / "custom")


def test_vgg_attention_builds_a_network_with_defaults() -> None:
    net = vgg_attention(classes=4, levels=3, score=overt_nn.additive_score, width=0.05)
    assert (net.sizes, net.levels, net.decide_by) == (VGGSizes(4, 0.05), 3, concat_levels)


# --- learning


@pytest.mark.long
@seeded
def test_each_network_overfits_six_images(make: Callable[[], nn.Module]) -> None:
    net = build_model(make)
    batch, labels = make_batch(32, 32, 6), torch.tensor([0, 1, 2, 0, 1, 2])
    for one in net.modules():
        if isinstance(one, nn.Dropout):
            one.p = 0.0
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, nesterov=True)
    losses = []
    for _ in range(25):
        loss = nn.functional.cross_entropy(net(batch).prediction, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


def published_gradients(net: VGGAttention, batch: Batch) -> dict[str, torch.Tensor]:
    """Backpropagate module by module, with the mean at each meeting of two gradients.

    A slow copy of what the paper's script does for two levels: the query gets the mean of the
    gradients of both attentions, a level the mean of that of its attention and that of the layers
    above it.
    """
    images = normalize_pixels(batch.images, torch.float32)
    (low,) = net.trunk(images, 0, 4)[-1:]
    low_leaf = low.detach().requires_grad_()
    (high,) = net.trunk(low_leaf, 4, 5)
    high_leaf = high.detach().requires_grad_()
    query = net.query(high_leaf)
    query_leaf = query.detach().requires_grad_()
    parts = [to_cells(one.detach().requires_grad_(), batch) for one in (low, high)]
    asked = [query_leaf.detach().requires_grad_() for _ in parts]
    summaries, leaves = [], []
    for number, (cells, own) in enumerate(zip(parts, asked, strict=True)):
        values = cells.values.detach().requires_grad_()
        summary, _ = attend(values, own, cells.layout, net.classify.scores[number])
        summaries.append(net.classify.prepare[number](summary))
        leaves.append(values)
    loss = net.classify.decision(summaries).log_softmax(-1)[:, 0].sum()
    loss.backward()
    query.backward((asked[0].grad + asked[1].grad) / 2)

    def as_image(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return values.mT.reshape(like.shape)

    high.backward((high_leaf.grad + as_image(leaves[1].grad, high)) / 2)
    low.backward((low_leaf.grad + as_image(leaves[0].grad, low)) / 2)
    return {name: one.grad.clone() for name, one in net.named_parameters() if one.grad is not None}


def test_finding_2_mean_gradients_are_those_of_the_published_script() -> None:
    batch = make_batch(32, 32, 3)

    def make(**options: Any) -> VGGAttention:
        return make_attention_vgg(2, dot_score, **options).eval()  # norm as in evaluation

    slow = make()
    wanted = published_gradients(slow, batch)
    found = {}
    for mean in (False, True):
        net = make(mean_gradient=mean)
        net(batch).prediction.log_softmax(-1)[:, 0].sum().backward()
        found[mean] = {
            name: one.grad for name, one in net.named_parameters() if one.grad is not None
        }
    assert found[True].keys() == wanted.keys()
    for name, one in wanted.items():
        torch.testing.assert_close(found[True][name], one, rtol=1e-3, atol=1e-6, msg=name)
    last = "trunk.stages.3.0.weight"
    assert not torch.allclose(found[False][last], found[True][last], rtol=0.05)


def test_mean_gradients_change_no_prediction_and_are_saved(tmp_path: Path) -> None:
    batch = make_batch(32, 32)
    plain, mean = make_attention_vgg().eval(), make_attention_vgg(mean_gradient=True).eval()
    assert torch.equal(plain(batch).prediction, mean(batch).prediction)
    assert "mean_gradient" not in plain.config()  # as in networks saved before
    mean.save_pretrained(tmp_path / "model")
    again = VGGAttention.from_pretrained(tmp_path / "model")
    assert again.trunk.gradient_factors == {3: 0.5, 4: 0.5} and again.query_gradient == 0.5
    three = make_attention_vgg(3, uniform_score)
    average_gradients(three)
    assert three.trunk.gradient_factors == {2: 0.5, 3: 0.5}  # no query: one branch at the last


@pytest.mark.parametrize("classes", [10, 100])
def test_the_pooling_control_has_as_many_parameters_as_attention(classes: int) -> None:
    made = {
        name: count_parameters(VGGAttention(VGGSizes(classes, 0.25), 2, SCORES[name]))
        for name in ("parametrised", "additive", "bounded", "additive-relu", "uniform-query")
    }
    assert len({made[name] for name in made if name != "parametrised"}) == 1
    assert made["parametrised"] == made["additive"] + 2  # a bias per level, without effect
