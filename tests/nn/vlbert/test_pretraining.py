"""Pretraining of VL-BERT: hidden words and regions, exchanged texts, and the three losses."""

from dataclasses import replace

import pytest
import torch

from overt.data.batch import Batch
from overt.data.scenes.captions import CaptionScenes
from overt.data.vocabulary import BEGIN, END, MASK, SPECIAL
from overt.geometry import PixelGeometry
from overt.nn.vlbert.model import ClassificationHead, VLBert, VLBertSizes
from overt.nn.vlbert.pretraining import (
    PATCH,
    PretrainingHeads,
    content_size,
    exchange_texts,
    mask_regions,
    mask_words,
    pretraining_losses,
    region_content,
    word_logits,
)
from overt.nn.vlbert.regions import PooledRegionEncoder, PrecomputedRegionEncoder
from overt.testing import toy_batch

DATA = CaptionScenes("train", 3, 8, size=32, regions=10, each=1)


def captions() -> Batch:
    return DATA.batch(range(8))


def network(batch: Batch) -> VLBert:
    torch.manual_seed(0)
    sizes = VLBertSizes(DATA.vocabulary.size, 16, 2, 2, 32, positions=60, dropout=0.0, gain=1.0)
    eye = (
        PooledRegionEncoder([4, 6], [2, 2])
        if batch.features is None
        else PrecomputedRegionEncoder(batch.features.shape[-1])
    )
    return VLBert(sizes, eye, ClassificationHead(16, 3, 0.0))


def test_words_are_masked_in_berts_proportions() -> None:
    tokens = torch.full((40, 500), 7)
    words = torch.ones_like(tokens, dtype=torch.bool)
    words[:, 0] = False
    hidden, chosen = mask_words(tokens, words, MASK, vocabulary=100, share=0.15, specials=5)
    assert not chosen[:, 0].any() and torch.equal(hidden[~chosen], tokens[~chosen])
    assert float(chosen[:, 1:].float().mean()) == pytest.approx(0.15, abs=0.01)
    of = hidden[chosen]
    assert float((of == MASK).float().mean()) == pytest.approx(0.8, abs=0.03)
    assert float((of == 7).float().mean()) == pytest.approx(0.101, abs=0.02)
    assert int(of[of != MASK].min()) >= 5 and int(of.max()) < 100


def test_hidden_regions_are_black_for_every_region_that_overlaps_them() -> None:
    """Pixel by pixel: black where some hidden box contains the center, unchanged elsewhere."""
    batch = captions()
    hidden, chosen = mask_regions(batch, 0.3)
    assert chosen.any() and not chosen.all()
    assert batch.images is not None and batch.boxes is not None and hidden.images is not None
    for row in range(len(batch)):
        boxes = batch.boxes[row][chosen[row]].tolist()
        for y in range(0, 32, 5):
            for x in range(0, 32, 3):
                inside = any(a <= x + 0.5 < c and b <= y + 0.5 < d for a, b, c, d in boxes)
                expected = torch.zeros(3) if inside else batch.images[row, :, y, x].float()
                assert torch.equal(hidden.images[row, :, y, x].float(), expected)


def test_samples_of_one_image_hide_their_own_regions() -> None:
    boxes = torch.tensor([[0.0, 0.0, 16.0, 16.0], [16.0, 16.0, 32.0, 32.0]]).expand(4, 2, 4)
    batch = replace(toy_batch(4), boxes=boxes)  # the last two samples share an image
    hidden, _ = mask_regions(batch, 0.5)
    assert hidden.images is not None and len(hidden.images) == len(batch) == 4
    assert hidden.image_index.tolist() == [0, 1, 2, 3]


def test_precomputed_features_are_hidden_if_present() -> None:
    there = torch.tensor([[True, True, False]] * 4)
    batch = replace(
        toy_batch(4), boxes=torch.rand(4, 3, 4), features=torch.rand(4, 3, 5), region_mask=there
    )
    hidden, chosen = mask_regions(batch, 1.0)
    assert torch.equal(chosen, there) and hidden.features is not None
    assert (hidden.features[there] == 0).all() and (hidden.features[~there] > 0).any()
    with pytest.raises(ValueError, match=r"batch\.boxes"):
        mask_regions(replace(batch, boxes=None), 0.5)


