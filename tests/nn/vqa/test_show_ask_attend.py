"""Show, Ask, Attend and Answer: contract, equations, and where a mask acts."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from overt.nn.vqa.image_encoders import CachedImageEncoder, CNNEncoder, CoordinateEncoder
from overt.nn.vqa.show_ask_attend import ShowAskAttend, ShowAskAttendSizes, init_glorot, unit_norm
from overt.testing import check_model, toy_batch

SIZES = ShowAskAttendSizes(vocabulary=10, answers=3, word=4, question=5, hidden=6, joint=7)
ENCODERS = {
    "cached": lambda: CachedImageEncoder(8, (2, 3)),
    "trained": lambda: CNNEncoder([4, 8], [4, 2]),
    "placed": lambda: CoordinateEncoder(CachedImageEncoder(8, (2, 3))),
}


def batch():
    torch.manual_seed(1)
    return replace(toy_batch(), features=torch.rand(4, 6, 8))


def make(eye: str = "cached", hops: int = 1) -> ShowAskAttend:
    torch.manual_seed(0)
    return ShowAskAttend(replace(SIZES, hops=hops), ENCODERS[eye]())


@pytest.mark.parametrize("eye", ENCODERS)
@pytest.mark.parametrize("hops", [0, 2])
def test_show_ask_attend_passes_check_model(eye, hops):
    check_model(lambda: make(eye, hops), batch(), unreached=() if hops else ("reader.blank",))


@pytest.mark.parametrize("eye", ENCODERS)
def test_saved_model_gives_equal_predictions(tmp_path, eye):
    net = make(eye).eval()
    net.save_pretrained(tmp_path / "net")
    back = ShowAskAttend.from_pretrained(tmp_path / "net")
    assert torch.equal(back(batch()).prediction, net(batch()).prediction)
    assert back.config() == net.config()


def test_the_published_sizes_are_the_default():
    with torch.device("meta"):
        net = ShowAskAttend(
            ShowAskAttendSizes(vocabulary=100, answers=3000, hops=0), CachedImageEncoder()
        )
    shapes = {name: tuple(value.shape) for name, value in net.named_parameters()}
    assert shapes == {
        "reader.embed.weight": (100, 300),
        "reader.blank": (300,),
        "reader.read.weight_ih_l0": (4096, 300),
        "reader.read.weight_hh_l0": (4096, 1024),
        "reader.read.bias_ih_l0": (4096,),
        "reader.read.bias_hh_l0": (4096,),
        "of_cell.weight": (512, 2048),
        "of_question.weight": (512, 1024),
        "of_question.bias": (512,),
        "score.weight": (2, 512),
        "score.bias": (2,),
        "decision.1.weight": (1024, 2 * 2048 + 1024),
        "decision.1.bias": (1024,),
        "decision.4.weight": (3000, 1024),
        "decision.4.bias": (3000,),
    }
    dropouts = [one.p for one in net.modules() if isinstance(one, nn.Dropout)]
    assert dropouts == [0.5] * 4


def test_show_ask_attend_follows_its_equations():
    net, given = make().double().eval(), batch()
    given = replace(given, features=given.features.double())
    found = net(given)
    features = net.encode(given)
    question, _ = net.reader(features.words)
    for b in range(4):
        asked = net.of_question.weight @ question[b] + net.of_question.bias
        cells = [cell / (cell.square().sum().sqrt() + 1e-8) for cell in given.features[b]]
        scores = []
        for cell in cells:
            joint = (net.of_cell.weight @ cell + asked).clamp_min(0)
            scores.append(net.score.weight @ joint + net.score.bias)
        weights = torch.stack(scores).exp()
        weights = weights / weights.sum(dim=0)
        torch.testing.assert_close(found.attention[0].weights[b, 0, :, 0], weights.mT)
        glimpses = [sum(w * c for w, c in zip(weights[:, g], cells, strict=True)) for g in (0, 1)]
        expected = net.decision(torch.cat([*glimpses, question[b]]))
        torch.testing.assert_close(found.prediction[b], expected)


def test_finding_15_a_soft_mask_before_the_norm_would_cancel():
    cells = torch.rand(2, 6, 8).double() + 0.1
    mask = torch.rand(2, 6, 1).double() + 0.01
    torch.testing.assert_close(unit_norm(cells * mask), unit_norm(cells), rtol=0, atol=1e-5)
    net, given = make().eval(), batch()
    features = net.encode(given)
    torch.testing.assert_close(features.cells.values.norm(dim=-1), torch.ones(4, 6))
    half = net.decide(features, {"image": torch.full((4, 6), 0.5)})
    assert (half.prediction - net.decide(features).prediction).abs().max() > 1e-3
    shorter = net(replace(given, features=given.features * 0.5))
    torch.testing.assert_close(shorter.prediction, net(given).prediction, rtol=0, atol=1e-5)
    assert not unit_norm(torch.zeros(1, 2, 3)).any()


def test_weights_are_within_glorot_bounds_and_biases_are_zero():
    net = make()
    for name, value in net.named_parameters():
        if value.ndim == 1:
            assert not value.any(), name
    gates = net.reader.read.weight_hh_l0.detach().chunk(4)
    for weight in (net.of_cell.weight.detach(), net.decision[1].weight.detach(), *gates):
        bound = math.sqrt(6 / sum(weight.shape))
        assert 0.5 * bound < float(weight.abs().max()) <= bound
    assert not net.reader.embed.weight[0].any()
    linear = nn.Linear(2, 2, bias=False)
    init_glorot(nn.Sequential(linear, nn.Embedding(3, 2)))
    assert float(linear.weight.detach().abs().max()) <= math.sqrt(6 / 4)


def test_glimpses_and_word_attention_are_found_by_span_name():
    found = make(hops=2).eval()(batch())
    assert found.attention_to("image").weights.shape == (4, 1, 2, 1, 6)
    assert found.attention_to("text").weights.shape == (4, 1, 2, 1, 6)
    with pytest.raises(ValueError, match=r"attention.*'text'"):
        make(hops=0).eval()(batch()).attention_to("text")
