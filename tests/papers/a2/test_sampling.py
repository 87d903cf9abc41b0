"""Captions from a CUDA graph equal those generated eagerly."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from overt.errors import UserError
from overt.experiments import settings
from overt.nn.captioning import captioner, decoding
from overt.nn.captioning.captioner import Memory
from overt.nn.captioning.decoding import (
    DecodingRules,
    GeneratedTexts,
    beam_search_all,
    greedy,
    sample,
)
from overt.papers.a2 import config as a2
from overt.papers.a2.config import A2Baseline, A2Critic, A2Sampling
from overt.papers.a2.data import A2Data, load_scenes
from overt.papers.a2.model import build_captioner
from overt.papers.a2.sampling import graphed_sampler, greedy_sampler, training_sampler
from overt.papers.a2.train import encode_images
from overt.papers.catalog import find_recipe
from tests.papers.a2.small import SETS, forbid_value_reads

RULES = DecodingRules(max_length=6)


@pytest.fixture(scope="module")
def parts() -> A2Data:
    return load_scenes(settings.apply(find_recipe("a2-scenes"), SETS).data)  # type: ignore[arg-type]


def build_model(parts: A2Data, label: str = "gate") -> Any:
    recipe: Any = settings.apply(find_recipe("a2-scenes"), [*SETS, *a2.table_rows()[label]])
    torch.manual_seed(0)
    return build_captioner(recipe.model, recipe.align, parts.words.size, parts.encoder).eval()


def encode_memory(model: Any, parts: A2Data, *pictures: int) -> Memory:
    with torch.no_grad():
        return encode_images(model, parts.train.without_captions(list(pictures)))


def assert_same_texts(ours: GeneratedTexts, theirs: GeneratedTexts) -> None:
    for name in ("tokens", "mask", "log_probabilities"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))


@pytest.mark.long
def test_greedy_sampler_equals_the_greedy_decoder(parts: A2Data):
    model = build_model(parts)
    pictures = parts.train.without_captions([0, 2, 1])
    with torch.no_grad():
        (ours,) = greedy_sampler(model, RULES)(encode_memory(model, parts, 0, 2, 1))
        assert_same_texts(ours, greedy(model, pictures, RULES))


@pytest.mark.long
def test_training_sampler_equals_the_sampling_decoder(parts: A2Data):
    model, critic = build_model(parts), replace(A2Critic(), draws=3, baseline=A2Baseline.OTHERS)
    pictures = parts.train.without_captions([0, 2])
    with torch.no_grad():
        torch.manual_seed(3)
        (ours,) = training_sampler(model, critic, RULES)(encode_memory(model, parts, 0, 2))
        torch.manual_seed(3)
        assert_same_texts(ours, sample(model, pictures, 3, rules=RULES))


@pytest.mark.long
def test_a_greedy_baseline_comes_before_the_sampled_captions(parts: A2Data):
    model, critic = build_model(parts), replace(A2Critic(), draws=3)
    with torch.no_grad():
        alone, drawn = training_sampler(model, critic, RULES)(encode_memory(model, parts, 0, 2))
        assert_same_texts(alone, greedy(model, parts.train.without_captions([0, 2]), RULES))
    assert len(drawn) == 6


@pytest.mark.long
@pytest.mark.parametrize("baseline", list(A2Baseline))
def test_rewarded_captions_may_be_beams(parts: A2Data, baseline: A2Baseline):
    model, pictures = build_model(parts), parts.train.without_captions([0, 2])
    critic = replace(A2Critic(), draws=3, baseline=baseline, written=A2Sampling.BEAMS)
    with torch.no_grad():
        *alone, ours = training_sampler(model, critic, RULES)(encode_memory(model, parts, 0, 2))
        assert_same_texts(ours, beam_search_all(model, pictures, 3, RULES))
        assert len(alone) == (baseline is A2Baseline.GREEDY)
        for one in alone:
            assert_same_texts(one, greedy(model, pictures, RULES))


class ReplayStub:
    """Stand in for CUDA graph capture: a replay runs the work again, into the same tensors."""

    def __init__(self) -> None:
        self.captures = 0

    def __call__(
        self, work: Callable[[], tuple[GeneratedTexts, ...]]
    ) -> tuple[Callable[[], None], tuple[GeneratedTexts, ...]]:
        self.captures += 1
        made = work()

        def replay() -> None:
            for ours, theirs in zip(made, work(), strict=True):
                for name in ("tokens", "mask", "log_probabilities"):
                    getattr(ours, name).copy_(getattr(theirs, name))

        return replay, made


@pytest.mark.long
@pytest.mark.parametrize("label", ["none", "gate"])
def test_a_replayed_graph_follows_new_images_and_weights(
    parts: A2Data, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one graph per shape."""
    monkeypatch.setattr(decoding, "_all_ended", lambda *_: False)  # as during CUDA graph capture
    model, stub = build_model(parts, label), ReplayStub()
    write, plain = graphed_sampler(greedy_sampler(model, RULES), stub), greedy_sampler(model, RULES)
    for number, pictures in enumerate([(0, 1), (2, 3), (4, 5), (6,), (7,)]):
        if number == 2:
            with torch.no_grad():
                model.get_parameter([*dict(model.named_parameters())][-1]).mul_(-1)
        given = encode_memory(model, parts, *pictures)
        with torch.no_grad():
            (ours,), (theirs,) = write(given), plain(given)
        assert_same_texts(ours, theirs)
        assert ours.attention == () and ours.tokens.shape[1] == RULES.max_length
    assert stub.captures == 2


@pytest.mark.long
def test_a_failed_capture_raises_a_user_error(parts: A2Data) -> None:
    def refuse(work: Callable[[], tuple[GeneratedTexts, ...]]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    model = build_model(parts, "none")
    write, given = (
        graphed_sampler(greedy_sampler(model, RULES), refuse),
        encode_memory(model, parts, 0),
    )
    write(given)
    with pytest.raises(UserError, match=r"train\.graph=false.*capturing"):
        write(given)


@pytest.mark.long
@pytest.mark.parametrize("label", list(a2.table_rows()))
def test_decoding_does_not_synchronize_the_device(
    parts: A2Data, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On meta tensors, reading a value would raise."""
    forbid_value_reads(monkeypatch)
    for place, name in (
        (decoding, "_all_ended"),
        (decoding, "_all_beams_ended"),
        (captioner, "_same_images"),
    ):
        monkeypatch.setattr(place, name, lambda *_: False)
    model = build_model(parts, label).to("meta")
    best = replace(A2Critic(), baseline=A2Baseline.ALL, written=A2Sampling.BEAMS)
    ways = [
        greedy_sampler(model, DecodingRules(2)),
        *(training_sampler(model, one, DecodingRules(2)) for one in (A2Critic(), best)),
    ]
    with torch.no_grad():
        given = encode_images(model, parts.train.batch([0, 1]).to("meta"), each=5)
        for write in ways:
            assert all(one.tokens.is_meta for one in write(given))
