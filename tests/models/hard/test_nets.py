from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from overt.data.batch import Batch
from overt.geometry import PixelGeometry
from overt.models.answering.eyes import CachedEye, NormedEye, StridedEye
from overt.models.answering.questions import Bag, Recurrent
from overt.models.answering.stacked import StackedAttention, StackSizes
from overt.models.hard.aggregate import Mean, Pairwise, Relation, Sum
from overt.models.hard.attention import HardAttention, unasked
from overt.models.hard.nets import HAN, Decision, fan_in, relation_net, simple_han, vqa_cp
from overt.models.hard.selection import (
    Selection,
    drawn,
    keep_above_uniform,
    keep_all,
    keep_share,
    keep_top,
    randomly,
    straight_through,
)
from overt.testing import check_model, toy_batch

TOP = partial(keep_top, count=3)
THROUGH = Selection(TOP, weigh=straight_through)


def eye() -> NormedEye:
    return NormedEye(CachedEye(6, (3, 3)))


def photos(**options) -> HAN:
    options = {"selection": TOP, "joint": 8, "state": 5, "hidden": (6, 7), "eye": eye()} | options
    return vqa_cp(10, 4, **options)


def pairs(**options) -> HAN:
    options = {"selection": TOP, "joint": 6, "maps": 4, "hidden": 5} | options
    return relation_net(10, 4, **options)


MAKE = {
    "HAN+sum": photos,
    "HAN+sum, depth 0": lambda: photos(depth=0),
    "HAN+pairwise": lambda: photos(aggregate=Pairwise(8, size=6)),
    "AdaHAN+sum": lambda: photos(selection=keep_above_uniform),
    "AdaHAN+mean": lambda: photos(selection=keep_above_uniform, aggregate=Mean(8)),
    "AdaHAN+pairwise": lambda: photos(
        selection=partial(keep_above_uniform, temperature=0.05), aggregate=Pairwise(8, size=6)
    ),
    "sum": lambda: photos(selection=keep_all),
    "question-blind": lambda: photos(score=unasked),
    "random": lambda: photos(selection=randomly(3)),
    "drawn": lambda: photos(selection=drawn(3, weigh=straight_through)),
    "simple-HAN": lambda: simple_han(10, 4, partial(keep_share, share=0.16), width=0.01),
    "RN": lambda: pairs(selection=keep_all, joint=None),
    "HAN+RN, cells as they are": lambda: pairs(joint=None),
    "HAN+RN": pairs,
    "AdaHAN+RN": lambda: pairs(selection=partial(keep_above_uniform, temperature=0.05)),
    "ST+RN": lambda: pairs(selection=THROUGH),
    "HAN+sum, CLEVR": lambda: pairs(aggregate=Sum(6)),
    "HAN+RN, question vectors": lambda: pairs(reader=Bag(10)),
}


def made(name: str) -> HAN:
    torch.manual_seed(0)
    return MAKE[name]()


def batch_for(model: HAN) -> Batch:
    """Images of 96 x 96 pixels, and 3 x 3 cached cells."""
    batch = toy_batch()
    drawn = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (3, 3, 96, 96), generator=drawn, dtype=torch.uint8)
    return replace(
        batch,
        images=images,
        geometry=PixelGeometry.identity(3, (96, 96)),
        features=torch.randn(4, 9, 6, generator=drawn),
    )


@pytest.mark.parametrize("name", MAKE)
def test_every_model_keeps_the_contract(name):
    # the sum over 1296 pairs is rounded otherwise when it is weighed
    tolerance = 1e-4 if name == "RN" else 1e-5
    check_model(lambda: made(name), batch_for(made(name)), tolerance=tolerance)


@pytest.mark.parametrize("name", MAKE)
def test_a_saved_model_answers_the_same(name, tmp_path):
    model = made(name).eval()
    model.save_pretrained(tmp_path / "model")
    again = HAN.from_pretrained(tmp_path / "model")
    batch = batch_for(model)
    assert again(batch).prediction.equal(model(batch).prediction)
    assert again.config() == model.config()


@pytest.mark.parametrize("name", MAKE)
def test_flops_from_question_to_answer_are_those_that_torch_counts(name):
    model = made(name).eval()
    features = model.encode(batch_for(model))
    with FlopCounterMode(display=False) as reading:
        model.reader(features.words)
    with FlopCounterMode(display=False) as whole:
        found = model.decide(features)
    counted = whole.get_total_flops() - reading.get_total_flops()
    if "AdaHAN" in name and found.extras["cells_kept"].unique().numel() > 1:
        # what is filled up is worked on too, but not needed
        assert counted >= int(found.extras["flops"].sum())
    else:
        assert counted == int(found.extras["flops"].sum())


def test_the_network_for_photos_has_the_sizes_of_the_paper():
    model = vqa_cp(50)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert shapes["attend.of_cell.0.weight"] == (2048, 2048)
    assert shapes["attend.of_cell.2.weight"] == (2048, 2048)
    assert shapes["attend.of_question.0.weight"] == (2048, 512)
    assert shapes["attend.of_question.2.weight"] == (2048, 2048)
    widths = [one.out_features for one in model.decision if isinstance(one, nn.Linear)]
    assert widths == [1024, 2048, 1000]
    assert model.eye.config() == {
        "kind": "normed",
        "norm": "cell",
        "eye": {"kind": "cached", "width": 2048, "shape": [10, 10]},
    }


def test_the_relation_network_has_the_sizes_of_its_paper():
    model = relation_net(50, selection=keep_all, joint=None)
    assert model.attend.aggregate.first.in_features == 26 * 2 + 128
    assert len([one for one in model.attend.aggregate.rest if isinstance(one, nn.Linear)]) == 3
    widths = [one.out_features for one in model.decision if isinstance(one, nn.Linear)]
    assert widths == [256, 256, 28]
    assert [one.p for one in model.decision if isinstance(one, nn.Dropout)] == [0.5]
    assert not list(model.attend.of_cell.parameters())


