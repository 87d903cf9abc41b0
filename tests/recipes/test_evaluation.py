"""Judging a model: every number against a slow copy over single samples, by hand in Python."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from overt import measure
from overt.attention import AttentionMap, grid, words
from overt.data.batch import Batch
from overt.errors import BadInput
from overt.geometry import PixelGeometry, TextGeometry
from overt.measure.measured import Measure
from overt.models import Output
from overt.recipes import evaluation
from overt.recipes.evaluation import (
    CONTRAST_SEED,
    SHOWN_A_GROUP,
    Judge,
    also,
    calibrated,
    charted,
    labels_of,
    noted,
    valued,
)
from overt.recipes.experiment import Evaluation, Value

N, CELLS, CLASSES, GLIMPSES = 22, 6, 3, 2
NAMES = ("no", "yes", "maybe")
CPU = torch.device("cpu")
GROUPS = tuple("abc"[i % 3] for i in range(N))


def draw(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


LABELS = torch.tensor([(7 * i) % CLASSES if i % 5 else -1 for i in range(N)])
TRUTH = (draw(N, CELLS, seed=1) > 0.6).float()
TRUTH[[3, 4]] = 0  # nothing decides: no truth
PIXELS = (draw(N // 2, 3, 16, 24, seed=2) * 255).to(torch.uint8)
SCORES = draw(N, GLIMPSES, CELLS, seed=3) * 4
VALUES = draw(N, CELLS, CLASSES, seed=4) * 6  # what each cell says about each class


@dataclass
class Questions:
    """Two questions a picture; with `seen` a picture, a text or both."""

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
class Known:
    """A model with known attention; it answers with the mean of what the kept cells say."""

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


# A slow copy: one sample, plain Python


def softmax(values: Sequence[float]) -> list[float]:
    powers = [math.exp(value - max(values)) for value in values]
    return [power / sum(powers) for power in powers]


def attention_of(row: int) -> list[float]:
    heads = [softmax(SCORES[row, head].tolist()) for head in range(GLIMPSES)]
    return [sum(head[cell] for head in heads) / GLIMPSES for cell in range(CELLS)]


def answers(row: int, keep: Sequence[float]) -> list[float]:
    weights = attention_of(row)
    logits = [
        sum(keep[k] * weights[k] * float(VALUES[row, k, c]) for k in range(CELLS))
        for c in range(CLASSES)
    ]
    return softmax(logits)


def top(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda index: values[index])


def removed(row: int, cells: set[int]) -> tuple[float, float]:
    """How far the answer's probability falls without these cells, and whether it changes."""
    whole = answers(row, [1.0] * CELLS)
    without = answers(row, [float(k not in cells) for k in range(CELLS)])
    answer = top(whole)
    return whole[answer] - without[answer], float(top(without) != answer)


def half(row: int) -> set[int]:
    """The fewest cells with half of the attention."""
    weights, chosen = attention_of(row), set[int]()
    for cell in sorted(range(CELLS), key=lambda cell: -weights[cell]):
        if sum(weights[k] for k in chosen) >= 0.5:
            break
        chosen.add(cell)
    return chosen


def slow(row: int, noise: Sequence[Tensor]) -> dict[str, float]:
    from scipy.stats import spearmanr

    weights, truth = attention_of(row), TRUTH[row].tolist()
    label, known = int(LABELS[row]), any(truth) and not all(truth)
    cells = half(row)
    random = [
        removed(row, set(sorted(range(CELLS), key=lambda k: -float(one[k]))[: len(cells)]))
        for one in noise
    ]
    fallen, changed = removed(row, cells)
    return {
        "accuracy": math.nan if label < 0 else float(top(answers(row, [1.0] * CELLS)) == label),
        "pointing": truth[top(weights)] if any(truth) else math.nan,
        "mass_inside": sum(w for w, t in zip(weights, truth, strict=True) if t)
        if any(truth)
        else math.nan,
        "rank_correlation": float(spearmanr(weights, truth)[0]) if known else math.nan,
        "deletion": fallen - sum(one for one, _ in random) / len(random),
        "flips": changed - sum(one for _, one in random) / len(random),
        "entropy": -sum(w * math.log(w) for w in weights),
        "confidence": max(answers(row, [1.0] * CELLS)),
    }


