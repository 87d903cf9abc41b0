"""Captions that are written from a recording are those that are written without one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from overt.errors import BadInput
from overt.models.captioning import captioner, decoding
from overt.models.captioning.captioner import Memory
from overt.models.captioning.decoding import Rules, Texts, beams, greedy, sample
from overt.recipes import find, settings
from overt.recipes.a2 import recipe as a2
from overt.recipes.a2.building import encoded
from overt.recipes.a2.data import Parts, scenes
from overt.recipes.a2.networks import network
from overt.recipes.a2.recipe import Baseline, Critic, Written
from overt.recipes.a2.writing import drawing, recorded, usual
from tests.recipes.a2.small import SETS, without_numbers

RULES = Rules(longest=6)


@pytest.fixture(scope="module")
def parts() -> Parts:
    return scenes(settings.apply(find("a2-scenes"), SETS).data)  # type: ignore[arg-type]


def net(parts: Parts, label: str = "gate") -> Any:
    recipe: Any = settings.apply(find("a2-scenes"), [*SETS, *a2.rows()[label]])
    torch.manual_seed(0)
    return network(recipe.model, recipe.align, parts.words.size, parts.eye).eval()


def memory(model: Any, parts: Parts, *pictures: int) -> Memory:
    with torch.no_grad():
        return encoded(model, parts.train.pictures(list(pictures)))


def same(ours: Texts, theirs: Texts) -> None:
    for name in ("tokens", "mask", "log_probabilities"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))


def test_the_greedy_caption_is_that_of_the_decoder(parts: Parts):
    model = net(parts)
    pictures = parts.train.pictures([0, 2, 1])
    with torch.no_grad():
        (ours,) = usual(model, RULES)(memory(model, parts, 0, 2, 1))
        same(ours, greedy(model, pictures, RULES))


def test_what_is_drawn_is_what_is_sampled(parts: Parts):
    model, critic = net(parts), replace(Critic(), draws=3, baseline=Baseline.OTHERS)
    pictures = parts.train.pictures([0, 2])
    with torch.no_grad():
        torch.manual_seed(3)
        (ours,) = drawing(model, critic, RULES)(memory(model, parts, 0, 2))
        torch.manual_seed(3)
        same(ours, sample(model, pictures, 3, rules=RULES))


def test_a_greedy_baseline_stands_before_what_is_drawn(parts: Parts):
    model, critic = net(parts), replace(Critic(), draws=3)
    with torch.no_grad():
        alone, drawn = drawing(model, critic, RULES)(memory(model, parts, 0, 2))
        same(alone, greedy(model, parts.train.pictures([0, 2]), RULES))
    assert len(drawn) == 6


@pytest.mark.parametrize("baseline", list(Baseline))
def test_what_is_rewarded_may_be_beams(parts: Parts, baseline: Baseline):
    model, pictures = net(parts), parts.train.pictures([0, 2])
    critic = replace(Critic(), draws=3, baseline=baseline, written=Written.BEAMS)
    with torch.no_grad():
        *alone, ours = drawing(model, critic, RULES)(memory(model, parts, 0, 2))
        same(ours, beams(model, pictures, 3, RULES))
        assert len(alone) == (baseline is Baseline.GREEDY)
        for one in alone:
            same(one, greedy(model, pictures, RULES))


class Tape:
    """Records by remembering the work: a replay does it again, into the same tensors."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(
        self, work: Callable[[], tuple[Texts, ...]]
    ) -> tuple[Callable[[], None], tuple[Texts, ...]]:
        self.recorded += 1
        made = work()

        def replay() -> None:
            for ours, theirs in zip(made, work(), strict=True):
                for name in ("tokens", "mask", "log_probabilities"):
                    getattr(ours, name).copy_(getattr(theirs, name))

        return replay, made


@pytest.mark.parametrize("label", ["none", "gate"])
def test_a_replay_writes_about_the_pictures_it_is_given(
    parts: Parts, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One recording a shape: other pictures and other weights are written about anew."""
    monkeypatch.setattr(decoding, "_over", lambda *_: False)  # as on a card that records
    model, tape = net(parts, label), Tape()
    write, plain = recorded(usual(model, RULES), tape), usual(model, RULES)
    for number, pictures in enumerate([(0, 1), (2, 3), (4, 5), (6,), (7,)]):
        if number == 2:
            with torch.no_grad():
                model.get_parameter([*dict(model.named_parameters())][-1]).mul_(-1)
        given = memory(model, parts, *pictures)
        with torch.no_grad():
            (ours,), (theirs,) = write(given), plain(given)
        same(ours, theirs)
        assert ours.attention == () and ours.tokens.shape[1] == RULES.longest
    assert tape.recorded == 2


def test_what_cannot_be_recorded_ends_with_a_sentence(parts: Parts) -> None:
    def refuse(work: Callable[[], tuple[Texts, ...]]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model = net(parts, "none")
    write, given = recorded(usual(model, RULES), refuse), memory(model, parts, 0)
    write(given)
    with pytest.raises(BadInput, match=r"train.graph=false \(operation not .* capturing\)"):
        write(given)


@pytest.mark.parametrize("label", list(a2.rows()))
def test_no_token_waits_for_the_device(
    parts: Parts, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors without numbers, every look at one would raise."""
    without_numbers(monkeypatch)
    for place, name in ((decoding, "_over"), (decoding, "_ended"), (captioner, "_same")):
        monkeypatch.setattr(place, name, lambda *_: False)
    model = net(parts, label).to("meta")
    best = replace(Critic(), baseline=Baseline.ALL, written=Written.BEAMS)
    ways = [usual(model, Rules(2)), *(drawing(model, one, Rules(2)) for one in (Critic(), best))]
    with torch.no_grad():
        given = encoded(model, parts.train.batch([0, 1]).to("meta"), each=5)
        for write in ways:
            assert all(one.tokens.is_meta for one in write(given))
