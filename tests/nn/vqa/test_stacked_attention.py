"""Stacked attention: contract, and equations hop by hop."""

from dataclasses import replace

import pytest
import torch

from overt.nn.vqa.image_encoders import CachedImageEncoder, CNNEncoder, CoordinateEncoder
from overt.nn.vqa.stacked_attention import StackedAttention, StackedAttentionSizes
from overt.testing import check_model, toy_batch

SIZES = StackedAttentionSizes(vocabulary=10, answers=3, word=4, question=5, joint=6, hidden=7)
ENCODERS = {
    "cached": lambda: CachedImageEncoder(8, (2, 3)),
    "trained": lambda: CNNEncoder([4, 8], [4, 2]),
    "placed": lambda: CoordinateEncoder(CachedImageEncoder(8, (2, 3))),
}


def batch():
    torch.manual_seed(1)
    return replace(toy_batch(), features=torch.rand(4, 6, 8))


def make(eye: str = "cached", hops: int = 2, word_hops: int = 1) -> StackedAttention:
    torch.manual_seed(0)
    return StackedAttention(replace(SIZES, hops=hops, word_hops=word_hops), ENCODERS[eye]())


@pytest.mark.parametrize("eye", ENCODERS)
@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("word_hops", [0, 1])
def test_stacked_attention_passes_check_model(eye, hops, word_hops):
    unreached = () if word_hops else ("reader.blank",)
    check_model(lambda: make(eye, hops, word_hops), batch(), unreached)


@pytest.mark.parametrize("eye", ENCODERS)
def test_saved_model_gives_equal_predictions(tmp_path, eye):
    net = make(eye).eval()
    net.save_pretrained(tmp_path / "net")
    back = StackedAttention.from_pretrained(tmp_path / "net")
    assert torch.equal(back(batch()).prediction, net(batch()).prediction)
    assert back.config() == net.config()


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_stacked_attention_follows_its_equations(hops):
    """Compute h = tanh(W v + (Q u + b)), p = softmax(w h + b), u' = u + sum p v cell by cell."""
    net, given = make(hops=hops).double().eval(), batch()
    given = replace(given, features=given.features.double())
    mask = torch.rand(4, 6).double()
    features = net.encode(given)
    found = net.decide(features, {"image": mask})
    assert found.attention_to("image").weights.shape == (4, hops, 1, 1, 6)
    question, _ = net.reader(features.words)
    for b in range(4):
        cells = [
            torch.tanh(net.of_cell.weight @ (m * cell) + net.of_cell.bias)
            for m, cell in zip(mask[b], given.features[b], strict=True)
        ]
        asked = torch.tanh(net.of_question.weight @ question[b] + net.of_question.bias)
        for at, hop in enumerate(net.hops):
            query = hop.of_question.weight @ asked + hop.of_question.bias
            raised = [
                (hop.score.weight @ torch.tanh(hop.of_cell.weight @ cell + query) + hop.score.bias)
                .exp()
                for cell in cells
            ]  # fmt: skip
            weights = torch.cat(raised) / sum(raised)
            torch.testing.assert_close(found.attention[0].weights[b, at].flatten(), weights)
            asked = asked + sum(w * cell for w, cell in zip(weights, cells, strict=True))
        last = net.decision[1]
        torch.testing.assert_close(found.prediction[b], last.weight @ asked + last.bias)


def test_hops_have_separate_weights_and_only_coordinates_make_positions_matter():
    net = make(hops=2)
    assert len({id(p) for p in net.parameters()}) == len([*net.parameters()])
    turned = torch.tensor([3, 4, 5, 0, 1, 2])
    for eye, moved in (("cached", False), ("placed", True)):
        net, given = make(eye).eval(), batch()
        other = replace(given, features=given.features[:, turned])
        same = torch.allclose(net(given).prediction, net(other).prediction, atol=1e-6)
        assert same is not moved, "predictions depend on positions only with coordinates"


def test_zero_hops_raise():
    with pytest.raises(ValueError, match=r"hops.* 0"):
        make(hops=0)