def slow_table(portion: int) -> dict[str, np.ndarray]:
    found = []
    for start in range(0, N, portion):
        count = min(portion, N - start)
        generator = torch.Generator().manual_seed(CONTRAST_SEED)
        noise = [torch.rand(count, CELLS, generator=generator) for _ in range(2)]
        found += [slow(start + i, [one[i] for one in noise]) for i in range(count)]
    return {name: np.array([one[name] for one in found]) for name in found[0]}


@pytest.mark.parametrize("portion", [1, 4, 64])
def test_every_number_of_every_sample(portion: int) -> None:
    judge = Judge(Questions(), NAMES, portion=portion)
    found = judge.evaluate(Known(), CPU)
    wanted = slow_table(portion)
    texts = {"id", "cluster", "group", "prediction", "truth"}
    assert set(found.samples) == {*texts, *wanted}
    assert found.samples["id"].tolist() == [f"q{i}" for i in range(N)]
    assert found.samples["group"].tolist() == list(GROUPS)
    truths = [NAMES[label] if label >= 0 else "" for label in LABELS.tolist()]
    assert found.samples["truth"].tolist() == truths
    chosen = [NAMES[top(answers(i, [1.0] * CELLS))] for i in range(N)]
    assert found.samples["prediction"].tolist() == chosen
    for name, values in wanted.items():
        np.testing.assert_allclose(found.samples[name], values, atol=1e-5, err_msg=name)


def test_who_stands_beside_sees_every_batch_and_none_is_made_twice() -> None:
    made: list[list[int]] = []

    class Counted(Questions):
        def batch(self, indices: Sequence[int]) -> Batch:
            made.append(list(indices))
            return super().batch(indices)

    seen: list[Batch] = []
    judge = Judge(Counted(), NAMES, portion=4)
    found = judge.evaluate(Known(), CPU, seen.append)
    assert [list(one.ids) for one in seen] == [[f"q{i}" for i in some] for some in made]
    assert [i for some in made for i in some] == list(range(N))
    plain = Judge(Questions(), NAMES, portion=4).evaluate(Known(), CPU)
    assert found.ours == plain.ours


def test_means_leave_out_what_is_not_defined() -> None:
    found = Judge(Questions(), NAMES, portion=5).evaluate(Known(), CPU)
    for name, values in slow_table(5).items():
        if name == "confidence":
            assert name not in found.ours
            continue
        there = [value for value in values.tolist() if value == value]
        ours = found.ours[name]
        assert ours.n == len(there) and ours.split == "test"
        assert ours.value == pytest.approx(sum(there) / len(there), abs=1e-6)
    assert found.ours["accuracy"].n == N - 5 and found.ours["pointing"].n < N


def test_intervals_are_those_of_the_bootstrap() -> None:
    found = Judge(Questions(), NAMES).evaluate(Known(), CPU)
    for name, ours in found.ours.items():
        around = measure.bootstrap(torch.from_numpy(found.samples[name]))
        assert (ours.low, ours.high) == (around.low, around.high)
        assert ours.low is not None and ours.high is not None
        assert ours.low <= ours.value <= ours.high
    assert found.ours["accuracy"].unit == "share" and found.ours["entropy"].unit == "nats"
    assert found.ours["accuracy"].direction == "higher"
    assert found.ours["entropy"].direction == "neither"


def test_groups_are_means_with_the_chance_of_each() -> None:
    judge = Judge(Questions(), NAMES, chance=lambda group: {"a": 0.1, "b": 0.2, "c": 0.3}[group])
    found, wanted = judge.evaluate(Known(), CPU).groups, slow_table(64)
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


def test_the_held_out_group_is_reported_apart() -> None:
    found, wanted = Judge(Questions(), NAMES, held_out="b").evaluate(Known(), CPU), slow_table(64)
    for name in ("accuracy", "pointing", "mass_inside"):
        values = [wanted[name][i] for i in range(N) if GROUPS[i] == "b"]
        values = [value for value in values if not math.isnan(value)]
        apart = found.ours[f"{name}_held_out"]
        assert apart.n == len(values)
        assert apart.value == pytest.approx(sum(values) / len(values), abs=1e-6)
        assert apart.direction == "higher"
    assert "deletion_held_out" not in found.ours


def test_a_held_out_group_that_is_never_asked_has_no_number() -> None:
    apart = Judge(Questions(), NAMES, held_out="z").evaluate(Known(), CPU).ours["accuracy_held_out"]
    assert math.isnan(apart.value) and apart.n == 0


