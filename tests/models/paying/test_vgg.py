"""The VGGs of the paper: their sizes, their grids, and what is special about each."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from overt import models
from overt.attention import Kind
from overt.data.batch import Batch
from overt.errors import BadInput
from overt.geometry import PixelGeometry
from overt.models.paying.attention import (
    DECISIONS,
    SCORES,
    AttentionClassifier,
    Dot,
    concat,
    dot,
    indep,
    parametrised,
    scaled_dot,
    shape_of,
    uniform,
)
from overt.models.paying.vgg import (
    AS_PUBLISHED,
    HEAD_ONLY,
    VGG,
    Blocks,
    Dropout,
    Sizes,
    Trunk,
    VGGAttention,
    VGGGap,
    VGGProgressive,
    block,
    name_in,
    pixels,
    vgg_attention,
)
from overt.testing import check_model, toy_batch

TINY = Sizes(3, 0.05, HEAD_ONLY)


def parameters(model: nn.Module) -> int:
    return sum(value.numel() for value in model.parameters())


def sized(height: int, width: int, samples: int = 2) -> Batch:
    """A batch of images of another size."""
    images = torch.randint(0, 256, (samples, 3, height, width), dtype=torch.uint8)
    geometry = PixelGeometry.identity(samples, (height, width))
    return Batch(ids=tuple(map(str, range(samples))), images=images, geometry=geometry)


def attending(levels: int = 2, score: Callable = parametrised, **options: Any) -> VGGAttention:
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
    "att": lambda: attending(1),
    "att2-dp": lambda: attending(2, scaled_dot),
    "att2-indep": lambda: attending(2, decision=indep),
    "att3": lambda: attending(3),
    "att3-mean": lambda: attending(3, uniform),
}
seeded = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


# --- the contract


@seeded
def test_it_keeps_the_contract(make: Callable[[], nn.Module]) -> None:
    net: Any = built(make)
    idle = [f"{name}.bias" for name, one in net.named_modules() if isinstance(one, nn.Conv2d)]
    if hasattr(net, "classify") and not net.classify.heeds:
        idle += ["query.", "classify.project."]
    check_model(lambda: built(make), toy_batch(), unreached=idle, tolerance=1e-4)


@seeded
def test_it_is_read_back_as_it_was_written(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    net: Any = built(make).eval()
    net.save_pretrained(tmp_path / "net")
    again = type(net).from_pretrained(tmp_path / "net")
    assert again.config() == net.config()
    torch.testing.assert_close(again(toy_batch()).prediction, net(toy_batch()).prediction)


@seeded
@pytest.mark.parametrize("size", [(32, 32), (80, 80), (40, 24), (7, 5), (1, 1)])
def test_any_image_size_works(make: Callable[[], nn.Module], size: tuple[int, int]) -> None:
    output = built(make).eval()(sized(*size))
    assert output.prediction.isfinite().all()
    for one in output.attention:
        one.check()
        assert one.keys.find("image").geometry.canvas == size  # type: ignore[union-attr]


@seeded
def test_a_batch_without_images_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match="needs a batch with images"):
        built(make)(replace(toy_batch(), images=None, geometry=None, image_of=None))


@seeded
def test_half_precision_and_autocast_work(make: Callable[[], nn.Module]) -> None:
    net = built(make).eval()
    with torch.autocast("cpu", torch.bfloat16):
        low = net(toy_batch())
    whole = net(toy_batch())
    assert (low.prediction.float() - whole.prediction).abs().max() < 0.3
    for one in low.attention:
        assert one.values.dtype == torch.float32  # also where all else is in 16 bits
    assert net.double()(toy_batch()).prediction.dtype == torch.float64


@seeded
def test_samples_that_share_an_image_are_told_apart_from_copies_of_it(
    make: Callable[[], nn.Module],
) -> None:
    net, batch = built(make).eval(), toy_batch(4)
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
        (lambda s: VGGAttention(s, 2, dot), 19_719_754, 19_812_004),
        (lambda s: VGGAttention(s, 2, decision=indep), 19_720_790, 19_813_130),
        (lambda s: VGGAttention(s, 3), 19_856_461, 19_971_751),
        (VGGProgressive, 24_698_956, 24_745_126),
    ],
    ids=["vgg", "att-pc", "att2-pc", "att2-dp", "att2-indep-pc", "att3-pc", "pan"],
)
def test_t_lt_4_the_number_of_parameters(make: Callable, ten: int, hundred: int) -> None:
    with torch.device("meta"):
        assert parameters(make(Sizes(10))) == ten
        assert parameters(make(Sizes(100))) == hundred


def test_the_control_is_the_same_without_scores_and_query() -> None:
    with torch.device("meta"):
        net, control = VGGAttention(Sizes(10), 2), VGGAttention(Sizes(10), 2, uniform)
    extra = {name.split(".")[0] for name in net.state_dict().keys() - control.state_dict().keys()}
    assert extra == {"query", "classify"} and control.query is None
    assert parameters(net) - parameters(control) == 2 * 2_360_832 + 262_656 + 2 * 513
    shared = control.state_dict()
    assert all(net.state_dict()[name].shape == value.shape for name, value in shared.items())


def test_t_lt_4_the_grids_and_widths_of_the_levels() -> None:
    """256 x 32 x 32, 512 x 16 x 16 and 512 x 8 x 8, and what is concatenated: 512, 1024, 1280."""
    for levels, width in ((1, 512), (2, 1024), (3, 1280)):
        with torch.device("meta"):
            net = VGGAttention(Sizes(10), levels)
        assert net.classify.decision.linear.in_features == width
        assert net.trunk.channels[-levels:] == [256, 512, 512][-levels:]
    features = attending(3).eval().encode(sized(32, 32))
    shapes = [shape_of(one.layout) for one in features.cells]
    assert shapes == [(32, 32), (16, 16), (8, 8)]
    assert attending(3).eval().descriptor(features).shape == (2, sum((13, 26, 26)))


def test_birds_of_80_pixels_have_the_same_grids_after_the_first_pooling() -> None:
    birds = replace(TINY, first_pool=5)
    found = VGGAttention(birds, 3).eval().encode(sized(80, 80))
    assert [shape_of(one.layout) for one in found.cells] == [(80, 80), (16, 16), (8, 8)]
    assert shape_of(VGG(birds).eval().encode(sized(80, 80)).layout) == (2, 2)
    assert shape_of(VGGGap(birds).eval().encode(sized(80, 80)).layout) == (8, 8)


def test_weights_for_small_images_start_a_network_for_birds() -> None:
    small, birds = attending(2), VGGAttention(replace(TINY, classes=7, first_pool=5), 2)
    kept = {k: v for k, v in small.state_dict().items() if not k.startswith("classify.decision")}
    missing, unexpected = birds.load_state_dict(kept, strict=False)
    assert not unexpected and all(name.startswith("classify.decision") for name in missing)


def test_where_dropout_stands() -> None:
    def rates(net: nn.Module) -> list[float]:
        return [one.p for one in net.modules() if isinstance(one, nn.Dropout)]

    with torch.device("meta"):
        published, plain = VGG(Sizes(10)), VGG(Sizes(10, dropout=HEAD_ONLY))
    assert rates(published) == [0.3, 0.4, *[0.4] * 6, 0.5, 0.5]
    assert rates(plain) == [0.5, 0.5]
    assert Sizes(10).dropout == AS_PUBLISHED == Dropout(0.3, 0.4, 0.5)


def test_how_weights_start() -> None:
    """He's deviation by the outputs of a convolution, biases at zero, batch norm with eps 1e-3."""
    torch.manual_seed(0)
    trunk = Trunk((2, 2, 2, 2), width=0.5)
    last = trunk.stages[4][0]
    wanted = math.sqrt(2 / (9 * last.out_channels))
    assert float(last.weight.std()) == pytest.approx(wanted, rel=0.02)
    assert not last.bias.any()
    norms = [one for one in trunk.modules() if isinstance(one, nn.BatchNorm2d)]
    assert len(norms) == 13 and {one.eps for one in norms} == {1e-3}


