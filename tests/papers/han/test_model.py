"""Networks built from the table rows: their types, and a forward pass of each."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from overt import nn
from overt.data import SortOfClevr
from overt.errors import UserError
from overt.experiments import settings
from overt.nn.hard_attention.aggregate import NonLocalAggregation, RelationAggregation
from overt.nn.hard_attention.selection import Selection, keep_above_uniform, keep_top
from overt.nn.vqa.question_encoders import ReversedLSTMQuestionEncoder
from overt.papers.han import config as han
from overt.papers.han.config import HanModel, HanSelect
from overt.papers.han.data import train_cells
from overt.papers.han.model import build_model, cell_selection
from overt.papers.han.networks import relation_net, vqa_cp

PHOTOS = ("daquar", "vqacp2")


@pytest.mark.long
@pytest.mark.parametrize(
    "data", ["scenes", "crowded", "easyvqa", "daquar", "vqacp2", "sortclevr", "clevr"]
)
def test_each_row_builds_a_network_that_predicts(data: str) -> None:
    make = {"vqacp2": han.han_vqacp}.get(data) or getattr(han, f"han_{data}")
    for label, row in han.table_rows(data).items():
        recipe = settings.apply(make(), [*han.model_changes(row), "model.width=0.05"])
        cells = train_cells(recipe.model, 75) or (5, 5)  # the grid of an oracle is that of its CNN
        images = SortOfClevr("test", count=1, cells=cells)
        net = build_model(recipe.model, images.reader.size, 4, (5, (8, 8)))
        batch = images.batch(range(3))
        if data in PHOTOS:
            features = torch.randn(3, 64, 5)
            batch = replace(batch, features=features, boxes=None, region_mask=None)
        output = net(batch)
        assert output.prediction.shape == (3, 4), label
        output.prediction.sum().backward()


def test_built_networks_equal_those_of_the_builder_functions() -> None:
    """Recipe settings give the same configs as the functions with the defaults of the paper."""
    photos = build_model(han.han_vqacp().model, 50, 1000, (2048, (10, 10)))
    assert photos.config() == vqa_cp(50).config()
    rows = han.table_rows("vqacp2")

    def find_row_model(label: str) -> HanModel:
        return settings.apply(han.han_vqacp(), han.model_changes(rows[label])).model

    pairs = build_model(find_row_model("han-pairwise-16"), 50, 1000, (2048, (10, 10)))
    top = partial(keep_top, count=16)
    assert pairs.config() == vqa_cp(50, 1000, top, NonLocalAggregation(2048)).config()
    depth = build_model(find_row_model("han-sum-16-depth0"), 50, 1000, (2048, (10, 10)))
    assert depth.config() == vqa_cp(50, 1000, top, depth=0).config()
    clevr = build_model(han.han_clevr().model, 50, 28)
    assert clevr.config() == relation_net(50, 28, top).config()
    plain = settings.apply(han.han_clevr(), han.model_changes(han.table_rows("clevr")["rn"])).model
    wanted = relation_net(50, 28, nn.keep_all, joint=None)
    assert build_model(plain, 50, 28).config() == wanted.config()


def test_each_selection_setting_builds_its_selection_rule() -> None:
    found = {select: cell_selection(HanModel(select, cells=3, share=0.5)) for select in HanSelect}
    assert found[HanSelect.ABOVE_UNIFORM] == Selection(keep_above_uniform)
    warm = cell_selection(HanModel(HanSelect.ABOVE_UNIFORM, temperature=4.0))
    assert warm.config()["rule"] == {"keep": "above_uniform", "temperature": 4.0}
    assert found[HanSelect.STRAIGHT_THROUGH].config()["weigh"] == {"weigh": "straight_through"}
    assert found[HanSelect.SOFT_TO_HARD].config()["weigh"] == {"weigh": "softened"}
    assert found[HanSelect.GUMBEL].config()["training"]["keep"] == "gumbel"
    assert found[HanSelect.RANDOM].config()["training"] == {"keep": "random", "count": 3}
    assert found[HanSelect.SHARE].config()["rule"] == {"keep": "share", "share": 0.5}


def test_blind_selection_scores_the_image_only() -> None:
    recipe = settings.apply(han.han_scenes(), ["model.select=blind", "model.width=0.1"])
    assert build_model(recipe.model, 20, 4).config()["attend"]["score"] == "unasked"
    plain = settings.apply(han.han_sortclevr(), ["model.depth=none", "model.width=0.1"])
    assert build_model(plain.model, 20, 4).config()["attend"]["score"] == "unplaced"


def test_the_cached_encoder_needs_cached_cells() -> None:
    with pytest.raises(UserError, match=r"model\.eye=cached"):
        build_model(HanModel(), 5, 5)


def test_layers_are_initialized_as_the_recipe_sets() -> None:
    recipe = settings.apply(han.han_sortclevr(), ["model.width=0.1", "model.init=fan-in"])
    large = build_model(recipe.model, 30, 10).state_dict()
    plain = build_model(replace(recipe.model, init=han.HanInit.TORCH), 30, 10).state_dict()
    assert large.keys() == plain.keys()
    assert not large["decision.0.bias"].any() and plain["decision.0.bias"].any()


def count_parameters(net: torch.nn.Module) -> int:
    return sum(value.numel() for value in net.parameters())


def test_the_relation_network_of_santoro_has_the_parameters_of_its_layers() -> None:
    """Weights counted by hand: CNN, g of 4 x 2000, f of 2000, 1000, 500 and 100."""
    words = SortOfClevr("test", count=1).reader.size
    net = build_model(han.han_rn_santoro().model, words, 10)
    maps = (3, 32, 64, 128, 256)
    cnn = sum(9 * one * two + 2 * two for one, two in pairwise(maps))  # and batch norm
    cell, question = 256 + 2, net.reader.width
    pairs = (2 * cell + question) * 2000 + 2000 + 3 * (2000 * 2000 + 2000)
    head = sum(one * two + two for one, two in pairwise((2000, 2000, 1000, 500, 100, 10)))
    assert question == words
    assert count_parameters(net) == cnn + pairs + head
    assert (cnn, head) == (388_896, 6_554_610) and pairs == 13_040_000 + 2000 * words


def test_the_relation_network_of_santoro_takes_a_training_step() -> None:
    torch.manual_seed(0)
    model = settings.apply(han.han_rn_santoro(), ["model.width=0.02"]).model
    images = SortOfClevr("train", count=2)
    net = build_model(model, images.reader.size, 10)
    batch = images.batch(range(20))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=0)
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(net(batch).prediction, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(value.grad is not None for value in net.parameters())
    assert losses[-1] < losses[0]
    linear = [one.out_features for one in net.modules() if isinstance(one, torch.nn.Linear)]
    assert linear == [40, 40, 40, 40, 40, 20, 10, 4, 10]  # 2000 ... 100 at a fiftieth


def test_settings_of_earlier_runs_build_the_same_network() -> None:
    """24 maps and 256 units per pair are settings now; initial weights are unchanged."""
    torch.manual_seed(0)
    ours = build_model(settings.apply(han.han_clevr(), ["model.width=0.25"]).model, 30, 28)
    torch.manual_seed(0)
    top = partial(keep_top, count=16)
    pairs = RelationAggregation(32, 32, 64)
    reader = ReversedLSTMQuestionEncoder(30, word=8, state=32)
    theirs = relation_net(30, 28, top, 32, pairs, reader, maps=6, hidden=64)
    # Built in another order, so from other random numbers: the shapes are compared.
    assert {name: one.shape for name, one in ours.state_dict().items()} == {
        name: one.shape for name, one in theirs.state_dict().items()
    }
