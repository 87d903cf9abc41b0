"""Probability-weighted means of maps and masks, compared with a slow reference."""

import pytest
import torch

from overt.targets.surrogate.masked_inference import masked_batch
from overt.targets.surrogate.masks import GridMasks, RemoveWords
from overt.targets.surrogate.search import exhaustive_search
from overt.targets.surrogate.weighted_mean import weighted_maps, weighted_masks
from tests.targets.surrogate.toys import Planted, Toys

BATCH = Toys().batch(range(6))


@pytest.mark.parametrize(
    "masks", [GridMasks(30, 1), RemoveWords()], ids=lambda masks: type(masks).__name__
)
@pytest.mark.parametrize("chunk", [5, 500])
def test_weighted_means_agree_with_the_slow_reference(masks, chunk):
    model = Planted().eval()
    with masked_batch(model, BATCH, [masks.name]) as look:
        candidates = masks(look)
        over_maps, over_masks = (
            find(look, masks, chunk) for find in (weighted_maps, weighted_masks)
        )
        best = exhaustive_search(look, masks)
    for row in range(len(BATCH)):
        maps, tried, weights = [], [], []
        for number in range(int(candidates.counts[row])):
            mask = candidates.take(torch.tensor([row]), torch.tensor([number]))
            features = model.encode(BATCH.select(torch.tensor([row])))
            width = features.words.shape[1] if masks.name == "text" else mask.shape[1]
            output = model.decide(features, {masks.name: mask[:, :width]})
            weights.append(output.prediction.softmax(dim=-1)[0, 1].detach())
            found = output.attention_to(masks.name).weights.mean(dim=(1, 2))[0, 0].detach()
            maps.append(torch.nn.functional.pad(found, (0, mask.shape[1] - width)))
            tried.append(mask[0])
        share = torch.stack(weights) / sum(weights)
        mean = (share[:, None] * torch.stack(maps)).sum(dim=0)
        torch.testing.assert_close(over_maps.maps[masks.name].weights[row, 0, 0, 0], mean)
        mean = (share[:, None] * torch.stack(tried)).sum(dim=0)
        torch.testing.assert_close(over_masks.masks[masks.name][row], mean)
        mean = mean * look.positions[masks.name].present[row]
        torch.testing.assert_close(
            over_masks.maps[masks.name].weights[row, 0, 0, 0], mean / mean.sum()
        )
    for found in (over_maps, over_masks):
        torch.testing.assert_close(found.best, best.best)
        assert torch.equal(found.probes, best.probes)
        found.maps[masks.name].check()