def test_the_relation_network_of_all_cells_agrees_with_one_written_out():
    """Santoro et al.: f of the sum over all pairs of g([o_i, o_j, q])."""
    model = made("RN").eval().double()
    batch = batch_for(model)
    found = model(batch).prediction
    aggregate = model.attend.aggregate
    g = nn.Sequential(aggregate.first, nn.ReLU(), *aggregate.rest)
    cells = model.eye(batch).values
    question = model.reader(model.reader.encode(batch))
    for row in range(len(batch)):
        total = sum(g(torch.cat([a, b, question[row]])) for a in cells[row] for b in cells[row])
        torch.testing.assert_close(found[row], model.decision(total))


def test_han_2_all_cells_answer_as_the_model_without_attention():
    for plain, make in (("sum", photos), ("RN", partial(pairs, joint=None))):
        torch.manual_seed(0)
        every = make(selection=partial(keep_top, count=1000)).eval()
        batch = batch_for(every)
        assert every(batch).prediction.equal(made(plain).eval()(batch).prediction)


def test_han_11_a_quarter_of_the_cells_costs_a_sixteenth_of_the_pairs():
    costs = [
        Relation(26, 128).flops(torch.tensor([count]))
        - Relation(26, 128, layers=1).flops(torch.tensor([count]))
        for count in (64.0, 16.0)
    ]
    assert costs[0] / costs[1] == 16


def test_han_12_no_rule_adds_parameters():
    for family in (photos, pairs):
        rules = (keep_all, TOP, keep_above_uniform, THROUGH, randomly(3), drawn(3))
        sizes = {sum(p.numel() for p in family(selection=rule).parameters()) for rule in rules}
        assert len(sizes) == 1


def test_questions_choose_their_own_cells_of_one_picture():
    model = made("HAN+RN").eval()
    with torch.no_grad():
        for value in model.attend.of_question.parameters():
            value.mul_(8)  # a new network hardly hears the question
    batch = batch_for(model)
    output = model(batch)
    assert batch.image_of is not None
    assert batch.image_of[2] == batch.image_of[3]
    maps = output.looking_at("image").weights
    assert maps.sum((1, 2, 3, 4)).tolist() == [3.0] * 4
    assert not maps[2].equal(maps[3])


def test_the_model_learns_a_question_about_places():
    """Which half of a picture is bright, asked for rows or columns: hard from the first step."""
    torch.manual_seed(0)
    drawn = torch.Generator().manual_seed(0)
    count = 64
    images = torch.randint(0, 60, (count, 3, 48, 48), generator=drawn, dtype=torch.uint8)
    y, x = torch.randint(0, 2, (2, count), generator=drawn)
    for at in range(count):
        top, left = 4 + 24 * int(y[at]), 4 + 24 * int(x[at])
        images[at, :, top : top + 16, left : left + 16] = 230
    asks = torch.randint(0, 2, (count,), generator=drawn)
    batch = Batch(
        ids=tuple(map(str, range(count))),
        images=images,
        geometry=PixelGeometry.identity(count, (48, 48)),
        tokens=1 + asks[:, None],
        token_mask=torch.ones(count, 1, dtype=torch.bool),
        labels=torch.where(asks == 0, y, x),
    )
    model = relation_net(3, 2, TOP, joint=16, reader=Bag(3), maps=8, hidden=16)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(80):
        loss = nn.functional.cross_entropy(model(batch).prediction, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = model.eval()(batch).prediction.argmax(-1) == batch.labels
    assert right.float().mean() > 0.95


@pytest.mark.parametrize("name", MAKE)
def test_sixteen_bits_train_with_finite_gradients(name):
    model = made(name)
    batch = batch_for(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch)
        loss = nn.functional.cross_entropy(output.prediction.float(), batch.labels)
    loss.backward()
    assert output.looking_at("image").weights.dtype is torch.float32
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert found and all(grad.isfinite().all() for grad in found)


def test_simple_san_is_stacked_attention_behind_the_same_eye(tmp_path):
    """Section 4.7's pair: one small CNN, hard attention or two soft hops."""

    def make() -> StackedAttention:
        torch.manual_seed(0)
        sizes = StackSizes(10, 4, word=5, question=6, joint=6, hidden=4, word_hops=0)
        return StackedAttention(sizes, StridedEye(0.01))

    batch = batch_for(made("simple-HAN"))
    check_model(make, batch, unreached=("reader.blank",))
    model = make().eval()
    model.save_pretrained(tmp_path / "model")
    again = StackedAttention.from_pretrained(tmp_path / "model")
    assert again(batch).prediction.equal(model(batch).prediction)
    hard = made("simple-HAN").eye.state_dict()
    assert {name: one.shape for name, one in hard.items()} == {
        name: one.shape for name, one in model.eye.state_dict().items()
    }


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="cells of 7 and questions of 5"):
        HAN(eye(), Recurrent(10, 4, 5), HardAttention(7, 5), Decision((4,), 3))


def test_layers_begin_with_a_variance_of_one_over_their_inputs():
    torch.manual_seed(0)
    net = fan_in(relation_net(30))
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            deviation = layer.weight[0].numel() ** -0.5
            assert float(layer.weight.detach().abs().max()) <= 2 * deviation, name
            if layer.weight.numel() > 5000:  # a normal one that is cut has .88 of its own
                assert float(layer.weight.detach().std()) == pytest.approx(
                    0.88 * deviation, rel=0.05
                )
            assert layer.bias is None or not layer.bias.any()
