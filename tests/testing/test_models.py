"""`check_model` on correct and broken models."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from overt.attention import AttentionMap, grid, words
from overt.nn.output import Output
from overt.testing import CHECKS, PlantedCell, PlantedWord, check_model, models, toy_batch

NAMES = tuple(check.__name__ for check in CHECKS)


class CorrectModel(nn.Module):
    """A small correct model with attention over words and cells; broken models derive from it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.look = nn.Conv2d(3, 6, 8, stride=8)
        self.score = nn.Linear(6, 1)
        self.decision = nn.Linear(6, 3)
        self.drop = nn.Dropout(0.5)

    def encode(self, batch):
        pixels = self.look(batch.images.float() / 255).flatten(2).transpose(1, 2)
        return {
            "words": self.embed(batch.tokens),
            "present": batch.token_mask,
            "cells": pixels[batch.image_index],
        }

    def attend(self, values, keys, present=None):
        scores = self.score(values).transpose(1, 2)[:, None, None]
        mask = None if present is None else present[:, None]
        made = AttentionMap.from_scores(scores, keys, mask=mask)
        return (made.weights[:, 0, 0] @ values)[:, 0], made

    def decide(self, features, mask=None):
        mask = mask or {}
        text, cells = features["words"], features["cells"]
        if "text" in mask:
            text = text * mask["text"][..., None]
        if "image" in mask:
            cells = cells * mask["image"][..., None]
        read, over_words = self.attend(text, words(text.shape[1]), features["present"])
        seen, over_cells = self.attend(cells, grid(4, 4))
        prediction = self.decision(self.drop(torch.tanh(read + seen)))
        return Output(prediction, (over_cells, over_words), {"size": seen.norm(dim=-1)})

    def forward(self, batch):
        return self.decide(self.encode(batch))


def test_correct_model_passes_every_check():
    assert check_model(CorrectModel, toy_batch()) == NAMES
    assert len(NAMES) == len(set(NAMES)) >= 12


@pytest.mark.parametrize("make", [PlantedCell, PlantedWord])
def test_toy_models_pass_check_model(make):
    batch = toy_batch()
    tokens = batch.tokens.clone()
    tokens[:2, 0] = 3  # the planted word is in two texts
    assert check_model(make, replace(batch, tokens=tokens)) == NAMES


def test_check_model_leaves_the_rng_state_unchanged():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    check_model(PlantedCell, toy_batch())
    assert torch.equal(torch.rand(1), expected)


# --- deliberately broken models


class NotAnOutput(CorrectModel):
    def decide(self, features, mask=None):
        return super().decide(features, mask).prediction


class NotFinite(CorrectModel):
    def decide(self, features, mask=None):
        output = super().decide(features, mask)
        return replace(output, prediction=output.prediction / 0)


class RawScores(CorrectModel):
    def decide(self, features, mask=None):
        output = super().decide(features, mask)
        maps = tuple(replace(one, values=one.values + 1) for one in output.attention)
        return replace(output, attention=maps)


class NoRow(CorrectModel):
    """Returns zero rows although keys are visible."""

    def decide(self, features, mask=None):
        output = super().decide(features, mask)
        maps = tuple(
            replace(one, values=torch.full_like(one.values, -math.inf)) for one in output.attention
        )
        return replace(output, attention=maps)


class PlainExtras(CorrectModel):
    def decide(self, features, mask=None):
        return replace(super().decide(features, mask), extras={"nothing": None})


class OtherForward(CorrectModel):
    def forward(self, batch):
        output = super().forward(batch)
        return replace(output, prediction=output.prediction * 1.001)


class AlwaysDrops(CorrectModel):
    def decide(self, features, mask=None):
        output = super().decide(features, mask)
        return replace(output, prediction=nn.functional.dropout(output.prediction, 0.5))


class WritesFeatures(CorrectModel):
    def decide(self, features, mask=None):
        if mask and "image" in mask:
            features["cells"].mul_(mask["image"][..., None])
        return super().decide(features, mask)


class WritesBatch(CorrectModel):
    def encode(self, batch):
        features = super().encode(batch)
        batch.labels.add_(1)
        return features


