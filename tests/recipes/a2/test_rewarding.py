"""The reward of self-critical training: the same numbers however they are made."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from overt.data.vocabulary import END
from overt.measure.captions import Consensus
from overt.measure.captions.beside import MOST
from overt.recipes import find, settings
from overt.recipes.a2 import rewarding
from overt.recipes.a2.data import Parts, scenes
from overt.recipes.a2.rewarding import (
    Clock,
    Reward,
    by_comparing,
    by_searching,
    recorded_judge,
    usual_judge,
)
from tests.recipes.a2.small import SETS

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Said:
    """Captions that somebody drew."""

    tokens: Tensor
    mask: Tensor


@pytest.fixture(scope="module")
def parts() -> Parts:
    return scenes(settings.apply(find("a2-scenes"), SETS).data)  # type: ignore[attr-defined]


def said(texts: list[list[int]], wide: int) -> Said:
    tokens, mask = torch.zeros(len(texts), wide).long(), torch.zeros(len(texts), wide).bool()
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = True
    return Said(tokens, mask)


def ways(parts: Parts) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    texts = parts.train.texts()
    return {
        "usual": usual_judge(parts.train),
        "searching": by_searching(texts),
        "comparing": by_comparing(texts, CPU),
        "recorded": recorded_judge(by_comparing(texts, CPU), again),
    }


def again(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Records by remembering the work: a replay does it again, into the same tensor."""
    made = work()

    def replay() -> None:
        made.copy_(work())

    return replay, made


@pytest.mark.parametrize("way", ["usual", "searching", "comparing", "recorded"])
def test_it_is_cider_d_with_the_end_as_a_word(parts: Parts, way: str) -> None:
    """Lots of captions, of any width: one a picture, and two."""
    texts = parts.train.texts()
    reward = Reward(parts.train, Clock(), ways(parts)[way])
    for pictures in ([2, 0], [1, 3], [0, 2]):  # what is recorded is replayed in the third
        one = [texts[at][1] for at in pictures]
        two = [texts[at][n][k:] for at in pictures for n, k in ((0, 1), (3, 0))]
        alone, drawn = reward([said(one, 20), said(two, 25)], parts.train.pictures(pictures))
        score = Consensus(texts)
        assert alone[:, 0].tolist() == pytest.approx(score(one, pictures).tolist())
        twice = [at for at in pictures for _ in range(2)]
        assert drawn.flatten().tolist() == pytest.approx(score(two, twice).tolist())
        assert drawn.shape == (2, 2) and one[0][-1] == END


def test_its_seconds_are_counted(parts: Parts):
    clock = Clock()
    reward = Reward(parts.train, clock)
    reward([said([parts.train.texts()[0][0]], 20)], parts.train.pictures([0]))
    assert clock.reward > 0


def test_time_that_validation_takes_is_not_the_critics():
    clock = Clock()
    assert clock.marks() == {}
    clock.step()
    with clock.stopped():
        sum(range(10_000))
    clock.step()
    assert 0 <= clock.marks()["critic"] < clock.until - (clock.begun or 0.0)


@pytest.mark.parametrize(
    ("device", "largest", "way"),
    [("cuda", MOST - 1, "comparing"), ("cuda", MOST, "searching"), ("cpu", 9, "searching")],
)
def test_the_usual_judge_compares_on_a_card_where_its_ids_fit(
    device: str, largest: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On data that only says where it is and how large its ids are."""
    for name in ("by_comparing", "by_searching"):
        monkeypatch.setattr(rewarding, name, lambda *given, name=name: name)
    tokens = SimpleNamespace(device=torch.device(device), max=lambda: torch.tensor(largest))
    data = SimpleNamespace(tokens=tokens, texts=list)
    assert inspect.unwrap(usual_judge)(data) == f"by_{way}"
