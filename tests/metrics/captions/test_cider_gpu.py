"""CIDEr-D on the GPU: agrees with pycocoevalcap and with `CiderDScorer` to 1e-9."""

import random

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overt.metrics.captions.cider import CiderDScorer, document_frequencies, words_to_ids
from overt.metrics.captions.cider_gpu import CiderDScorerGPU, pad_and_concatenate
from tests.metrics.captions.examples import flickr8k_captions, random_captions, to_pycocoevalcap

Ids = list[int]


def pad_texts(texts: list[Ids], wide: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts as padded rows and the mask of their words."""
    width = max(map(len, texts)) + wide
    tokens, mask = torch.full((len(texts), width), 1), torch.zeros(len(texts), width).bool()
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text, dtype=torch.long)
        mask[row, : len(text)] = True
    return tokens, mask


def test_scores_agree_with_pycocoevalcap_to_1e_9():
    published = pytest.importorskip("pycocoevalcap.cider.cider", reason="no pycocoevalcap")
    candidates, references = random_captions(300)
    (ours,), theirs = words_to_ids([candidates], references)
    found = CiderDScorerGPU(theirs)(*pad_texts(ours), torch.arange(300))
    _, wanted = published.Cider().compute_score(*to_pycocoevalcap(candidates, references))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=1e-9)


def test_captions_of_flickr8k_agree_with_pycocoevalcap_to_1e_9(data_root):
    published = pytest.importorskip("pycocoevalcap.cider.cider", reason="no pycocoevalcap")
    candidates, references = flickr8k_captions(data_root, 300)
    (ours,), theirs = words_to_ids([candidates], references)
    found = CiderDScorerGPU(theirs)(*pad_texts(ours), torch.arange(300))
    _, wanted = published.Cider().compute_score(*to_pycocoevalcap(candidates, references))
    np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_scores_agree_with_the_cpu_scorer_on_random_texts(seed: int):
    """Empty texts, repeated n-grams, unknown words and frequencies of another corpus."""
    dice = random.Random(seed)

    def text() -> Ids:
        return [dice.randrange(12) for _ in range(dice.randrange(11))]

    references = [[text() for _ in range(1 + dice.randrange(5))] for _ in range(30)]
    images = [dice.randrange(30) for _ in range(120)]
    candidates = [dice.choice(references[at])[: dice.randrange(9)] + text() for at in images]
    candidates[7], candidates[8] = [], [99, 3, 99, 3, 99]
    others = document_frequencies([[text() for _ in range(3)] for _ in range(20)])
    for known in (None, others):
        wanted = CiderDScorer(references, known)(candidates, images)
        found = CiderDScorerGPU(references, known)(*pad_texts(candidates), torch.tensor(images))
        np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=1e-9)


def test_the_largest_ids_and_empty_references_are_exact():
    big = 2**16 - 3
    references = [[[big, 3, big, big, big], []], [[5]], [[]]]
    texts = [[big, 3, big, big, big], [5], [3]]
    found = CiderDScorerGPU(references)(*pad_texts(texts, wide=0), torch.arange(3))
    np.testing.assert_allclose(found.numpy(), CiderDScorer(references)(texts), rtol=0, atol=1e-9)
    assert float(CiderDScorerGPU([[[]]])(*pad_texts([[4]]), torch.tensor([0]))) == 0
    assert float(CiderDScorerGPU([[[4]], [[5]]])(*pad_texts([[]], wide=0), torch.tensor([0]))) == 0


def test_too_large_ids_raise_and_name_the_cpu_scorer():
    with pytest.raises(ValueError, match=r"65533.*CiderDScorer"):
        CiderDScorerGPU([[[2**16 - 2]]])
    with pytest.raises(ValueError, match=r"65533.*CiderDScorer"):
        CiderDScorerGPU([[[1]]], document_frequencies([[[2**16, 1]]]))


def test_scoring_does_not_synchronize_the_device():
    """Meta tensors have no data: reading a value on the host would raise."""
    score = CiderDScorerGPU([[[1, 2, 3]], [[4, 5]]]).to("meta")
    tokens = torch.zeros(3, 6, dtype=torch.long, device="meta")
    found = score(tokens, tokens == 0, torch.zeros(3, dtype=torch.long, device="meta"))
    assert found.is_meta and found.shape == (3,) and len(score) == 2


class KernelCounter(TorchDispatchMode):
    """Count the operations that launch a kernel: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_scoring_launches_at_most_50_kernels():
    """A training step of a small captioner launches about 2000 kernels: 5 % are 100."""
    score = CiderDScorerGPU([[[1, 2, 3]] * 5] * 2).to("meta")
    tokens = torch.zeros(384, 21, dtype=torch.long, device="meta")
    mask, images = torch.ones_like(tokens, dtype=torch.bool), tokens[:, 0]
    with KernelCounter() as counting:
        score(tokens, mask, images)
    assert counting.count <= 50


def test_batches_of_different_widths_are_padded_and_concatenated():
    joined = pad_and_concatenate([torch.ones(1, 2).bool(), torch.ones(2, 3).bool()])
    assert joined.tolist() == [[True, True, False], [True] * 3, [True] * 3]


def test_one_image_gives_nan():
    """As with `CiderDScorer`: with one image all words are equally rare."""
    tokens = torch.tensor([[1, 2, 3]])
    found = CiderDScorerGPU([[[1, 2, 3]]])(
        tokens, torch.ones_like(tokens, dtype=torch.bool), torch.tensor([0])
    )
    assert found.isnan().all()
