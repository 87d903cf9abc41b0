"""Networks of hard attention: contract, saving, FLOPs, sizes, and training."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.geometry import PixelGeometry
from overt.nn.hard_attention.aggregate import (
    MeanAggregation,
    NonLocalAggregation,
    RelationAggregation,
    SumAggregation,
)
from overt.nn.hard_attention.attention import HardAttention, image_presence
from overt.nn.hard_attention.selection import (
    Selection,
    gumbel_selection,
    keep_above_uniform,
    keep_all,
    keep_share,
    keep_top,
    random_selection,
    straight_through,
)
from overt.nn.vqa.image_encoders import CachedImageEncoder, NormalizedEncoder, StridedCNNEncoder
from overt.nn.vqa.question_encoders import BagOfWordsEncoder, LSTMQuestionEncoder
from overt.nn.vqa.stacked_attention import StackedAttention, StackedAttentionSizes
from overt.papers.han.networks import HAN, AnswerHead, init_fan_in, relation_net, simple_han, vqa_cp
from overt.testing import check_model, toy_batch

TOP = partial(keep_top, count=3)
THROUGH = Selection(TOP, weigh=straight_through)


def make_eye() -> NormalizedEncoder:
    return NormalizedEncoder(CachedImageEncoder(6, (3, 3)))


def make_photo_network(**options) -> HAN:
    options = {
        "selection": TOP,
        "joint": 8,
        "state": 5,
        "hidden": (6, 7),
        "eye": make_eye(),
    } | options
    return vqa_cp(10, 4, **options)


def make_relation_network(**options) -> HAN:
    options = {"selection": TOP, "joint": 6, "maps": 4, "hidden": 5} | options
    return relation_net(10, 4, **options)


MAKE = {
    "HAN+sum": make_photo_network,
    "HAN+sum, depth 0": lambda: make_photo_network(depth=0),
    "HAN+pairwise": lambda: make_photo_network(aggregate=NonLocalAggregation(8, size=6)),
    "AdaHAN+sum": lambda: make_photo_network(selection=keep_above_uniform),
    "AdaHAN+mean": lambda: make_photo_network(
        selection=keep_above_uniform, aggregate=MeanAggregation(8)
    ),
    "AdaHAN+pairwise": lambda: make_photo_network(
        selection=partial(keep_above_uniform, temperature=0.05),
        aggregate=NonLocalAggregation(8, size=6),
    ),
    "sum": lambda: make_photo_network(selection=keep_all),
    "question-blind": lambda: make_photo_network(score=image_presence),
    "random": lambda: make_photo_network(selection=random_selection(3)),
    "drawn": lambda: make_photo_network(selection=gumbel_selection(3, weigh=straight_through)),
    "simple-HAN": lambda: simple_han(10, 4, partial(keep_share, share=0.16), width=0.01),
    "RN": lambda: make_relation_network(selection=keep_all, joint=None),
    "HAN+RN, cells as they are": lambda: make_relation_network(joint=None),
    "HAN+RN": make_relation_network,
    "AdaHAN+RN": lambda: make_relation_network(
        selection=partial(keep_above_uniform, temperature=0.05)
    ),
    "ST+RN": lambda: make_relation_network(selection=THROUGH),
    "HAN+sum, CLEVR": lambda: make_relation_network(aggregate=SumAggregation(6)),
    "HAN+RN, question vectors": lambda: make_relation_network(reader=BagOfWordsEncoder(10)),
}


def build_model(name: str) -> HAN:
    torch.manual_seed(0)
    return MAKE[name]()


def build_oracle() -> HAN:
    torch.manual_seed(0)
    attend = HardAttention(6, 10, 8, selection=TOP)
    return HAN(make_eye(), BagOfWordsEncoder(10), attend, AnswerHead((6,), 4), oracle=True).eval()


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


@pytest.mark.long
@pytest.mark.parametrize("name", MAKE)
def test_each_model_passes_check_model(name):
    # a weighted sum over 1296 pairs has a different rounding error
    tolerance = 1e-4 if name == "RN" else 1e-5
    check_model(lambda: build_model(name), batch_for(build_model(name)), tolerance=tolerance)


@pytest.mark.parametrize("name", MAKE)
def test_a_saved_model_gives_the_same_prediction(name, tmp_path):
    model = build_model(name).eval()
    model.save_pretrained(tmp_path / "model")
    again = HAN.from_pretrained(tmp_path / "model")
    batch = batch_for(model)
    assert again(batch).prediction.equal(model(batch).prediction)
    assert again.config() == model.config()


@pytest.mark.parametrize("name", MAKE)
def test_flops_equal_those_counted_by_torch(name):
    model = build_model(name).eval()
    features = model.encode(batch_for(model))
    with FlopCounterMode(display=False) as reading:
        model.reader(features.words)
    with FlopCounterMode(display=False) as total:
        found = model.decide(features)
    counted = total.get_total_flops() - reading.get_total_flops()
    if "AdaHAN" in name and found.extras["cells_kept"].unique().numel() > 1:
        # padded cells are computed too, but not needed
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


def test_the_relation_network_of_all_cells_equals_a_loop_over_pairs():
    """Santoro et al.: f of the sum over all pairs of g([o_i, o_j, q])."""
    model = build_model("RN").eval().double()
    batch = batch_for(model)
    found = model(batch).prediction
    aggregate = model.attend.aggregate
    g = nn.Sequential(aggregate.first, nn.ReLU(), *aggregate.rest)
    cells = model.eye(batch).values
    question = model.reader(model.reader.encode(batch))
    for row in range(len(batch)):
        total = sum(g(torch.cat([a, b, question[row]])) for a in cells[row] for b in cells[row])
        torch.testing.assert_close(found[row], model.decision(total))


def test_han_2_keeping_all_cells_equals_the_model_without_attention():
    for plain, make in (
        ("sum", make_photo_network),
        ("RN", partial(make_relation_network, joint=None)),
    ):
        torch.manual_seed(0)
        every = make(selection=partial(keep_share, share=1.0)).eval()
        batch = batch_for(every)
        assert every(batch).prediction.equal(build_model(plain).eval()(batch).prediction)


def test_han_11_a_quarter_of_the_cells_costs_a_sixteenth_of_the_pairs():
    costs = [
        RelationAggregation(26, 128).flops(torch.tensor([count]))
        - RelationAggregation(26, 128, layers=1).flops(torch.tensor([count]))
        for count in (64.0, 16.0)
    ]
    assert costs[0] / costs[1] == 16


def test_han_12_selection_rules_have_no_parameters():
    for family in (make_photo_network, make_relation_network):
        rules = (
            keep_all,
            TOP,
            keep_above_uniform,
            THROUGH,
            random_selection(3),
            gumbel_selection(3),
        )
        sizes = {sum(p.numel() for p in family(selection=rule).parameters()) for rule in rules}
        assert len(sizes) == 1


def test_questions_about_one_image_select_different_cells():
    model = build_model("HAN+RN").eval()
    with torch.no_grad():
        for value in model.attend.of_question.parameters():
            value.mul_(8)  # in a new network the question has little effect
    batch = batch_for(model)
    output = model(batch)
    assert batch.image_of is not None
    assert batch.image_of[2] == batch.image_of[3]
    maps = output.attention_to("image").weights
    assert maps.sum((1, 2, 3, 4)).tolist() == [3.0] * 4
    assert not maps[2].equal(maps[3])


@pytest.mark.long
def test_the_model_learns_a_question_about_positions():
    """Which half of an image is bright, by rows or columns; attention is hard from the start."""
    torch.manual_seed(0)
    drawn = torch.Generator().manual_seed(0)
    count = 64
    images = torch.randint(0, 60, (count, 3, 48, 48), generator=drawn, dtype=torch.uint8)
    y, x = torch.randint(0, 2, (2, count), generator=drawn)
    for at in range(count):
        top, left = 4 + 24 * int(y[at]), 4 + 24 * int(x[at])
        images[at, :, top : top + 16, left : left + 16] = 230
    questions = torch.randint(0, 2, (count,), generator=drawn)
    batch = Batch(
        ids=tuple(map(str, range(count))),
        images=images,
        geometry=PixelGeometry.identity(count, (48, 48)),
        tokens=1 + questions[:, None],
        token_mask=torch.ones(count, 1, dtype=torch.bool),
        labels=torch.where(questions == 0, y, x),
    )
    model = relation_net(3, 2, TOP, joint=16, reader=BagOfWordsEncoder(3), maps=8, hidden=16)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(80):
        loss = nn.functional.cross_entropy(model(batch).prediction, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right = model.eval()(batch).prediction.argmax(-1) == batch.labels
    assert right.float().mean() > 0.95


@pytest.mark.parametrize("name", MAKE)
def test_bfloat16_training_has_finite_gradients(name):
    model = build_model(name)
    batch = batch_for(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch)
        loss = nn.functional.cross_entropy(output.prediction.float(), batch.labels)
    loss.backward()
    assert output.attention_to("image").weights.dtype is torch.float32
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert found and all(grad.isfinite().all() for grad in found)


def test_simple_san_is_stacked_attention_with_the_same_image_encoder(tmp_path):
    """Section 4.7 compares hard attention and two soft hops on the same small CNN."""

    def make() -> StackedAttention:
        torch.manual_seed(0)
        sizes = StackedAttentionSizes(10, 4, word=5, question=6, joint=6, hidden=4, word_hops=0)
        return StackedAttention(sizes, StridedCNNEncoder(0.01))

    batch = batch_for(build_model("simple-HAN"))
    check_model(make, batch, unreached=("reader.blank",))
    model = make().eval()
    model.save_pretrained(tmp_path / "model")
    again = StackedAttention.from_pretrained(tmp_path / "model")
    assert again(batch).prediction.equal(model(batch).prediction)
    hard = build_model("simple-HAN").eye.state_dict()
    assert {name: one.shape for name, one in hard.items()} == {
        name: one.shape for name, one in model.eye.state_dict().items()
    }


def test_modules_with_different_widths_are_rejected():
    with pytest.raises(ValueError, match=r"(?s)7 .* 5 "):
        HAN(make_eye(), LSTMQuestionEncoder(10, 4, 5), HardAttention(7, 5), AnswerHead((4,), 3))


def test_init_fan_in_has_a_variance_of_one_over_the_inputs():
    torch.manual_seed(0)
    net = init_fan_in(relation_net(30))
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            deviation = layer.weight[0].numel() ** -0.5
            assert float(layer.weight.detach().abs().max()) <= 2 * deviation, name
            if layer.weight.numel() > 5000:  # a truncated normal has 0.88 of the deviation
                assert float(layer.weight.detach().std()) == pytest.approx(
                    0.88 * deviation, rel=0.05
                )
            assert layer.bias is None or not layer.bias.any()


def test_an_oracle_keeps_the_cells_with_evidence_then_the_largest_norms():
    model = build_oracle()
    batch = batch_for(model)
    shares = torch.zeros(len(batch), 9)
    shares[0, [2, 7]] = torch.tensor([0.1, 0.9])
    shares[1, :5] = torch.tensor([0.1, 0.5, 0.2, 0.4, 0.3])
    batch = replace(batch, target=AttentionMap.from_coverage(shares, grid(3, 3)))
    kept = model(batch).attention_to("image").weights[:, 0, 0, 0] > 0
    assert kept.sum(dim=1).tolist() == [3] * len(batch)
    assert kept[0, [2, 7]].all() and kept[1, [1, 3, 4]].all()
    model.oracle = False
    by_norm = model(batch).attention_to("image").weights[:, 0, 0, 0] > 0
    assert torch.equal(kept[2:], by_norm[2:])  # without evidence: the norm alone
    rest = by_norm[0].clone()
    rest[[2, 7]] = False
    assert int((kept[0] & rest).sum()) == 1  # the third cell is one that the norm keeps


def test_an_oracle_needs_the_deciding_objects_on_its_grid():
    model = build_oracle()
    batch = batch_for(model)
    with pytest.raises(ValueError, match=r"batch\.target"):
        model(replace(batch, target=None))
    wrong = AttentionMap.from_coverage(torch.ones(len(batch), 4), grid(2, 2))
    with pytest.raises(ValueError, match="4 cells.*9"):
        model(replace(batch, target=wrong))
    assert "oracle" not in build_model("HAN+sum").config()  # as in networks saved before


def test_a_saved_oracle_is_an_oracle(tmp_path):
    model = build_oracle()
    batch = batch_for(model)
    shares = torch.rand(len(batch), 9, generator=torch.Generator().manual_seed(0))
    batch = replace(batch, target=AttentionMap.from_coverage(shares, grid(3, 3)))
    model.save_pretrained(tmp_path / "model")
    again = HAN.from_pretrained(tmp_path / "model")
    assert again.oracle and again(batch).prediction.equal(model(batch).prediction)
    kept = again(batch).attention_to("image").weights[:, 0, 0, 0] > 0
    assert torch.equal(kept, torch.zeros_like(kept).scatter(1, shares.topk(3).indices, True))
