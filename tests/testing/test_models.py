import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from overt.attention import AttentionMap, grid, words
from overt.models.output import Output
from overt.testing import CHECKS, PlantedCell, PlantedWord, check_model, models, toy_batch

NAMES = tuple(check.__name__ for check in CHECKS)


class Reader(nn.Module):
    """A small honest model with attention over words and cells, to be broken in many ways."""

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


def test_an_honest_model_passes_every_check():
    assert check_model(Reader, toy_batch()) == NAMES
    assert len(NAMES) == len(set(NAMES)) >= 12


@pytest.mark.parametrize("make", [PlantedCell, PlantedWord])
def test_the_toys_pass_their_own_contract(make):
    batch = toy_batch()
    tokens = batch.tokens.clone()
    tokens[:2, 0] = 3  # the planted word stands in two texts
    assert check_model(make, replace(batch, tokens=tokens)) == NAMES


def test_the_check_leaves_random_numbers_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    check_model(PlantedCell, toy_batch())
    assert torch.equal(torch.rand(1), expected)


# --- deliberately broken models


class NotAnOutput(Reader):
    def decide(self, features, mask=None):
        return super().decide(features, mask).prediction


class NotFinite(Reader):
    def decide(self, features, mask=None):
        output = super().decide(features, mask)
        return replace(output, prediction=output.prediction / 0)


class RawScores(Reader):
    def decide(self, features, mask=None):
        output = super().decide(features, mask)
        maps = tuple(replace(one, values=one.values + 1) for one in output.attention)
        return replace(output, attention=maps)


class NoRow(Reader):
    """A map that gives nothing although there is something to see."""

    def decide(self, features, mask=None):
        output = super().decide(features, mask)
        maps = tuple(
            replace(one, values=torch.full_like(one.values, -math.inf)) for one in output.attention
        )
        return replace(output, attention=maps)


class PlainExtras(Reader):
    def decide(self, features, mask=None):
        return replace(super().decide(features, mask), extras={"nothing": None})


class OtherForward(Reader):
    def forward(self, batch):
        output = super().forward(batch)
        return replace(output, prediction=output.prediction * 1.001)


class AlwaysDrops(Reader):
    def decide(self, features, mask=None):
        output = super().decide(features, mask)
        return replace(output, prediction=nn.functional.dropout(output.prediction, 0.5))


class WritesFeatures(Reader):
    def decide(self, features, mask=None):
        if mask and "image" in mask:
            features["cells"].mul_(mask["image"][..., None])
        return super().decide(features, mask)


class WritesBatch(Reader):
    def encode(self, batch):
        features = super().encode(batch)
        batch.labels.add_(1)
        return features


class SwitchesMode(Reader):
    def forward(self, batch):
        self.eval()
        return super().forward(batch)


class Counts(Reader):
    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, batch):
        self.passes += 1
        return super().forward(batch)


class BatchMean(Reader):
    """What batch norm that was left in train mode does."""

    def encode(self, batch):
        features = super().encode(batch)
        cells = features["cells"]
        return {**features, "cells": cells - cells.mean(dim=0, keepdim=True)}


class Numbered(Reader):
    """Alone every sample is the first, and the first is left alone: only the order tells."""

    def decide(self, features, mask=None):
        output = super().decide(features, mask)
        if len(output.prediction) == 1:
            return output
        place = torch.arange(len(output.prediction))[:, None] * 1e-3
        return replace(output, prediction=output.prediction + place)


class ReadsPadding(Reader):
    def encode(self, batch):
        features = super().encode(batch)
        return {**features, "present": torch.ones_like(features["present"])}


class MaskBlurs(Reader):
    def decide(self, features, mask=None):
        output = super().decide(features, mask)
        noise = 0.1 if mask else 0.0
        return replace(output, prediction=output.prediction + noise)


class IgnoresWords(Reader):
    def decide(self, features, mask=None):
        return super().decide(features, {k: v for k, v in (mask or {}).items() if k != "text"})


class MasksTheBatch(Reader):
    def decide(self, features, mask=None):
        if mask:
            mask = {
                name: one.mean(dim=0, keepdim=True).expand_as(one) for name, one in mask.items()
            }
        return super().decide(features, mask)


class DeadEnd(Reader):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)


class HiddenState(Reader):
    """A random projection that no state_dict holds."""

    def __init__(self):
        super().__init__()
        self.secret = [torch.randn(3, 3)]

    def decide(self, features, mask=None):
        output = super().decide(features, mask)
        return replace(output, prediction=output.prediction @ self.secret[0])


class SharedCopy(Reader):
    def __deepcopy__(self, memo):
        other = copy.copy(self)
        return other


BROKEN = {
    NotAnOutput: "output_is_an_output",
    NotFinite: "prediction_is_finite",
    RawScores: "maps_keep_their_promise",
    NoRow: "rows_sum_to_one",
    PlainExtras: "extras_are_tensors",
    OtherForward: "forward_is_decide_of_encode",
    AlwaysDrops: "forward_is_decide_of_encode",
    WritesFeatures: "features_can_be_used_again",
    WritesBatch: "inputs_are_left_alone",
    SwitchesMode: "model_is_left_as_found",
    Counts: "model_is_left_as_found",
    BatchMean: "samples_stand_alone",
    Numbered: "samples_stand_alone",
    ReadsPadding: "padding_is_not_read",
    MaskBlurs: "mask_of_ones_is_no_mask",
    IgnoresWords: "masks_change_the_answer",
    MasksTheBatch: "masks_stay_in_their_sample",
    DeadEnd: "gradient_reaches_every_parameter",
    HiddenState: "state_dict_is_the_whole_state",
    SharedCopy: "copies_are_independent",
}


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__)
def test_a_broken_model_fails_by_name(make, monkeypatch):
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(AssertionError, match=BROKEN[make] + ": "):
        check_model(make, toy_batch())


def test_checks_that_others_shadow_still_see():
    """Two checks fail only where an earlier one does too; alone they find the same fault."""
    for make, check in (
        (AlwaysDrops, models.eval_is_deterministic),
        (Numbered, models.order_does_not_matter),
    ):
        batch, model = toy_batch(), make().eval()
        features = model.encode(batch)
        output = model.decide(features)
        case = models.Case(make, model, batch, features, output, (), 1e-5)
        assert check(case) is not None


def test_exceptions_to_the_gradient_are_named():
    assert check_model(DeadEnd, toy_batch(), unreached=["spare."]) == NAMES
    with pytest.raises(
        AssertionError, match=r"no gradient reaches \['spare.weight', 'spare.bias'\]"
    ):
        check_model(DeadEnd, toy_batch(), unreached=["other."])
