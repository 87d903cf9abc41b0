"""Show, Ask, Attend and Answer: the contract, the equation, and where a mask acts."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from overt.models.answering.eyes import CachedEye, PlacedEye, TrainedEye
from overt.models.answering.showask import AskSizes, ShowAskAttend, glorot, unit
from overt.testing import check_model, toy_batch

SIZES = AskSizes(vocabulary=10, answers=3, word=4, question=5, hidden=6, joint=7)
EYES = {
    "cached": lambda: CachedEye(8, (2, 3)),
    "trained": lambda: TrainedEye([4, 8], [4, 2]),
    "placed": lambda: PlacedEye(CachedEye(8, (2, 3))),
}


def batch():
    torch.manual_seed(1)
    return replace(toy_batch(), features=torch.rand(4, 6, 8))


def make(eye: str = "cached", hops: int = 1) -> ShowAskAttend:
    torch.manual_seed(0)
    return ShowAskAttend(replace(SIZES, hops=hops), EYES[eye]())


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("hops", [0, 2])
def test_it_keeps_the_contract(eye, hops):
    check_model(lambda: make(eye, hops), batch(), unreached=() if hops else ("reader.blank",))


@pytest.mark.parametrize("eye", EYES)
def test_it_comes_back_from_disk(tmp_path, eye):
    net = make(eye).eval()
    net.save_pretrained(tmp_path / "net")
    back = ShowAskAttend.from_pretrained(tmp_path / "net")
    assert torch.equal(back(batch()).prediction, net(batch()).prediction)
    assert back.config() == net.config()


def test_the_published_sizes_are_the_default():
    with torch.device("meta"):
        net = ShowAskAttend(AskSizes(vocabulary=100, answers=3000, hops=0), CachedEye())
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


def test_it_agrees_with_its_equations_cell_by_cell():
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


def test_finding_15_a_soft_mask_in_front_of_the_norm_would_cancel():
    cells = torch.rand(2, 6, 8).double() + 0.1
    mask = torch.rand(2, 6, 1).double() + 0.01
    torch.testing.assert_close(unit(cells * mask), unit(cells), rtol=0, atol=1e-5)
    net, given = make().eval(), batch()
    features = net.encode(given)
    torch.testing.assert_close(features.cells.values.norm(dim=-1), torch.ones(4, 6))
    half = net.decide(features, {"image": torch.full((4, 6), 0.5)})
    assert (half.prediction - net.decide(features).prediction).abs().max() > 1e-3
    shorter = net(replace(given, features=given.features * 0.5))
    torch.testing.assert_close(shorter.prediction, net(given).prediction, rtol=0, atol=1e-5)
    assert not unit(torch.zeros(1, 2, 3)).any()


def test_weights_start_within_glorots_bounds_and_biases_from_zero():
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
    glorot(nn.Sequential(linear, nn.Embedding(3, 2)))
    assert float(linear.weight.detach().abs().max()) <= math.sqrt(6 / 4)


def test_glimpses_and_words_can_be_asked_for_by_name():
    found = make(hops=2).eval()(batch())
    assert found.looking_at("image").weights.shape == (4, 1, 2, 1, 6)
    assert found.looking_at("text").weights.shape == (4, 1, 2, 1, 6)
    with pytest.raises(ValueError, match="no attention over 'text'"):
        make(hops=0).eval()(batch()).looking_at("text")