def test_a_bias_in_front_of_batch_norm_is_left_out_while_training() -> None:
    """The same as layer by layer: features, gradients, running statistics, and in evaluation."""
    torch.manual_seed(0)
    ours = Blocks(*block(3, 5, 0.0), *block(5, 4, 0.0)).double()
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


def test_a_bias_in_front_of_a_frozen_norm_counts() -> None:
    net = Blocks(*block(3, 5)).train()
    net[1].eval()
    x = torch.randn(2, 3, 4, 4)
    before = net(x)
    net[0].bias.data += 1
    assert not torch.allclose(net(x), before)
    net(x).sum().backward()
    assert net[0].bias.grad is not None


def test_features_may_be_used_twice_before_they_are_learned_from() -> None:
    net = Blocks(*block(3, 5)).train()
    (net(torch.randn(2, 3, 4, 4)).sum() + net(torch.randn(2, 3, 4, 4)).sum()).backward()
    assert net[0].weight.grad is not None


def test_bytes_are_scaled_and_numbers_left_alone() -> None:
    images = torch.tensor([0, 110, 255], dtype=torch.uint8).view(1, 1, 1, 3).expand(1, 3, 2, 3)
    found = pixels(images, torch.float32)
    torch.testing.assert_close(found[0, 0, 0], torch.tensor([-110 / 70, 0.0, 145 / 70]))
    assert torch.equal(pixels(found, torch.float32), found)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_cells_are_a_view_of_the_features() -> None:
    """The memory order of the images makes the features of a cell lie together: no copy."""
    features = attending(3).eval().encode(sized(32, 32))
    for level in features.cells:
        assert level.values.is_contiguous() and level.values._base is not None