def test_accuracy_alone_is_the_same_number() -> None:
    judge = Judge(Questions(), NAMES, portion=7)
    wanted = np.nanmean(slow_table(7)["accuracy"])
    assert judge.accuracy(Known(), CPU) == pytest.approx(wanted, abs=1e-6)


# Which map is judged


def test_the_map_over_the_image_is_judged_where_there_is_an_image() -> None:
    one = Judge(Questions(), NAMES).evaluate(Known(("text", "image")), CPU)
    other = Judge(Questions(), NAMES).evaluate(Known(("image", "text")), CPU)
    np.testing.assert_array_equal(one.samples["entropy"], other.samples["entropy"])
    np.testing.assert_allclose(one.samples["entropy"], slow_table(64)["entropy"], atol=1e-5)


@pytest.mark.parametrize("maps", [(), ("text",)])
def test_a_model_that_does_not_look_at_the_image_is_judged_by_its_answers(
    maps: tuple[str, ...],
) -> None:
    found = Judge(Questions(), NAMES).evaluate(Known(maps), CPU)
    assert set(found.ours) == {"accuracy"}
    assert all(one.cells is None for one in found.gallery)


def test_without_images_the_map_over_the_text_is_judged() -> None:
    found = Judge(Questions(seen=("text",)), NAMES).evaluate(Known(), CPU)
    assert set(found.ours) == {"accuracy", "deletion", "flips", "entropy"}  # the truth is of cells
    heads = [[softmax(SCORES[i, h, :3].tolist()) for h in range(GLIMPSES)] for i in range(N)]
    weights = [[sum(head[k] for head in row) / GLIMPSES for k in range(3)] for row in heads]
    wanted = [-sum(w * math.log(w) for w in row) for row in weights]
    np.testing.assert_allclose(found.samples["entropy"], wanted, atol=1e-5)


def test_cached_features_are_an_image_too() -> None:
    class Cached(Questions):
        def batch(self, indices: Sequence[int]) -> Batch:
            found = super().batch(indices)
            return replace(found, features=torch.zeros(len(found), CELLS, 2))

    found = Judge(Cached(seen=("text",)), NAMES).evaluate(Known(), CPU)
    np.testing.assert_allclose(found.samples["entropy"], slow_table(64)["entropy"], atol=1e-5)
    assert all(one.image is None and one.cells is None for one in found.gallery)


def test_without_a_truth_nothing_is_compared_with_it() -> None:
    found = Judge(Questions(truth=False), NAMES).evaluate(Known(), CPU)
    assert set(found.ours) == {"accuracy", "deletion", "flips", "entropy"}
    assert all(one.truth_cells is None for one in found.gallery)


# What is shown


