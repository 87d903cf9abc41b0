"""Numbers before and after, and what is said of a search."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from overt import files
from overt.attention import AttentionMap, words
from overt.data.batch import Batch
from overt.data.vocabulary import HubTokenizer, pad
from overt.geometry import TextGeometry
from overt.models.finetuned import finetune
from overt.models.output import Output
from overt.recipes.ssa.judging import overwritten
from overt.show.sample import load_gallery
from overt.supervise import Surrogates
from tests.recipes import foreign, tiny

SETS = ("data.train=6", "data.val=2", "data.test=6", "surrogate.probes=4", "supervise.loss=kl")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Scenes with nothing taught, with what was found, and with the truth."""
    root = tmp_path_factory.mktemp("scenes")
    found = {}
    for target in ("none", "surrogate", "truth"):
        out = root / target / "seed-0"
        recipe = tiny.recipe("ssa-scenes", *SETS, f"supervise.target={target}")
        found[target] = out, tiny.run(recipe, out)
    return found


def test_before_is_what_the_first_network_reached(rows: dict[str, Any]) -> None:
    none, after = rows["none"][1]["ours"], rows["surrogate"][1]["ours"]
    for name in ("accuracy", "pointing", "mass_inside", "rank_correlation", "emd"):
        assert after[f"{name}_before"]["value"] == pytest.approx(none[name]["value"], abs=1e-6)
        assert f"{name}_before" not in none


def test_numbers_of_the_search_are_means_over_all_targets(rows: dict[str, Any]) -> None:
    out, results = rows["surrogate"]
    kept, ours = Surrogates(out / "surrogates"), results["ours"]
    base, best = kept.base(kept.ids).exp(), kept.best(kept.ids).exp()
    assert ours["base_score"]["value"] == pytest.approx(float(base.mean()), abs=1e-6)
    assert ours["best_score"]["value"] == pytest.approx(float(best.mean()), abs=1e-6)
    assert ours["improved"]["value"] == pytest.approx(float((best > base).float().mean()))
    assert ours["base_score"]["split"] == "train" and ours["base_score"]["n"] == len(kept)
    assert ours["search_seconds"]["value"] == files.read_json(out / "search.json")["seconds"]


def test_what_was_found_is_held_against_the_truth(rows: dict[str, Any]) -> None:
    ours = rows["surrogate"][1]["ours"]
    for who in ("surrogate", "own"):
        for name in ("pointing", "mass_inside", "rank_correlation"):
            assert ours[f"{who}_{name}"]["split"] == "train"


def test_the_truth_needs_no_first_network(rows: dict[str, Any]) -> None:
    out, results = rows["truth"]
    assert results["steps"] == 2 and not (out / "baseline").exists()
    assert not [name for name in results["ours"] if name.endswith("_before")]


def test_distances_are_of_the_first_samples_and_missing_elsewhere(rows: dict[str, Any]) -> None:
    out, results = rows["none"]
    samples = files.read_arrays(out / "samples.npz")
    there = ~np.isnan(samples["emd"])
    assert there.sum() == results["ours"]["emd"]["n"]
    assert results["ours"]["emd"]["direction"] == "lower"


def test_looks_before_and_after_the_search_are_drawn(rows: dict[str, Any]) -> None:
    out, _ = rows["surrogate"]
    shown = [one for one in load_gallery(out / "gallery") if one.group.endswith("look")]
    own = [one for one in shown if one.group == "own look"]
    best = [one for one in shown if one.group == "best look"]
    assert len(own) == len(best) > 0
    for before, after in zip(own, best, strict=True):
        assert before.id.rpartition(",")[0] == after.id.rpartition(",")[0]
        assert after.scores["probability_of_truth"] >= before.scores["probability_of_truth"]
        assert before.cells is not None and after.cells is not None
    kept = Surrogates(out / "surrogates")
    (first, *_) = best
    wanted = kept.target([first.id.rpartition(",")[0]]).weights.flatten().numpy()
    np.testing.assert_allclose(first.cells.flatten(), wanted, atol=1e-6)