# --- what is special about each


def test_t_lt_14_class_activations_and_the_bias_are_the_logit() -> None:
    net = VGGGap(TINY).eval()
    features = net.encode(sized(32, 32, 4))
    classes = torch.tensor([0, 2, 1, 1])
    found = net.class_activation(features, classes)
    assert found.kind is Kind.SIGNED and shape_of(found.keys) == (8, 8)
    logits = net.decide(features).prediction.gather(1, classes[:, None])[:, 0]
    torch.testing.assert_close(
        found.weights.mean(dim=-1).flatten() + net.decision.bias[classes], logits
    )


def test_t_lt_13_the_gate_of_a_progressive_network_is_a_sigmoid_on_each_cell() -> None:
    net = VGGProgressive(TINY).eval()
    net.gate.weight.data.normal_()
    batch = sized(32, 32)
    features = net.encode(batch)
    assert features.gate.kind is Kind.AMOUNT and shape_of(features.gate.keys) == (16, 16)
    middle = net.trunk(pixels(batch.images, torch.float32), last=4)[-1]
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


def test_t_lt_13_the_query_of_the_gate_does_count() -> None:
    net = VGGProgressive(TINY).eval()
    net.gate.weight.data.normal_()
    cells = torch.randn(2, 26, 4, 4)
    one, other = (net.opened(cells, query) for query in (torch.zeros(2, 26), torch.ones(2, 26)))
    assert one.shape == (2, 1, 4, 4) and float((one - other).abs().max()) > 0.01


def test_a_mask_over_either_grid_of_a_progressive_network_acts_the_same() -> None:
    net = VGGProgressive(TINY).eval()
    features = net.encode(sized(32, 32))
    coarse = torch.ones(2, 64)
    coarse[:, :32] = 0
    fine = torch.ones(2, 256)
    fine[:, :128] = 0
    one, other = (net.decide(features, {"image": keep}).prediction for keep in (coarse, fine))
    torch.testing.assert_close(one, other)
    assert not torch.equal(one, net.decide(features).prediction)


@pytest.mark.parametrize("score", [parametrised, scaled_dot])
def test_another_images_query(score: Callable) -> None:
    """Appendix A.5: the query of another image moves the maps of dp and not those of pc."""
    net = attending(2, score).eval()
    features = net.encode(sized(32, 32, 4))
    assert features.query is not None
    swapped = replace(features, query=features.query.roll(1, dims=0))
    one, other = net.decide(features), net.decide(swapped)
    apart = max(
        float((x.weights - y.weights).abs().max())
        for x, y in zip(one.attention, other.attention, strict=True)
    )
    if score is parametrised:
        assert apart < 1e-6
    else:
        assert apart > 1e-6


IDLE = {"att": lambda: attending(1), "att3": lambda: attending(3), "pan": MAKERS["pan"]}


