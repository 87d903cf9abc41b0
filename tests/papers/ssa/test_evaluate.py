"""Metrics of self-supervision: before and after training, and of the search."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from overt import io
from overt.attention import AttentionMap, words
from overt.data.batch import Batch
from overt.data.vocabulary import HubTokenizer, pad
from overt.geometry import TextGeometry
from overt.nn.output import Output
from overt.nn.text_transformer import load_for_finetuning
from overt.papers.ssa.evaluate import overwrite_deletion
from overt.targets import Surrogates
from overt.viz.gallery_sample import load_gallery
from tests.experiments import foreign, tiny

SETS = ("data.train=6", "data.val=2", "data.test=6", "surrogate.probes=4", "supervise.loss=kl")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Run scenes without targets, with searched targets, and with the ground truth."""
    root = tmp_path_factory.mktemp("scenes")
    found = {}
    for target in ("none", "surrogate", "truth"):
        out = root / target / "seed-0"
        recipe = tiny.recipe("ssa-scenes", *SETS, f"supervise.target={target}")
        found[target] = out, tiny.run(recipe, out)
    return found


@pytest.mark.long
def test_metrics_before_supervision_are_those_of_the_baseline(rows: dict[str, Any]) -> None:
    none, after = rows["none"][1]["ours"], rows["surrogate"][1]["ours"]
    for name in ("accuracy", "pointing", "mass_inside", "rank_correlation", "emd"):
        assert after[f"{name}_before"]["value"] == pytest.approx(none[name]["value"], abs=1e-6)
        assert f"{name}_before" not in none


@pytest.mark.long
def test_validation_accuracy_is_that_of_the_final_network(rows: dict[str, Any]) -> None:
    for out, results in rows.values():
        *_, last = (json.loads(line) for line in (out / "log.jsonl").read_text().splitlines())
        assert last["split"] == results["ours"]["val_accuracy"]["split"] == "val"
        assert results["ours"]["val_accuracy"]["value"] == last["measures"]["accuracy"]


@pytest.mark.long
def test_search_metrics_are_means_over_all_targets(rows: dict[str, Any]) -> None:
    out, results = rows["surrogate"]
    kept, ours = Surrogates(out / "surrogates"), results["ours"]
    base, best = kept.base(kept.ids).exp(), kept.best(kept.ids).exp()
    assert ours["base_score"]["value"] == pytest.approx(float(base.mean()), abs=1e-6)
    assert ours["best_score"]["value"] == pytest.approx(float(best.mean()), abs=1e-6)
    assert ours["improved"]["value"] == pytest.approx(float((best > base).float().mean()))
    assert ours["base_score"]["split"] == "train" and ours["base_score"]["n"] == len(kept)
    assert ours["search_seconds"]["value"] == io.read_json(out / "search.json")["seconds"]


@pytest.mark.long
def test_searched_and_own_maps_are_compared_with_the_ground_truth(rows: dict[str, Any]) -> None:
    ours = rows["surrogate"][1]["ours"]
    for who in ("surrogate", "own"):
        for name in ("pointing", "mass_inside", "rank_correlation"):
            assert ours[f"{who}_{name}"]["split"] == "train"


@pytest.mark.long
def test_ground_truth_targets_need_no_baseline(rows: dict[str, Any]) -> None:
    out, results = rows["truth"]
    assert results["steps"] == 2 and not (out / "baseline").exists()
    assert not [name for name in results["ours"] if name.endswith("_before")]


@pytest.mark.long
def test_emd_is_computed_for_the_first_samples_and_nan_elsewhere(rows: dict[str, Any]) -> None:
    out, results = rows["none"]
    samples = io.read_arrays(out / "samples.npz")
    there = ~np.isnan(samples["emd"])
    assert there.sum() == results["ours"]["emd"]["n"]
    assert results["ours"]["emd"]["direction"] == "lower"


@pytest.mark.long
def test_the_gallery_has_maps_before_and_after_the_search(rows: dict[str, Any]) -> None:
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


# --- overwritten words