# --- words written over

NEEDED, BLANK = 7, 2  # the token that decides, and that of a hidden word


class Reads(nn.Module):
    """Looks at the word `NEEDED` alone and is .9 sure of class 1 where it is, of class 0 else."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Tensor] = []

    def encode(self, batch: Batch) -> Batch:
        return batch

    def decide(self, features: Batch, mask: Any = None) -> Output:
        assert mask is None and features.tokens is not None
        self.asked.append(features.tokens)
        there = (features.tokens == NEEDED).any(dim=1)
        sure = torch.tensor([[0.9, 0.1], [0.1, 0.9]])[there.long()].log()
        weights = (features.tokens == NEEDED).float()[:, None, None, None]
        seen = features.token_mask
        assert seen is not None
        keys = words(features.tokens.shape[1])
        return Output(sure, (AttentionMap(weights, keys, mask=seen[:, None]),))


def texts() -> Batch:
    """Two texts with the word that decides, one of them padded."""
    tokens = torch.tensor([[5, NEEDED, 6, 8, 9, 10], [NEEDED, 5, 6, 8, 0, 0]])
    return Batch(ids=("a", "b"), tokens=tokens, token_mask=tokens != 0)


def test_what_is_lost_when_the_attended_words_are_written_over_is_told_beside_random_ones() -> None:
    net, batch = Reads(), texts()
    declared, found = overwritten(net, batch, BLANK)["deletion_overwritten"]
    _, _, first, _, second, _, attended, _ = net.asked  # and what is left alone, after each
    assert declared.higher_is_better
    assert torch.equal(attended, torch.where(batch.tokens == NEEDED, BLANK, batch.tokens))
    hit = torch.stack([(one != NEEDED).all(dim=1) for one in (first, second)]).double().mean(dim=0)
    torch.testing.assert_close(found.double(), 0.8 * (1 - hit), atol=1e-6, rtol=0)
    for one in (first, second, attended):
        changed = one != batch.tokens
        assert torch.equal(changed.sum(dim=1), torch.tensor([1, 1]))  # as many, and no padding
        assert not (changed & ~batch.token_mask).any()


def test_a_pretrained_encoder_keeps_its_class_token_when_words_are_written_over(
    tmp_path: Path,
) -> None:
    net = finetune(foreign.bert(tmp_path / "bert"), classes=2).eval()
    reader = HubTokenizer(net.tokenizer)
    read = [reader.read(text) for text in ("the small red ball lies here", "a dog")]
    tokens, mask, spans = pad([ids for ids, _ in read], [one for _, one in read], reader.padding)
    text = TextGeometry(("the small red ball lies here", "a dog"), spans)
    batch = Batch(ids=("a", "b"), tokens=tokens, token_mask=mask, text=text)
    blank = net.tokenizer.unk_token_id
    asked, decide = [], net.decide

    def noting(features: Any, mask: Any = None) -> Output:
        assert mask is None  # nothing is hidden inside: the text itself is another
        asked.append(features.batch.tokens)
        return decide(features, mask)

    net.decide = noting
    _, found = overwritten(net, batch, blank)["deletion_overwritten"]
    special = spans[..., 0] < 0
    assert len(asked) == 8 and torch.equal(asked[1], tokens)
    assert not torch.equal(asked[6], tokens)
    for one in asked:
        assert torch.equal(one[special], tokens[special])
    changed = replace(batch, tokens=asked[6])
    whole, without = (net(one).prediction.softmax(dim=-1) for one in (batch, changed))
    best = whole.argmax(dim=-1, keepdim=True)
    lost = (whole - without).gather(-1, best)[:, 0]
    chance = [
        (whole - net(replace(batch, tokens=asked[at])).prediction.softmax(dim=-1))
        .gather(-1, best)[:, 0]
        for at in (2, 4)
    ]  # fmt: skip
    torch.testing.assert_close(found.float(), lost - torch.stack(chance).mean(dim=0), atol=1e-5,
                               rtol=1e-4)  # fmt: skip
