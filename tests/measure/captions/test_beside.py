"""CIDEr-D by comparing agrees with the published one and with that by searching, to 1e-9."""

import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overt.measure.captions.beside import Beside, in_one
from overt.measure.captions.cider import Consensus, document_frequencies, numbered
from tests.measure.captions.examples import as_published, many, of_photos

Ids = list[int]


def as_tensors(texts: list[Ids], wide: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts as rows, with something that is no text after them."""
    width = max(map(len, texts)) + wide
    tokens, mask = torch.full((len(texts), width), 1), torch.zeros(len(texts), width).bool()
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text, dtype=torch.long)
        mask[row, : len(text)] = True
    return tokens, mask


def test_it_agrees_with_pycocoevalcap_to_1e_9():
    published = pytest.importorskip("pycocoevalcap.cider.cider", reason="no pycocoevalcap")
    candidates, references = many(300)
    (ours,), theirs = numbered([candidates], references)
    found = Beside(theirs)(*as_tensors(ours), torch.arange(300))
    _, wanted = published.Cider().compute_score(*as_published(candidates, references))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=1e-9)


def test_captions_of_flickr8k_agree_with_pycocoevalcap_to_1e_9(data_root):
    published = pytest.importorskip("pycocoevalcap.cider.cider", reason="no pycocoevalcap")
    candidates, references = of_photos(data_root, 300)
    (ours,), theirs = numbered([candidates], references)
    found = Beside(theirs)(*as_tensors(ours), torch.arange(300))
    _, wanted = published.Cider().compute_score(*as_published(candidates, references))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_it_agrees_with_searching_on_anything(seed: int):
    """Empty texts, texts that repeat themselves, words nobody ever said, frequencies of others."""
    dice = random.Random(seed)

    def text() -> Ids:
        return [dice.randrange(12) for _ in range(dice.randrange(11))]

    references = [[text() for _ in range(1 + dice.randrange(5))] for _ in range(30)]
    images = [dice.randrange(30) for _ in range(120)]
    candidates = [dice.choice(references[at])[: dice.randrange(9)] + text() for at in images]
    candidates[7], candidates[8] = [], [99, 3, 99, 3, 99]
    others = document_frequencies([[text() for _ in range(3)] for _ in range(20)])
    for known in (None, others):
        wanted = Consensus(references, known)(candidates, images)
        found = Beside(references, known)(*as_tensors(candidates), torch.tensor(images))
        np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=1e-9)


def test_the_largest_ids_and_references_without_words_are_exact():
    big = 2**16 - 3
    references = [[[big, 3, big, big, big], []], [[5]], [[]]]
    texts = [[big, 3, big, big, big], [5], [3]]
    found = Beside(references)(*as_tensors(texts, wide=0), torch.arange(3))
    np.testing.assert_allclose(found.numpy(), Consensus(references)(texts), rtol=0, atol=1e-9)
    assert float(Beside([[[]]])(*as_tensors([[4]]), torch.tensor([0]))) == 0
    assert float(Beside([[[4]]])(*as_tensors([[]], wide=0), torch.tensor([0]))) == 0


def test_ids_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="ids from 0 to 65533: use Consensus"):
        Beside([[[2**16 - 2]]])
    with pytest.raises(ValueError, match="ids from 0 to 65533: use Consensus"):
        Beside([[[1]]], document_frequencies([[[2**16, 1]]]))


def test_nothing_in_it_waits_for_a_device():
    """Tensors without data know no answer: whatever asked for one would raise."""
    score = Beside([[[1, 2, 3]], [[4, 5]]]).to("meta")
    tokens = torch.zeros(3, 6, dtype=torch.long, device="meta")
    found = score(tokens, tokens == 0, torch.zeros(3, dtype=torch.long, device="meta"))
    assert found.is_meta and found.shape == (3,) and len(score) == 2


class Counting(TorchDispatchMode):
    """Counts what a card would be given to do: everything but views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_it_is_few_kernels():
    """A small captioner's step is some two thousand of them: 5 % are a hundred."""
    score = Beside([[[1, 2, 3]] * 5] * 2).to("meta")
    tokens = torch.zeros(384, 21, dtype=torch.long, device="meta")
    mask, images = torch.ones_like(tokens, dtype=torch.bool), tokens[:, 0]
    with Counting() as counting:
        score(tokens, mask, images)
    assert counting.count <= 50


def test_lots_of_any_width_stand_under_each_other():
    joined = in_one([torch.ones(1, 2).bool(), torch.ones(2, 3).bool()])
    assert joined.tolist() == [[True, True, False], [True] * 3, [True] * 3]
