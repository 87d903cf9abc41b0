"""`Evaluator`: every value compared with a reference in plain Python, and the gallery."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from overt import metrics
from overt.attention import AttentionMap, grid, words
from overt.data.batch import Batch
from overt.errors import UserError
from overt.experiments import evaluate
from overt.experiments.evaluate import (
    CONTRAST_SEED,
    GALLERY_PER_GROUP,
    Evaluator,
    PerItemMetrics,
    add_calibration_error,
    add_family_charts,
    add_metrics,
    concatenate_metrics,
    labels_of,
    mean_with_interval,
)
from overt.experiments.experiment import Evaluation, MetricValue
from overt.geometry import PixelGeometry, TextGeometry
from overt.metrics.metric import MetricInfo
from overt.nn import Output

N, CELLS, CLASSES, GLIMPSES = 22, 6, 3, 2
NAMES = ("no", "yes", "maybe")
CPU = torch.device("cpu")
GROUPS = tuple("abc"[i % 3] for i in range(N))


def random_tensor(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([(7 * i) % CLASSES if i % 5 else -1 for i in range(N)])
TRUTH = (random_tensor(N, CELLS, seed=1) > 0.6).float()
TRUTH[[3, 4]] = 0  # no ground truth
PIXELS = (random_tensor(N // 2, 3, 16, 24, seed=2) * 255).to(torch.uint8)
SCORES = random_tensor(N, GLIMPSES, CELLS, seed=3) * 4
VALUES = random_tensor(N, CELLS, CLASSES, seed=4) * 6  # contribution of each cell to each class


@dataclass
class Questions:
    """Two questions per image; `seen` selects image, text or both."""

    name: str = "questions"
    split: str = "test"
    seen: tuple[str, ...] = ("image", "text")
    truth: bool = True

    def __len__(self) -> int:
        return N

    def digest(self) -> str:
        return "0"

    def batch(self, indices: Sequence[int]) -> Batch:
        rows = torch.tensor(list(indices))
        more: dict[str, Any] = {}
        if "image" in self.seen:
            pictures, of = (rows // 2).unique(return_inverse=True)
            geometry = PixelGeometry.identity(len(pictures), (16, 24))
            more |= {"images": PIXELS[pictures], "image_of": of, "geometry": geometry}
        if "text" in self.seen:
            spans = torch.tensor([[[0, 3], [4, 7], [-1, -1]]]).expand(len(rows), -1, -1)
            more["tokens"] = torch.ones(len(rows), 3, dtype=torch.long)
            more["token_mask"] = torch.tensor([[True, True, False]]).expand(len(rows), -1)
            more["text"] = TextGeometry(("who did",) * len(rows), spans)
        if self.truth:
            there = (TRUTH[rows].sum(dim=-1, keepdim=True) > 0).expand(-1, CELLS)
            more["target"] = AttentionMap.from_cells(TRUTH[rows], grid(2, 3), there).normalize()
        ids = tuple(f"q{row}" for row in rows.tolist())
        groups = tuple(GROUPS[row] for row in rows.tolist())
        return Batch(ids=ids, labels=LABELS[rows], groups=groups, **more)


@dataclass
class KnownAttention:
    """A model with known attention; its logits are the mean of the kept cells."""

    maps: tuple[str, ...] = ("text", "image")

    def encode(self, batch: Batch) -> Batch:
        return batch

    def decide(self, features: Batch, mask: Mapping[str, Tensor] | None = None) -> Output:
        rows = torch.tensor([int(name[1:]) for name in features.ids])
        scores = SCORES[rows][:, None, :, None]
        attention = {
            "image": AttentionMap.from_scores(scores, grid(2, 3)),
            "text": AttentionMap.from_scores(scores[..., :3], words(3)),
        }
        keep = (mask or {}).get("image", torch.ones(len(rows), CELLS))
        if mask is not None and "text" in mask:
            keep = mask["text"].repeat(1, 2)
        weights = attention["image"].weights.mean(dim=2).reshape(len(rows), CELLS)
        logits = torch.einsum("bk,bkc->bc", keep * weights, VALUES[rows])
        return Output(logits, tuple(attention[name] for name in self.maps))

    def __call__(self, batch: Batch) -> Output:
        return self.decide(self.encode(batch))


# Reference: one sample, plain Python


def softmax(values: Sequence[float]) -> list[float]:
    powers = [math.exp(value - max(values)) for value in values]
    return [power / sum(powers) for power in powers]


def attention_of(row: int) -> list[float]:
    heads = [softmax(SCORES[row, head].tolist()) for head in range(GLIMPSES)]
    return [sum(head[cell] for head in heads) / GLIMPSES for cell in range(CELLS)]


def class_probabilities(row: int, keep: Sequence[float]) -> list[float]:
    weights = attention_of(row)
    logits = [
        sum(keep[k] * weights[k] * float(VALUES[row, k, c]) for k in range(CELLS))
        for c in range(CLASSES)
    ]
    return softmax(logits)


def argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda index: values[index])


def removal_effect(row: int, cells: set[int]) -> tuple[float, float]:
    """Return the drop of the predicted probability without these cells, and the flip."""
    whole = class_probabilities(row, [1.0] * CELLS)
    without = class_probabilities(row, [float(k not in cells) for k in range(CELLS)])
    answer = argmax(whole)
    return whole[answer] - without[answer], float(argmax(without) != answer)


def half_of_attention(row: int) -> set[int]:
    """Return the fewest cells with half of the attention."""
    weights, chosen = attention_of(row), set[int]()
    for cell in sorted(range(CELLS), key=lambda cell: -weights[cell]):
        if sum(weights[k] for k in chosen) >= 0.5:
            break
        chosen.add(cell)
    return chosen


def reference_values(row: int, noise: Sequence[Tensor]) -> dict[str, float]:
    from scipy.stats import spearmanr

    weights, truth = attention_of(row), TRUTH[row].tolist()
    label, known = int(LABELS[row]), any(truth) and not all(truth)
    cells = half_of_attention(row)
    random = [
        removal_effect(row, set(sorted(range(CELLS), key=lambda k: -float(one[k]))[: len(cells)]))
        for one in noise
    ]
    fallen, changed = removal_effect(row, cells)
    return {
        "accuracy": math.nan
        if label < 0
        else float(argmax(class_probabilities(row, [1.0] * CELLS)) == label),
        "pointing": truth[argmax(weights)] if any(truth) else math.nan,
        "mass_inside": sum(w for w, t in zip(weights, truth, strict=True) if t)
        if any(truth)
        else math.nan,
        "rank_correlation": float(spearmanr(weights, truth)[0]) if known else math.nan,
        "deletion": fallen - sum(one for one, _ in random) / len(random),
        "flips": changed - sum(one for _, one in random) / len(random),
        "entropy": -sum(w * math.log(w) for w in weights),
        "confidence": max(class_probabilities(row, [1.0] * CELLS)),
    }


def reference_table(portion: int) -> dict[str, np.ndarray]:
    found = []
    for start in range(0, N, portion):
        count = min(portion, N - start)
        generator = torch.Generator().manual_seed(CONTRAST_SEED)
        noise = [torch.rand(count, CELLS, generator=generator) for _ in range(2)]
        found += [reference_values(start + i, [one[i] for one in noise]) for i in range(count)]
    return {name: np.array([one[name] for one in found]) for name in found[0]}


@pytest.mark.parametrize("portion", [1, 4, 64])
def test_all_values_per_sample_agree_with_the_reference(portion: int) -> None:
    evaluator = Evaluator(Questions(), NAMES, batch_size=portion)
    found = evaluator.evaluate(KnownAttention(), CPU)
    wanted = reference_table(portion)
    texts = {"id", "cluster", "group", "prediction", "truth"}
    assert set(found.samples) == {*texts, *wanted}
    assert found.samples["id"].tolist() == [f"q{i}" for i in range(N)]
    assert found.samples["group"].tolist() == list(GROUPS)
    truths = [NAMES[label] if label >= 0 else "" for label in LABELS.tolist()]
    assert found.samples["truth"].tolist() == truths
    chosen = [NAMES[argmax(class_probabilities(i, [1.0] * CELLS))] for i in range(N)]
    assert found.samples["prediction"].tolist() == chosen
    for name, values in wanted.items():
        np.testing.assert_allclose(found.samples[name], values, atol=1e-5, err_msg=name)


def test_further_metrics_see_every_batch_once() -> None:
    made: list[list[int]] = []

    class Counted(Questions):
        def batch(self, indices: Sequence[int]) -> Batch:
            made.append(list(indices))
            return super().batch(indices)

    seen: list[Batch] = []

    def count_samples(batch: Batch) -> PerItemMetrics:
        seen.append(batch)
        return {"row": (metrics.accuracy.info, torch.tensor([int(one[1:]) for one in batch.ids]))}

    evaluator = Evaluator(Counted(), NAMES, batch_size=4)
    found, more = evaluator.evaluate_with(KnownAttention(), CPU, count_samples)
    assert more["row"][0] == metrics.accuracy.info and more["row"][1].tolist() == list(range(N))
    assert [list(one.ids) for one in seen] == [[f"q{i}" for i in some] for some in made]
    assert [i for some in made for i in some] == list(range(N))
    plain = Evaluator(Questions(), NAMES, batch_size=4).evaluate(KnownAttention(), CPU)
    assert found.ours == plain.ours


def test_means_ignore_undefined_values() -> None:
    found = Evaluator(Questions(), NAMES, batch_size=5).evaluate(KnownAttention(), CPU)
    for name, values in reference_table(5).items():
        if name == "confidence":
            assert name not in found.ours
            continue
        there = [value for value in values.tolist() if value == value]
        ours = found.ours[name]
        assert ours.n == len(there) and ours.split == "test"
        assert ours.value == pytest.approx(sum(there) / len(there), abs=1e-6)
    assert found.ours["accuracy"].n == N - 5 and found.ours["pointing"].n < N


def test_one_item_has_no_interval_and_shares_use_wilson_intervals() -> None:
    one = mean_with_interval(metrics.accuracy.info, np.array([1.0]), "test")
    assert (one.value, one.n, one.low, one.high) == (1.0, 1, None, None)
    ten = mean_with_interval(metrics.accuracy.info, np.ones(10), "test")
    assert ten.high == 1 and ten.low == pytest.approx(0.7225, abs=1e-4)
    gains = mean_with_interval(evaluate.FLIPS, np.array([1.0, 1.0] + [0.0] * 38), "test")
    assert gains.low is not None and gains.low < 0, "a difference is not a share"


def test_intervals_are_clustered_by_image_and_shares_stay_in_0_to_1() -> None:
    found = Evaluator(Questions(), NAMES).evaluate(KnownAttention(), CPU)
    images = found.samples["cluster"].tolist()
    assert len(set(images)) < N
    for name, ours in found.ours.items():
        share = name in ("accuracy", "pointing")
        values = torch.from_numpy(found.samples[name])
        around = metrics.confidence_interval(values, clusters=images, share=share)
        assert (ours.low, ours.high) == (around.low, around.high)
        assert ours.low is not None and ours.high is not None
        assert ours.low <= ours.value <= ours.high
    assert found.ours["accuracy"].unit == "share" and found.ours["entropy"].unit == "nats"
    assert found.ours["accuracy"].direction == "higher"
    assert found.ours["entropy"].direction == "neither"


def test_groups_have_means_and_chance_levels() -> None:
    evaluator = Evaluator(
        Questions(), NAMES, chance=lambda group: {"a": 0.1, "b": 0.2, "c": 0.3}[group]
    )
    found, wanted = evaluator.evaluate(KnownAttention(), CPU).groups, reference_table(64)
    assert set(found) == {"accuracy", "pointing", "mass_inside"}
    for name, cells in found.items():
        assert list(cells) == ["a", "b", "c"]
        for group, cell in cells.items():
            rows = [i for i in range(N) if GROUPS[i] == group]
            values = [wanted[name][i] for i in rows if not math.isnan(wanted[name][i])]
            assert cell["n"] == len(values)
            assert cell["value"] == pytest.approx(sum(values) / len(values), abs=1e-6)
            assert cell.get("chance") == (
                {"a": 0.1, "b": 0.2, "c": 0.3}[group] if name == "accuracy" else None
            )


def test_the_held_out_group_is_reported_separately() -> None:
    found, wanted = (
        Evaluator(Questions(), NAMES, held_out="b").evaluate(KnownAttention(), CPU),
        reference_table(64),
    )
    for name in ("accuracy", "pointing", "mass_inside"):
        values = [wanted[name][i] for i in range(N) if GROUPS[i] == "b"]
        values = [value for value in values if not math.isnan(value)]
        apart = found.ours[f"{name}_held_out"]
        assert apart.n == len(values)
        assert apart.value == pytest.approx(sum(values) / len(values), abs=1e-6)
        assert apart.direction == "higher"
    assert "deletion_held_out" not in found.ours


def test_a_held_out_group_without_samples_gives_nan() -> None:
    apart = (
        Evaluator(Questions(), NAMES, held_out="z")
        .evaluate(KnownAttention(), CPU)
        .ours["accuracy_held_out"]
    )
    assert math.isnan(apart.value) and apart.n == 0


def test_accuracy_alone_equals_that_of_the_evaluation() -> None:
    evaluator = Evaluator(Questions(), NAMES, batch_size=7)
    wanted = np.nanmean(reference_table(7)["accuracy"])
    assert evaluator.accuracy(KnownAttention(), CPU) == pytest.approx(wanted, abs=1e-6)


# Selection of the evaluated map


def test_the_image_map_is_evaluated_if_there_is_an_image() -> None:
    one = Evaluator(Questions(), NAMES).evaluate(KnownAttention(("text", "image")), CPU)
    other = Evaluator(Questions(), NAMES).evaluate(KnownAttention(("image", "text")), CPU)
    np.testing.assert_array_equal(one.samples["entropy"], other.samples["entropy"])
    np.testing.assert_allclose(one.samples["entropy"], reference_table(64)["entropy"], atol=1e-5)


@pytest.mark.parametrize("maps", [(), ("text",)])
def test_a_model_without_image_attention_gets_accuracy_only(
    maps: tuple[str, ...],
) -> None:
    found = Evaluator(Questions(), NAMES).evaluate(KnownAttention(maps), CPU)
    assert set(found.ours) == {"accuracy"}
    assert all(one.cells is None for one in found.gallery)


def test_the_text_map_is_evaluated_without_images() -> None:
    found = Evaluator(Questions(seen=("text",)), NAMES).evaluate(KnownAttention(), CPU)
    assert set(found.ours) == {
        "accuracy",
        "deletion",
        "flips",
        "entropy",
    }  # the ground truth is over cells
    heads = [[softmax(SCORES[i, h, :3].tolist()) for h in range(GLIMPSES)] for i in range(N)]
    weights = [[sum(head[k] for head in row) / GLIMPSES for k in range(3)] for row in heads]
    wanted = [-sum(w * math.log(w) for w in row) for row in weights]
    np.testing.assert_allclose(found.samples["entropy"], wanted, atol=1e-5)


def test_cached_features_count_as_an_image() -> None:
    class Cached(Questions):
        def batch(self, indices: Sequence[int]) -> Batch:
            found = super().batch(indices)
            return replace(found, features=torch.zeros(len(found), CELLS, 2))

    found = Evaluator(Cached(seen=("text",)), NAMES).evaluate(KnownAttention(), CPU)
    np.testing.assert_allclose(found.samples["entropy"], reference_table(64)["entropy"], atol=1e-5)
    assert all(one.image is None and one.cells is None for one in found.gallery)


def test_without_ground_truth_no_agreement_is_computed() -> None:
    found = Evaluator(Questions(truth=False), NAMES).evaluate(KnownAttention(), CPU)
    assert set(found.ours) == {"accuracy", "deletion", "flips", "entropy"}
    assert all(one.truth_cells is None for one in found.gallery)


# Gallery


@pytest.mark.parametrize("most", [0, 24], ids=["groups alone", "all"])
def test_the_gallery_has_the_first_samples_of_every_group(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "GALLERY_SIZE", most)
    found = Evaluator(Questions(), NAMES, batch_size=4).evaluate(KnownAttention(), CPU)
    shown = [f"q{i}" for i in range(N) if GROUPS[:i].count(GROUPS[i]) < GALLERY_PER_GROUP or most]
    assert [one.id for one in found.gallery] == shown
    wanted = reference_table(4)
    for one in found.gallery:
        row = int(one.id[1:])
        assert one.group == GROUPS[row] and one.text == "who did"
        assert one.confidence == pytest.approx(wanted["confidence"][row], abs=1e-5)
        assert one.image is not None and one.cells is not None and one.word_weights is not None
        np.testing.assert_array_equal(one.image, PIXELS[row // 2].permute(1, 2, 0).numpy())
        np.testing.assert_allclose(one.cells.flatten(), attention_of(row), atol=1e-5)
        assert (
            one.cells.shape == (2, 3) and len(one.word_weights) == 2
        )  # the third token is padding
        assert (one.truth_cells is None) == (row in (3, 4))
        assert "accuracy" in one.scores or LABELS[row] < 0
        assert all(value == value for value in one.scores.values())


def test_the_gallery_shows_resized_images_at_model_resolution() -> None:
    class Resized(Questions):
        def batch(self, indices: Sequence[int]) -> Batch:
            found = super().batch(indices)
            assert found.geometry is not None
            return replace(found, geometry=replace(found.geometry, size=2 * found.geometry.size))

    for one in Evaluator(Resized(), NAMES).evaluate(KnownAttention(), CPU).gallery:
        assert one.image is not None and one.geometry is not None
        assert one.image.shape[:2] == (16, 24) == tuple(one.geometry.size[0].tolist())


# --- metrics added by a recipe

COUNTED = MetricInfo("counted", "share", False, 0.0, 1.0)


def evaluation_of(logits: Tensor, labels: Tensor) -> Evaluation:
    """Return an evaluation of these predictions."""
    right = metrics.accuracy(logits, labels)
    sure = logits.softmax(dim=-1).amax(dim=-1)
    samples = {
        "id": np.array([str(row) for row in range(len(labels))]),
        "accuracy": right.numpy(),
        "confidence": sure.float().numpy(),
    }
    ours = {"accuracy": MetricValue(float(right.nanmean()), "share", "higher", "test", len(labels))}
    return Evaluation(ours, samples)


def test_metrics_of_the_first_items_are_padded_with_nan() -> None:
    found = evaluation_of(random_tensor(5, 3, seed=0), torch.arange(5) % 3)
    more = {
        "some": (COUNTED, torch.tensor([1.0, 0.0, math.nan])),
        "none": (COUNTED, torch.full((5,), math.nan)),
    }
    new = add_metrics(found, more, "test")
    assert new.samples["some"].tolist()[:2] == [1, 0] and np.isnan(new.samples["some"][2:]).all()
    assert len(new.samples["some"]) == 5 and new.samples["some"].dtype == np.float32
    assert new.ours["some"] == mean_with_interval(COUNTED, torch.tensor([1.0, 0.0]), "test")
    assert (new.ours["some"].value, new.ours["some"].n) == (0.5, 2)
    assert (new.ours["some"].unit, new.ours["some"].direction) == ("share", "lower")
    assert "none" not in new.ours and "none" not in new.samples
    assert "some" not in found.ours and new.ours["accuracy"] == found.ours["accuracy"]


def test_metrics_of_portions_are_concatenated() -> None:
    parts = [{"a": (COUNTED, torch.tensor([1.0, 2.0]))}, {"a": (COUNTED, torch.tensor([3.0]))}]
    ((name, (declared, values)),) = concatenate_metrics(parts).items()
    assert (name, declared, values.tolist()) == ("a", COUNTED, [1, 2, 3])
    assert concatenate_metrics([]) == {}


def test_calibration_error_agrees_with_the_metric() -> None:
    logits, labels = 3 * random_tensor(400, 4, seed=1), torch.arange(400) % 4
    labels[:7] = -1
    ece = add_calibration_error(evaluation_of(logits, labels)).ours["ece"]
    assert ece.value == pytest.approx(metrics.reliability_diagram(logits, labels).ece, abs=1e-6)
    assert (ece.n, ece.direction, ece.split) == (393, "lower", "test")
    assert ece.low is not None and ece.high is not None and 0 < ece.low < ece.high < 1
    assert add_calibration_error(evaluation_of(logits, labels)).ours["ece"] == ece


def test_the_calibration_of_one_sample_has_no_interval() -> None:
    ece = add_calibration_error(
        evaluation_of(random_tensor(3, 2, seed=2), torch.tensor([1, -1, -1]))
    ).ours["ece"]
    assert (ece.n, ece.low, ece.high) == (1, None, None)


def test_calibration_is_skipped_without_labels() -> None:
    found = evaluation_of(random_tensor(3, 2, seed=2), torch.full((3,), -1))
    assert add_calibration_error(found) is found


def test_metric_families_become_charts() -> None:
    ours = {
        name: MetricValue(value, "share", "higher", "test", 9)
        for name, value in (
            ("jaccard_a", 0.1),
            ("jaccard_b", 0.2),
            ("mass_c", 0.3),
            ("jaccard", 0.0),
        )
    }
    before = {"accuracy": {"x": {"value": 1.0, "n": 2}}, "jaccard": {"all": {"value": 0.0, "n": 2}}}
    found = add_family_charts(Evaluation(ours, {}, before), ("jaccard", "mass", "fooled"))
    assert found.groups == {
        "accuracy": before["accuracy"],
        "jaccard": {"a": {"value": 0.1, "n": 9}, "b": {"value": 0.2, "n": 9}},
    }
    two = {"jaccard": {"x": {"value": 0.0, "n": 2}, "y": {"value": 0.0, "n": 2}}}
    assert list(
        add_family_charts(Evaluation(ours, {}, two), ("jaccard",)).groups["jaccard"]
    ) == list("xyab")
    assert found.ours is ours
    own = {"jaccard_b": {"x": {"value": 0.0, "n": 2}}}
    assert add_family_charts(Evaluation(ours, {}, own), ("jaccard",)).groups == own


def test_an_empty_dataset_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Questions, "__len__", lambda self: 0)
    with pytest.raises(UserError, match="questions, test"):
        list(Evaluator(Questions(), NAMES).batches(CPU))


def test_a_sample_without_a_label_raises() -> None:
    with pytest.raises(UserError, match="sample a .*labels"):
        labels_of(Batch(("a", "b"), images=torch.zeros(2, 3, 4, 4)))