@pytest.mark.parametrize("make", IDLE.values(), ids=IDLE)
def test_a_query_that_makes_no_difference_is_left_out_while_training(make: Callable) -> None:
    """The same with it computed all the same: maps, classes, gradients, statistics of the rest."""

    class Asking(AttentionClassifier):
        wants_query = True

    batch, found = sized(32, 32, 4), []
    for kind in (AttentionClassifier, Asking):
        net = built(make).double().train()
        for one in net.modules():
            if isinstance(one, nn.Dropout):
                one.p = 0.0
        net.classify.__class__ = kind
        assert (net.encode(batch).query is None) is (kind is AttentionClassifier)
        output = net(batch)
        output.prediction.pow(2).sum().backward()
        found.append((net, output))
    (short, ours), (whole, theirs) = found
    torch.testing.assert_close(ours.prediction, theirs.prediction)
    for one, other in zip(ours.attention, theirs.attention, strict=True):
        torch.testing.assert_close(one.weights, other.weights)
    asked = ("query.", "classify.project.")
    for (name, one), other in zip(short.named_parameters(), whole.parameters(), strict=True):
        if name.startswith(asked):
            assert one.grad is None
            assert other.grad is None or float(other.grad.abs().max()) < 1e-12
        elif one.grad is None:
            assert other.grad is None and name.endswith(".bias")
        else:
            torch.testing.assert_close(one.grad, other.grad)
    for (name, one), other in zip(short.named_buffers(), whole.buffers(), strict=True):
        if not name.startswith(asked):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("make", IDLE.values(), ids=IDLE)
def test_a_query_left_out_of_training_stays_as_it_began(make: Callable) -> None:
    net = built(make)
    biases = {f"{k}.bias" for k, one in net.named_modules() if isinstance(one, nn.Conv2d)}
    before = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(sized(32, 32, 4)).prediction.pow(2).sum().backward()
        optimizer.step()
    after = net.state_dict()
    assert after.keys() == before.keys() and any(name.startswith("query.") for name in after)
    for name in after:
        asked = name.startswith(("query.", "classify.project."))
        same = torch.equal(after[name], before[name])
        assert same is (asked or name in biases), name
    assert net.eval().encode(sized(32, 32)).query is not None


@pytest.mark.parametrize("score", [scaled_dot, models.additive])
def test_a_query_that_counts_is_there_while_training(score: Callable) -> None:
    net = attending(3, score).train()
    net(sized(32, 32, 4)).prediction.pow(2).sum().backward()
    asked = [net.query.one[0].weight, *net.classify.project.parameters()]
    assert all(value.grad is not None for value in asked)
    assert max(float(value.grad.abs().max()) for value in asked) > 0


def test_a_mask_over_any_level_removes_the_place_at_every_level() -> None:
    net = attending(3).eval()
    features = net.encode(sized(32, 32))
    found = []
    for side in (32, 16, 8):
        keep = torch.ones(2, side, side)
        keep[:, : side // 2] = 0
        found.append(net.decide(features, {"image": keep.flatten(1)}).prediction)
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@pytest.mark.parametrize("levels", [0, 4])
def test_only_one_to_three_levels(levels: int) -> None:
    with pytest.raises(ValueError, match=f"1, 2 or 3 levels, not {levels}"):
        VGGAttention(TINY, levels)


def test_strategies_are_saved_by_name_and_others_refused(tmp_path: Path) -> None:
    for name, score in SCORES.items():
        assert name_in(SCORES, score, "score") == name
    for name, decision in DECISIONS.items():
        assert name_in(DECISIONS, decision, "decision") == name
    own = VGGAttention(TINY, 1, lambda width: Dot(0.5))
    with pytest.raises(BadInput, match="only a score of uniform, dot"):
        own.save_pretrained(tmp_path / "own")


def test_the_short_way_to_make_one() -> None:
    net = vgg_attention(classes=4, levels=3, score=models.additive, width=0.05)
    assert (net.sizes, net.levels, net.decide_by) == (Sizes(4, 0.05), 3, concat)
    assert models.vgg_attention is vgg_attention


# --- learning


@seeded
def test_it_learns_a_few_pictures_by_heart(make: Callable[[], nn.Module]) -> None:
    net = built(make)
    batch, labels = sized(32, 32, 6), torch.tensor([0, 1, 2, 0, 1, 2])
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