class SwitchesMode(CorrectModel):
    def forward(self, batch):
        self.eval()
        return super().forward(batch)


class ChangesBuffer(CorrectModel):
    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, batch):
        self.passes += 1
        return super().forward(batch)


class BatchMean(CorrectModel):
    """Behaves as batch norm in training mode."""

    def encode(self, batch):
        features = super().encode(batch)
        cells = features["cells"]
        return {**features, "cells": cells - cells.mean(dim=0, keepdim=True)}


class AddsIndex(CorrectModel):
    """Adds the index in the batch: only batches of several samples differ."""

    def decide(self, features, mask=None):
        output = super().decide(features, mask)
        if len(output.prediction) == 1:
            return output
        place = torch.arange(len(output.prediction))[:, None] * 1e-3
        return replace(output, prediction=output.prediction + place)


class ReadsPadding(CorrectModel):
    def encode(self, batch):
        features = super().encode(batch)
        return {**features, "present": torch.ones_like(features["present"])}


class MaskBlurs(CorrectModel):
    def decide(self, features, mask=None):
        output = super().decide(features, mask)
        noise = 0.1 if mask else 0.0
        return replace(output, prediction=output.prediction + noise)


class IgnoresWords(CorrectModel):
    def decide(self, features, mask=None):
        return super().decide(features, {k: v for k, v in (mask or {}).items() if k != "text"})


class MasksTheBatch(CorrectModel):
    def decide(self, features, mask=None):
        if mask:
            mask = {
                name: one.mean(dim=0, keepdim=True).expand_as(one) for name, one in mask.items()
            }
        return super().decide(features, mask)


class DeadEnd(CorrectModel):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)


class HiddenState(CorrectModel):
    """Has a random projection that is not in the state dict."""

    def __init__(self):
        super().__init__()
        self.secret = [torch.randn(3, 3)]

    def decide(self, features, mask=None):
        output = super().decide(features, mask)
        return replace(output, prediction=output.prediction @ self.secret[0])


class SharedCopy(CorrectModel):
    def __deepcopy__(self, memo):
        other = copy.copy(self)
        return other


BROKEN = {
    NotAnOutput: "output_is_an_output",
    NotFinite: "prediction_is_finite",
    RawScores: "maps_are_valid",
    NoRow: "rows_sum_to_one",
    PlainExtras: "extras_are_tensors",
    OtherForward: "forward_is_decide_of_encode",
    AlwaysDrops: "forward_is_decide_of_encode",
    WritesFeatures: "features_are_reusable",
    WritesBatch: "inputs_are_not_modified",
    SwitchesMode: "model_is_not_modified",
    ChangesBuffer: "model_is_not_modified",
    BatchMean: "samples_are_independent",
    AddsIndex: "samples_are_independent",
    ReadsPadding: "padding_is_not_read",
    MaskBlurs: "mask_of_ones_is_no_mask",
    IgnoresWords: "masks_change_the_answer",
    MasksTheBatch: "masks_stay_in_their_sample",
    DeadEnd: "gradient_reaches_every_parameter",
    HiddenState: "state_dict_is_complete",
    SharedCopy: "copies_are_independent",
}


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_broken_model_fails_by_check_name(make, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(AssertionError, match=BROKEN[make] + ": "):
        check_model(make, toy_batch())


def test_shadowed_checks_find_their_fault():
    """Two checks fail only if an earlier one fails too; run alone they find the same fault."""
    for make, check in (
        (AlwaysDrops, models.eval_is_deterministic),
        (AddsIndex, models.sample_order_is_equivariant),
    ):
        batch, model = toy_batch(), make().eval()
        features = model.encode(batch)
        output = model.decide(features)
        case = models.ModelCase(make, model, batch, features, output, (), 1e-5)
        assert check(case) is not None


def test_unreached_parameters_may_be_listed():
    assert check_model(DeadEnd, toy_batch(), unreached=["spare."]) == NAMES
    with pytest.raises(AssertionError, match=r"'spare.weight', 'spare.bias'"):
        check_model(DeadEnd, toy_batch(), unreached=["other."])
