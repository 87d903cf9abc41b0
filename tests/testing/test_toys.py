"""Toy models and batches of `overt.testing`."""

from dataclasses import replace

import pytest
import torch

from overt.testing import Copier, PlantedCell, PlantedWord, toy_batch

TOKENS = torch.tensor([[1, 2, 3]] * 4)


def test_planted_cell_decides_the_prediction():
    images = torch.zeros(2, 3, 8, 8)
    images[0, :, 2:4, 2:4], images[1, :, 2:4, 2:4] = 0.5, -0.25  # cell 5 of 4 x 4
    batch = replace(toy_batch(2), images=images, image_of=None, geometry=None)
    model = PlantedCell(gain=4.0)
    output = model(batch)
    expected = torch.tensor([[-2.0, 2.0], [1.0, -1.0]])
    torch.testing.assert_close(output.prediction.detach(), expected)
    features = model.encode(batch)
    for cell in range(16):
        mask = torch.ones(2, 16)
        mask[:, cell] = 0
        moved = model.decide(features, {"image": mask}).prediction.detach()
        torch.testing.assert_close(moved, torch.zeros(2, 2) if cell == 5 else expected)
    assert output.attention_to("image").weights[:, 0, 0, 0].argmax(dim=-1).tolist() == [5, 5]
    misleading = PlantedCell(shows=9)
    assert misleading(batch).attention_to("image").weights[:, 0, 0, 0, 9].tolist() == [1, 1]
    assert misleading.truth(batch).weights[:, 0, 0, 0, 5].tolist() == [1, 1]


def test_planted_word_decides_the_prediction():
    tokens = torch.tensor([[3, 1, 3], [1, 2, 3], [1, 2, 2]])
    present = torch.tensor([[True, True, True], [True, True, False], [True, False, False]])
    batch = replace(
        toy_batch(3),
        tokens=tokens,
        token_mask=present,
        text=None,
        images=None,
        image_of=None,
        geometry=None,
    )
    output = PlantedWord(word=3, gain=4.0)(batch)
    assert output.prediction[:, 1].tolist() == [6, -2, -2]
    expected = torch.tensor([[0.5, 0, 0.5], [0.5, 0.5, 0], [1, 0, 0]])
    torch.testing.assert_close(output.attention_to("text").weights[:, 0, 0, 0], expected)


def test_toy_batch_is_deterministic():
    one, two = toy_batch(), toy_batch()
    assert torch.equal(one.images, two.images) and torch.equal(one.tokens, two.tokens)
    assert len(one.images) == 3 and one.image_of.tolist() == [0, 1, 2, 2]
    assert not one.token_mask.all()
    for row in range(4):
        count = int(one.token_mask[row].sum())
        assert one.text.tokens(row)[:count] == list("abcdef"[:count])
    assert not torch.equal(toy_batch(seed=1).images, one.images)


def test_missing_batch_fields_raise():
    words_only = replace(toy_batch(), images=None, image_of=None, geometry=None)
    with pytest.raises(ValueError, match=r"batch.*images"):
        PlantedCell()(words_only)
    with pytest.raises(ValueError, match=r"batch.*tokens"):
        PlantedWord()(replace(toy_batch(), tokens=None))


def test_copier_copies_its_text_and_attends_to_the_copied_position():
    batch = toy_batch()
    model = Copier()
    state = model.start(model.encode(batch))
    for place in range(4):
        output, state = model.step(state, TOKENS[:, 0])
        assert torch.equal(output.prediction.argmax(-1), batch.tokens[:, place])
        assert torch.equal(
            output.attention[0].weights[:, 0, 0, 0].argmax(-1).unique(), torch.tensor([place])
        )