NEEDED, BLANK = 7, 2  # the decisive token, and the token of an overwritten word


class NeededWordModel(nn.Module):
    """Attends to the word `NEEDED` only; predicts class 1 with 0.9 if it is there, else class 0."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Tensor] = []

    def encode(self, batch: Batch) -> Batch:
        return batch

    def decide(self, features: Batch, mask: Any = None) -> Output:
        assert mask is None and features.tokens is not None
        self.calls.append(features.tokens)
        present = (features.tokens == NEEDED).any(dim=1)
        logits = torch.tensor([[0.9, 0.1], [0.1, 0.9]])[present.long()].log()
        weights = (features.tokens == NEEDED).float()[:, None, None, None]
        mask_of_words = features.token_mask
        assert mask_of_words is not None
        keys = words(features.tokens.shape[1])
        return Output(logits, (AttentionMap(weights, keys, mask=mask_of_words[:, None]),))


def make_texts() -> Batch:
    """Make two texts with the decisive word, one of them padded."""
    tokens = torch.tensor([[5, NEEDED, 6, 8, 9, 10], [NEEDED, 5, 6, 8, 0, 0]])
    return Batch(ids=("a", "b"), tokens=tokens, token_mask=tokens != 0)


def test_overwrite_deletion_subtracts_the_loss_of_random_words() -> None:
    net, batch = NeededWordModel(), make_texts()
    declared, found = overwrite_deletion(net, batch, BLANK)["deletion_overwritten"]
    _, _, first, _, second, _, attended, _ = (
        net.calls
    )  # each is followed by the same text without a change
    assert declared.higher_is_better
    assert torch.equal(attended, torch.where(batch.tokens == NEEDED, BLANK, batch.tokens))
    hit = torch.stack([(one != NEEDED).all(dim=1) for one in (first, second)]).double().mean(dim=0)
    torch.testing.assert_close(found.double(), 0.8 * (1 - hit), atol=1e-6, rtol=0)
    for one in (first, second, attended):
        changed = one != batch.tokens
        assert torch.equal(
            changed.sum(dim=1), torch.tensor([1, 1])
        )  # as many words, and no padding
        assert not (changed & ~batch.token_mask).any()


def test_overwrite_deletion_keeps_the_special_tokens_of_an_encoder(
    tmp_path: Path,
) -> None:
    net = load_for_finetuning(foreign.bert(tmp_path / "bert"), classes=2).eval()
    reader = HubTokenizer(net.tokenizer)
    read = [reader.read(text) for text in ("the small red ball lies here", "a dog")]
    tokens, mask, spans = pad([ids for ids, _ in read], [one for _, one in read], reader.padding)
    text = TextGeometry(("the small red ball lies here", "a dog"), spans)
    batch = Batch(ids=("a", "b"), tokens=tokens, token_mask=mask, text=text)
    blank = net.tokenizer.unk_token_id
    calls, decide = [], net.decide

    def record_call(features: Any, mask: Any = None) -> Output:
        assert mask is None  # the text is changed, not masked
        calls.append(features.batch.tokens)
        return decide(features, mask)

    net.decide = record_call
    _, found = overwrite_deletion(net, batch, blank)["deletion_overwritten"]
    special = spans[..., 0] < 0
    assert len(calls) == 8 and torch.equal(calls[1], tokens)
    assert not torch.equal(calls[6], tokens)
    for one in calls:
        assert torch.equal(one[special], tokens[special])
    changed = replace(batch, tokens=calls[6])
    full, without = (net(one).prediction.softmax(dim=-1) for one in (batch, changed))
    best = full.argmax(dim=-1, keepdim=True)
    lost = (full - without).gather(-1, best)[:, 0]
    chance = [
        (full - net(replace(batch, tokens=calls[at])).prediction.softmax(dim=-1))
        .gather(-1, best)[:, 0]
        for at in (2, 4)
    ]  # fmt: skip
    torch.testing.assert_close(found.float(), lost - torch.stack(chance).mean(dim=0), atol=1e-5,
                               rtol=1e-4)  # fmt: skip
