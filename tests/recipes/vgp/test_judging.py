"""What a network is judged by: numbers that are known, and the head that is chosen elsewhere."""

import numpy as np
import pytest
import torch

from overt import measure
from overt.recipes.vgp import judging
from overt.recipes.vgp.held import HeldLinks
from overt.recipes.vgp.judging import Described
from tests.recipes.vgp import small


def made(accuracy: torch.Tensor) -> Described:
    """Three samples of which two are told rightly; each measure is the same table."""
    found = Described(["a", "b", "c"], [0, 1, 1], [0, 1, 2])
    found.related, found.relations = [torch.tensor([0, 1])], [torch.tensor([0, 0])]
    found.pairs = ["a", "a"]
    found.looked = {name: [accuracy] for name in judging.LOOKED}
    return found


def test_means_over_layers_and_heads_and_the_head_that_is_best_on_validation() -> None:
    test = torch.tensor([[[0.1, 0.9], [0.5, 0.3]]]).repeat(3, 1, 1)
    test[2] = torch.nan  # a sample without a grounded word
    held = torch.tensor([[[0.1, 0.2], [0.8, 0.3]]]).repeat(3, 1, 1)
    found = judging.evaluated(made(test), made(held), 2, "test")
    ours = {name: one.value for name, one in found.ours.items()}
    assert ours["identification"] == pytest.approx(2 / 3)
    assert ours["grounding_accuracy"] == pytest.approx(0.45)
    assert ours["grounding_accuracy_last"] == pytest.approx(0.4)
    assert ours["grounding_accuracy_best"] == pytest.approx(0.5)  # by what is best in `held`
    assert found.ours["grounding_accuracy"].n == 2
    assert ours["paraphrase"] == 0.5 and found.elsewhere["paraphrase.id"].tolist() == ["a", "a"]
    assert ours["paraphrase_f1"] == pytest.approx((2 / 3 + 0) / 2)
    assert found.groups["reach"]["layer 2 head 1"] == {"value": 0.5, "n": 2}
    assert found.groups["identification"]["second"]["value"] == 0.0


def test_numbers_are_those_of_the_measures() -> None:
    net, texts = small.net().eval(), small.texts()
    links = HeldLinks.of(texts)
    found = judging.described(net, texts, links)
    batch = texts.batch(range(8))
    with torch.no_grad():
        output = net(batch)
        block = output.seen.block("text", "regions")
    torch.testing.assert_close(
        found.by_head("reach"), measure.reach(block, batch.target), equal_nan=True
    )
    assert found.predicted == output.prediction.argmax(dim=-1).tolist()
    told = judging.validated(net, texts, links)
    right = np.equal(found.predicted, found.labels).mean()
    assert told["identification"] == pytest.approx(right) and 0 <= told["grounding"] <= 1


def test_the_gallery_shows_a_few_of_each_kind_with_their_words() -> None:
    found = judging.gallery(small.net().eval(), small.drawn(16).batch(range(16)))
    kinds = [one.group for one in found]
    assert set(kinds) == {"both", "first", "second"}
    assert max(map(kinds.count, kinds)) <= judging.SHOWN
    assert found[0].image is not None and found[0].text


def test_the_gallery_knows_where_each_word_looks_and_what_it_means() -> None:
    batch = small.drawn(4).batch(range(4))
    net = small.net().eval()
    found = judging.gallery(net, batch)
    with torch.no_grad():
        block = net(batch).seen.block("text", "regions").weights.mean(dim=(1, 2))
    assert batch.token_mask is not None and batch.boxes is not None and batch.target is not None
    for row, one in enumerate(found):
        assert one.word_cells is not None and one.spans is not None and one.cells is not None
        assert len(one.word_cells) == len(one.spans) and one.boxes.shape[1] == 4
        sums = one.word_cells.sum(axis=(1, 2))
        np.testing.assert_allclose(sums, block[row, batch.token_mask[row]].sum(dim=-1), atol=1e-4)
        wanted = batch.target.weights[row].mean(dim=(0, 1)).sum(dim=0) > 0
        x0, y0, x1, y1 = batch.boxes[row][wanted][0].tolist()
        middle = int((y0 + y1) / 2 / 32 * 16), int((x0 + x1) / 2 / 32 * 16)
        assert one.truth_cells is not None and one.truth_cells[middle] > 0
