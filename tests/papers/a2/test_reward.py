"""The reward of self-critical training: every scorer gives the same numbers."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from overt.data.vocabulary import END
from overt.experiments import settings
from overt.metrics.captions import CiderDScorer
from overt.metrics.captions.cider_gpu import MAX_IDS
from overt.papers.a2 import reward as reward_module
from overt.papers.a2.data import A2Data, load_scenes
from overt.papers.a2.reward import (
    CiderReward,
    RewardTimer,
    cpu_scorer,
    default_scorer,
    gpu_scorer,
    graphed_scorer,
)
from overt.papers.catalog import find_recipe
from tests.papers.a2.small import SETS

CPU = torch.device("cpu")


@dataclass(frozen=True)
class DrawnCaptions:
    """Sampled captions."""

    tokens: Tensor
    mask: Tensor


@pytest.fixture(scope="module")
def parts() -> A2Data:
    return load_scenes(settings.apply(find_recipe("a2-scenes"), SETS).data)  # type: ignore[attr-defined]


def draw_captions(texts: list[list[int]], wide: int) -> DrawnCaptions:
    tokens, mask = torch.zeros(len(texts), wide).long(), torch.zeros(len(texts), wide).bool()
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = True
    return DrawnCaptions(tokens, mask)


def make_scorers(parts: A2Data) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    texts = parts.train.texts()
    return {
        "default": default_scorer(parts.train),
        "cpu": cpu_scorer(texts),
        "gpu": gpu_scorer(texts, CPU),
        "graphed": graphed_scorer(gpu_scorer(texts, CPU), capture_by_replay),
    }


def capture_by_replay(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Stand in for CUDA graph capture: a replay runs the work again, into the same tensor."""
    made = work()

    def replay() -> None:
        made.copy_(work())

    return replay, made


@pytest.mark.parametrize("way", ["default", "cpu", "gpu", "graphed"])
def test_each_scorer_equals_cider_d_with_the_end_token_as_a_word(parts: A2Data, way: str) -> None:
    """Groups of captions of any width: one per image, and two per image."""
    texts = parts.train.texts()
    reward = CiderReward(parts.train, RewardTimer(), make_scorers(parts)[way])
    for pictures in ([2, 0], [1, 3], [0, 2]):  # the third call replays the captured graph
        one = [texts[at][1] for at in pictures]
        two = [texts[at][n][k:] for at in pictures for n, k in ((0, 1), (3, 0))]
        alone, drawn = reward(
            [draw_captions(one, 20), draw_captions(two, 25)], parts.train.without_captions(pictures)
        )
        score = CiderDScorer(texts)
        assert alone[:, 0].tolist() == pytest.approx(score(one, pictures).tolist())
        twice = [at for at in pictures for _ in range(2)]
        assert drawn.flatten().tolist() == pytest.approx(score(two, twice).tolist())
        assert drawn.shape == (2, 2) and one[0][-1] == END


def test_reward_time_is_counted(parts: A2Data):
    timer = RewardTimer()
    reward = CiderReward(parts.train, timer)
    reward([draw_captions([parts.train.texts()[0][0]], 20)], parts.train.without_captions([0]))
    assert timer.reward > 0


def test_paused_time_is_not_counted_as_critic_time():
    timer = RewardTimer()
    assert timer.summary() == {}
    timer.step()
    with timer.paused():
        sum(range(10_000))
    timer.step()
    assert 0 <= timer.summary()["critic"] < timer.until - (timer.begun or 0.0)


@pytest.mark.parametrize(
    ("device", "largest", "way"),
    [
        ("cuda", MAX_IDS - 1, "gpu_scorer"),
        ("cuda", MAX_IDS, "cpu_scorer"),
        ("cpu", 9, "cpu_scorer"),
    ],
)
def test_the_default_scorer_is_on_the_gpu_if_its_ids_fit(
    device: str, largest: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data are stubs with a device and a largest token id."""
    for name in ("gpu_scorer", "cpu_scorer"):
        monkeypatch.setattr(reward_module, name, lambda *given, name=name: name)
    tokens = SimpleNamespace(device=torch.device(device), max=lambda: torch.tensor(largest))
    data = SimpleNamespace(tokens=tokens, texts=list)
    assert inspect.unwrap(default_scorer)(data) == way
