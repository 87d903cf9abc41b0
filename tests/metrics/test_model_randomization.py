"""Model randomization: similarity of maps after randomizing layers; the model is restored."""

import copy

import pytest
import torch
from torch import nn

from overt.attention import AttentionMap, words
from overt.metrics import randomization_similarity, sim
from overt.metrics.model_randomization import (
    cascading_randomization,
    independent_randomization,
    layers_with_parameters,
    reinitialize,
    shuffle_parameters,
)


class WordScorer(nn.Module):
    """Score words by two layers; `answer` does not contribute to the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0, 1.0]))
        self.inner = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.outer = nn.Linear(12, 1)
        self.answer = nn.Linear(6, 2)

    def look(self, x: torch.Tensor) -> AttentionMap:
        hidden = self.norm(self.inner(x * self.scale[0]).flatten(0, 1)).relu()
        scores = self.outer(hidden).reshape(len(x), 1, 1, 1, -1)
        return AttentionMap.from_scores(3 * scores, words(x.shape[1]))


@pytest.fixture
def case(generator):
    torch.manual_seed(1)
    model = WordScorer().train()
    x = torch.randn(40, 10, 6, generator=generator)
    return model, lambda: model.look(x)


def test_layers_are_ordered_from_output_to_input(case):
    model, _ = case
    assert layers_with_parameters(model) == ("answer", "outer", "norm", "inner", "")


@pytest.mark.parametrize("forget", [reinitialize, shuffle_parameters])
def test_the_model_and_random_state_are_restored(case, forget, generator):
    model, look = case
    before = copy.deepcopy(model.state_dict())
    model.norm.eval()
    modes = [part.training for part in model.modules()]
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    for check in (cascading_randomization, independent_randomization):
        check(model, look, generator, randomize=forget)
    assert torch.equal(torch.rand(3), expected), "the global random state is unchanged"
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert [part.training for part in model.modules()] == modes
    assert all(value.requires_grad and value.grad is None for value in model.parameters())

    def fails() -> AttentionMap:
        model.outer.weight.data.fill_(3.0)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        cascading_randomization(model, fails, generator)
    assert torch.equal(model.outer.weight, before["outer.weight"])


def test_only_layers_that_contribute_change_the_map(case, generator):
    model, look = case
    found = independent_randomization(model, look, generator)
    alike = dict(zip(found.layers, found.similarity.mean(dim=1).tolist(), strict=True))
    assert found.similarity.shape == (5, 40)
    assert alike["answer"] == pytest.approx(1, abs=1e-6)
    assert abs(alike["outer"]) < 0.9 and abs(alike["inner"]) < 0.9
    down = cascading_randomization(model, look, generator)
    assert float(down.similarity[0].mean()) == pytest.approx(1, abs=1e-6)
    assert float(down.similarity[-1].mean()) < 0.7


def test_a_map_of_the_input_alone_has_similarity_one(case, generator):
    """An edge detector looks like an explanation until the model is randomized."""
    model, _ = case
    seen = AttentionMap.from_cells(torch.rand(8, 10, generator=generator), words(10))
    torch.testing.assert_close(
        randomization_similarity(model, lambda: seen, generator), torch.ones(8)
    )


def test_the_same_seed_gives_the_same_randomization(case):
    model, look = case
    for forget in (reinitialize, shuffle_parameters):
        one, two, other = (
            cascading_randomization(
                model, look, torch.Generator().manual_seed(s), randomize=forget
            ).similarity
            for s in (0, 0, 1)
        )
        assert torch.equal(one, two) and not torch.equal(one, other)


def test_shuffle_parameters_keeps_the_values(generator):
    layer = nn.Linear(4, 3)
    before = layer.weight.detach().clone()
    shuffle_parameters(layer, generator)
    assert not torch.equal(layer.weight, before)
    assert torch.equal(layer.weight.flatten().sort().values, before.flatten().sort().values)


def test_layers_and_the_comparison_can_be_chosen(case, generator):
    model, look = case
    found = cascading_randomization(model, look, generator, layers=["outer", "inner"], compare=sim)
    assert found.layers == ("outer", "inner") and (found.similarity >= 0).all()
    block = nn.ModuleDict({"model": model})
    whole = cascading_randomization(block, look, generator, layers=["model"])
    assert float(whole.similarity.mean()) < 0.7  # a block is randomized with all its submodules
    with pytest.raises(ValueError, match=r"layers \['head'\]"):
        cascading_randomization(model, look, generator, layers=["head"])
