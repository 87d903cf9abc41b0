"""Evaluation of grounded supervision: known values, head selection, and the gallery."""

import numpy as np
import pytest
import torch

from overt.metrics.grounding import block_mass
from overt.papers.vgp import evaluate
from overt.papers.vgp.evaluate import CaptionResults
from overt.papers.vgp.in_memory import PhraseLinksInMemory
from tests.papers.vgp import small


def make_results(accuracy: torch.Tensor) -> CaptionResults:
    """Make three samples with two correct predictions; each metric has the same table."""
    found = CaptionResults(["a", "b", "c"], [0, 1, 1], [0, 1, 2])
    found.related, found.relations = [torch.tensor([0, 1])], [torch.tensor([0, 0])]
    found.pairs = ["a", "a"]
    found.grounding = {name: [accuracy] for name in evaluate.GROUNDING_METRICS}
    return found


def test_grounding_is_averaged_over_heads_and_the_best_validation_head() -> None:
    test = torch.tensor([[[0.1, 0.9], [0.5, 0.3]]]).repeat(3, 1, 1)
    test[2] = torch.nan  # a sample without a grounded word
    validation = torch.tensor([[[0.1, 0.2], [0.8, 0.3]]]).repeat(3, 1, 1)
    found = evaluate.evaluate_captions(make_results(test), make_results(validation), 2, "test")
    ours = {name: one.value for name, one in found.ours.items()}
    assert ours["identification"] == pytest.approx(2 / 3)
    assert ours["grounding_accuracy"] == pytest.approx(0.45)
    assert ours["grounding_accuracy_last"] == pytest.approx(0.4)
    assert ours["grounding_accuracy_best"] == pytest.approx(0.5)  # of the best head in `validation`
    assert found.ours["grounding_accuracy"].n == 2
    assert ours["paraphrase"] == 0.5 and found.elsewhere["paraphrase.id"].tolist() == ["a", "a"]
    assert ours["paraphrase_f1"] == pytest.approx((2 / 3 + 0) / 2)
    assert found.groups["reach"]["layer 2 head 1"] == {"value": 0.5, "n": 2}
    assert found.groups["identification"]["second"]["value"] == 0.0


def test_collected_results_equal_the_metrics() -> None:
    net, texts = small.net().eval(), small.texts()
    links = PhraseLinksInMemory.of(texts)
    found = evaluate.collect_results(net, texts, links)
    batch = texts.batch(range(8))
    with torch.no_grad():
        output = net(batch)
        block = output.trace.block("text", "regions")
    torch.testing.assert_close(
        found.by_head("reach"), block_mass(block, batch.target), equal_nan=True
    )
    assert found.predicted == output.prediction.argmax(dim=-1).tolist()
    metrics = evaluate.validation_metrics(net, texts, links)
    right = np.equal(found.predicted, found.labels).mean()
    assert metrics["identification"] == pytest.approx(right) and 0 <= metrics["grounding"] <= 1


def test_the_gallery_has_a_few_samples_of_each_class() -> None:
    found = evaluate.gallery(small.net().eval(), small.drawn(16).batch(range(16)))
    kinds = [one.group for one in found]
    assert set(kinds) == {"both", "first", "second"}
    assert max(map(kinds.count, kinds)) <= evaluate.SHOWN
    assert found[0].image is not None and found[0].text


def test_the_gallery_has_one_map_per_word_and_the_ground_truth() -> None:
    batch = small.drawn(4).batch(range(4))
    net = small.net().eval()
    found = evaluate.gallery(net, batch)
    with torch.no_grad():
        block = net(batch).trace.block("text", "regions").weights.mean(dim=(1, 2))
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