def test_region_content_reads_the_pixels_of_the_box() -> None:
    image = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    image[0, :, 8:16, 4:12] = (
        torch.arange(64).view(8, 8) + torch.tensor([0, 64, 128])[:, None, None]
    )
    batch = replace(
        toy_batch(2), images=image, image_of=torch.zeros(2, dtype=torch.long),
        geometry=PixelGeometry.identity(1, (32, 32)),
        boxes=torch.tensor([[[4.0, 8.0, 12.0, 16.0]]]).expand(2, 1, 4),
    )  # fmt: skip
    found = region_content(batch)
    assert found.shape == (2, 1, content_size(batch)) == (2, 1, 3 * PATCH**2)
    # a part has 2 x 2 pixels, and its center is where they meet
    patch = image[0, :, 8:16, 4:12].float().unfold(1, 2, 2).unfold(2, 2, 2).mean(dim=(3, 4))
    expected = ((patch - 127.5) / 64).permute(1, 2, 0).flatten()
    torch.testing.assert_close(found[0, 0], expected)


def test_features_are_regressed_at_size_one() -> None:
    batch = replace(toy_batch(4), boxes=torch.rand(4, 3, 4), features=9 * torch.rand(4, 3, 50) + 4)
    found = region_content(batch)
    assert content_size(batch) == 50
    torch.testing.assert_close(found.mean(dim=-1), torch.zeros(4, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.square().mean(dim=-1), torch.ones(4, 3), atol=1e-3, rtol=0)


def test_exchanged_texts_are_those_of_another_image() -> None:
    batch = captions()
    mixed, own = exchange_texts(batch)
    assert batch.tokens is not None and mixed.tokens is not None and mixed.target is None
    assert own.any() and not own.all()
    for row in range(8):
        source = row if own[row] else (row + 1) % 8
        assert torch.equal(mixed.tokens[row], batch.tokens[source])
    same = replace(batch, image_of=torch.zeros(8, dtype=torch.long))
    assert exchange_texts(same, 1.0)[1].all()


def test_words_are_predicted_by_their_embeddings() -> None:
    net = network(captions())
    states = torch.randn(3, 16)
    slow = [
        [float(states[row] @ net.word.weight[at].detach()) for at in (0, 9)] for row in range(3)
    ]
    torch.testing.assert_close(word_logits(net, states)[:, [0, 9]], torch.tensor(slow))


@pytest.mark.parametrize("features", [False, True])
def test_pretraining_has_three_losses_with_their_counts(features: bool) -> None:
    batch = captions()
    if features:
        batch = replace(batch, images=None, features=torch.rand(8, 10, 20))
    net = network(batch)
    heads = PretrainingHeads(16, content_size(batch))
    found = pretraining_losses(net, heads, batch, MASK, 0.3, len(SPECIAL))
    assert set(found) == {"match", "words", "regions"} and int(found["match"].count) == 8
    assert batch.token_mask is not None and batch.tokens is not None
    words = batch.token_mask & (batch.tokens != BEGIN) & (batch.tokens != END)
    assert 0 < int(found["words"].count) < 0.6 * int(words.sum())
    assert 0 < int(found["regions"].count) < 48
    sum(one.mean() for one in found.values()).backward()  # type: ignore[union-attr]
    unused = {name for name, one in net.named_parameters() if one.grad is None}
    # the classifier of fine-tuning is not trained, its pooling layer is
    assert unused == {"answer.decision.weight", "answer.decision.bias"}


def test_masks_do_not_reveal_which_texts_are_exchanged() -> None:
    batch = captions()
    net, seen = network(batch), []
    heads = PretrainingHeads(16, content_size(batch))
    net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    found = pretraining_losses(net, heads, batch, MASK, 0.9, len(SPECIAL))
    assert int(found["match"].count) == 8 and batch.images is not None
    assert (seen[0].tokens == MASK).any(dim=1).all()
    black = (seen[0].images == 0).float().mean(dim=(1, 2, 3))
    assert (black > (batch.images == 0).float().mean(dim=(1, 2, 3))).all()


@pytest.mark.long
def test_pretraining_learns_words_from_regions() -> None:
    batch = captions()
    net = network(batch)
    heads = PretrainingHeads(16, content_size(batch))
    both = [*net.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(both, lr=5e-3)
    costs = []
    for _ in range(120):
        found = pretraining_losses(net, heads, batch, MASK, 0.15, len(SPECIAL))
        total = sum(one.mean() for one in found.values())
        optimizer.zero_grad()
        total.backward()  # type: ignore[union-attr]
        optimizer.step()
        costs.append([float(one.mean().detach()) for one in found.values()])
    first, last = (torch.tensor(some).mean(dim=0) for some in (costs[:10], costs[-10:]))
    assert last[1] < 0.6 * first[1] and last[2] < 0.9 * first[2]