@pytest.mark.parametrize("most", [0, 24], ids=["groups alone", "all"])
def test_the_gallery_holds_the_first_of_every_group(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "SHOWN", most)
    found = Judge(Questions(), NAMES, portion=4).evaluate(Known(), CPU)
    shown = [f"q{i}" for i in range(N) if GROUPS[:i].count(GROUPS[i]) < SHOWN_A_GROUP or most]
    assert [one.id for one in found.gallery] == shown
    wanted = slow_table(4)
    for one in found.gallery:
        row = int(one.id[1:])
        assert one.group == GROUPS[row] and one.text == "who did"
        assert one.confidence == pytest.approx(wanted["confidence"][row], abs=1e-5)
        assert one.image is not None and one.cells is not None and one.word_weights is not None
        np.testing.assert_array_equal(one.image, PIXELS[row // 2].permute(1, 2, 0).numpy())
        np.testing.assert_allclose(one.cells.flatten(), attention_of(row), atol=1e-5)
        assert one.cells.shape == (2, 3) and len(one.word_weights) == 2  # the third is padding
        assert (one.truth_cells is None) == (row in (3, 4))
        assert "accuracy" in one.scores or LABELS[row] < 0
        assert all(value == value for value in one.scores.values())


def test_a_photo_that_was_resized_is_shown_as_the_model_saw_it() -> None:
    class Resized(Questions):
        def batch(self, indices: Sequence[int]) -> Batch:
            found = super().batch(indices)
            assert found.geometry is not None
            return replace(found, geometry=replace(found.geometry, size=2 * found.geometry.size))

    for one in Judge(Resized(), NAMES).evaluate(Known(), CPU).gallery:
        assert one.image is not None and one.geometry is not None
        assert one.image.shape[:2] == (16, 24) == tuple(one.geometry.size[0].tolist())


# --- numbers that a recipe adds

COUNTED = Measure("counted", "share", False, 0.0, 1.0)


def judged(logits: Tensor, labels: Tensor) -> Evaluation:
    """An evaluation of these answers."""
    right = measure.accuracy(logits, labels)
    sure = logits.softmax(dim=-1).amax(dim=-1)
    samples = {
        "id": np.array([str(row) for row in range(len(labels))]),
        "accuracy": right.numpy(),
        "confidence": sure.float().numpy(),
    }
    ours = {"accuracy": Value(float(right.nanmean()), "share", "higher", "test", len(labels))}
    return Evaluation(ours, samples)


def test_numbers_of_the_first_items_stand_beside_all() -> None:
    found = judged(draw(5, 3, seed=0), torch.arange(5) % 3)
    more = {
        "some": (COUNTED, torch.tensor([1.0, 0.0, math.nan])),
        "none": (COUNTED, torch.full((5,), math.nan)),
    }
    new = also(found, more, "test")
    assert new.samples["some"].tolist()[:2] == [1, 0] and np.isnan(new.samples["some"][2:]).all()
    assert len(new.samples["some"]) == 5 and new.samples["some"].dtype == np.float32
    assert new.ours["some"] == valued(COUNTED, torch.tensor([1.0, 0.0]), "test")
    assert (new.ours["some"].value, new.ours["some"].n) == (0.5, 2)
    assert (new.ours["some"].unit, new.ours["some"].direction) == ("share", "lower")
    assert "none" not in new.ours and "none" not in new.samples
    assert "some" not in found.ours and new.ours["accuracy"] == found.ours["accuracy"]


def test_portions_are_noted_one_after_the_other() -> None:
    parts = [{"a": (COUNTED, torch.tensor([1.0, 2.0]))}, {"a": (COUNTED, torch.tensor([3.0]))}]
    ((name, (declared, values)),) = noted(parts).items()
    assert (name, declared, values.tolist()) == ("a", COUNTED, [1, 2, 3])
    assert noted([]) == {}


def test_the_calibration_error_is_that_of_the_measure() -> None:
    logits, labels = 3 * draw(400, 4, seed=1), torch.arange(400) % 4
    labels[:7] = -1
    ece = calibrated(judged(logits, labels)).ours["ece"]
    assert ece.value == pytest.approx(measure.reliability(logits, labels).ece, abs=1e-6)
    assert (ece.n, ece.direction, ece.split) == (393, "lower", "test")
    assert ece.low is not None and ece.high is not None and 0 < ece.low < ece.high < 1
    assert calibrated(judged(logits, labels)).ours["ece"] == ece


def test_nothing_is_calibrated_without_labels() -> None:
    found = judged(draw(3, 2, seed=2), torch.full((3,), -1))
    assert calibrated(found) is found


def test_families_of_measures_are_charts() -> None:
    ours = {
        name: Value(value, "share", "higher", "test", 9)
        for name, value in (
            ("jaccard_a", 0.1),
            ("jaccard_b", 0.2),
            ("mass_c", 0.3),
            ("jaccard", 0.0),
        )
    }
    before = {"accuracy": {"x": {"value": 1.0, "n": 2}}, "jaccard": {"all": {"value": 0.0, "n": 2}}}
    found = charted(Evaluation(ours, {}, before), ("jaccard", "mass", "fooled"))
    assert found.groups == {
        "accuracy": before["accuracy"],
        "jaccard": {"a": {"value": 0.1, "n": 9}, "b": {"value": 0.2, "n": 9}},
    }
    two = {"jaccard": {"x": {"value": 0.0, "n": 2}, "y": {"value": 0.0, "n": 2}}}
    assert list(charted(Evaluation(ours, {}, two), ("jaccard",)).groups["jaccard"]) == list("xyab")
    assert found.ours is ours
    own = {"jaccard_b": {"x": {"value": 0.0, "n": 2}}}
    assert charted(Evaluation(ours, {}, own), ("jaccard",)).groups == own


def test_nothing_to_judge_on_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Questions, "__len__", lambda self: 0)
    with pytest.raises(BadInput, match="nothing to judge a model on: questions, test is empty"):
        list(Judge(Questions(), NAMES).batches(CPU))


def test_a_sample_without_a_class_is_told() -> None:
    with pytest.raises(BadInput, match="sample a has no class"):
        labels_of(Batch(("a", "b"), images=torch.zeros(2, 3, 4, 4)))
