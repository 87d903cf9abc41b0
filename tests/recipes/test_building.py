"""From settings to data, model and losses: what is built is what was asked for."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from overt import files
from overt.data.batch import Batch
from overt.data.scenes.questions import ALL
from overt.data.scenes.store import Scenes
from overt.errors import BadInput
from overt.recipes import building, evaluation
from overt.recipes.building import First, answerer, limits, watching
from overt.recipes.recipe import Context, Precision, Train
from overt.recipes.scenes import Look, Model
from overt.testing import toy_batch
from tests.recipes import tiny


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Scenes]:
    """The scenes that were opened since, by split."""
    found: dict[str, Scenes] = {}

    class Noted(Scenes):
        def __init__(self, split: str, *args: Any, **options: Any) -> None:
            super().__init__(split, *args, **options)
            found[split] = self

    monkeypatch.setattr("overt.data.scenes.store.Scenes", Noted)
    return found


def groups(data: Scenes) -> set[str]:
    return set(data.batch(range(len(data))).groups or ())


@pytest.mark.parametrize("family", ["relate", "exist"])
def test_the_held_out_family_is_asked_in_the_test_alone(
    opened: dict[str, Scenes], tmp_path: Path, family: str
) -> None:
    recipe = tiny.recipe("scenes-soft", f"data.held_out={family}", "data.limit=40")
    experiment = recipe.build(Context(tmp_path, device="cpu"))
    assert family not in groups(opened["train"]) | groups(opened["val"])
    assert groups(opened["train"]) <= set(ALL) - {family}
    assert family in groups(opened["test"])
    with torch.no_grad():
        ours = experiment.evaluate(None).ours  # type: ignore[arg-type]
    assert ours["accuracy_held_out"].n < ours["accuracy"].n == 160


def test_without_a_held_out_family_all_are_trained_on(
    opened: dict[str, Scenes], tmp_path: Path
) -> None:
    tiny.recipe("scenes-soft", "data.limit=120").build(Context(tmp_path, device="cpu"))
    assert groups(opened["train"]) == groups(opened["test"]) == set(ALL)
    ids = [set(one.batch(range(len(one))).ids) for one in opened.values()]
    assert not ids[0] & ids[1] | ids[0] & ids[2] | ids[1] & ids[2]


def test_the_limit_caps_every_split_and_the_world_is_chosen(
    opened: dict[str, Scenes], tmp_path: Path
) -> None:
    sets = ("data.limit=9", "data.val=3", "data.world=5")
    tiny.recipe("scenes-soft", *sets).build(Context(tmp_path, device="cpu"))
    assert {split: len(one) for split, one in opened.items()} == {"train": 9, "val": 3, "test": 9}
    assert {one.wanted.seed for one in opened.values()} == {5}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["data.held_out=colour"], "data.held_out='colour' is not one of exist"),
        (["supervise.target=truth", "model.look=mean"], "needs model.look=soft"),
        (["supervise.target=truth", "model.look=blind"], "needs model.look=soft"),
    ],
)
def test_what_does_not_go_together_is_refused(
    changes: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=said):
        tiny.recipe("scenes-soft", *changes).build(Context(tmp_path, device="cpu"))


@pytest.mark.parametrize("size", [32, 50])
def test_scenes_of_any_size_are_judged_on_the_cells_of_the_network(
    size: int, tmp_path: Path
) -> None:
    sets = (f"data.size={size}", "data.limit=3", "train.steps=1")
    results = tiny.run(tiny.recipe("scenes-truth", *sets), tmp_path / "a")
    assert results["ours"]["pointing"]["n"] > 0


def test_teaching_that_weighs_nothing_changes_nothing(tmp_path: Path) -> None:
    for out, sets in (("a", []), ("b", ["supervise.target=truth", "supervise.weight=0"])):
        tiny.run(tiny.recipe("scenes-soft", *sets), tmp_path / out)
    one, other = (files.read_tensors(tmp_path / out / "model/model.safetensors") for out in "ab")
    for name in one:
        torch.testing.assert_close(one[name], other[name])


def test_teaching_the_truth_brings_attention_to_it(tmp_path: Path) -> None:
    sets = ("data.limit=16", "train.steps=40", "train.batch=4", "train.epochs=60")
    found = {}
    for weight in (0, 3):
        more = ("supervise.target=truth", f"supervise.weight={weight}")
        results = tiny.run(tiny.recipe("scenes-soft", *sets, *more), tmp_path / str(weight))
        found[weight] = results["ours"]["mass_inside"]["value"]
    assert found[3] > found[0] + 0.02


# How attention does meanwhile


def told(out: Path) -> list[dict[str, Any]]:
    """What the log tells of layers, by step."""
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [one for one in rows if "layers" in one]


def test_the_log_tells_of_attention_where_it_is_watched_and_training_is_the_same(
    ran: Callable[..., tuple[Path, dict[str, Any]]],
) -> None:
    (plain, _), (watched, _) = ran("scenes-soft"), ran("scenes-soft", "train.watch=1")
    assert not told(plain)
    found = told(watched)
    assert [one["step"] for one in found] == [1, 2]
    assert {*found[0]["layers"]["entropy"]} == {"0 image", "1 text"}
    one, other = (run / "model/model.safetensors" for run in (plain, watched))
    assert one.read_bytes() == other.read_bytes()
    assert "attention entropy by layer" in (watched / "report.html").read_text()


def test_a_network_that_does_not_attend_cannot_be_watched(
    few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny.expect_few(monkeypatch)
    recipe = tiny.recipe("cifar10-cnn", "train.watch=5")
    with pytest.raises(BadInput, match=r"train.watch=5 tells .* leave it at 0"):
        tiny.run(recipe, tmp_path / "run", data_root=few)


def test_watching_leaves_the_network_as_it_was() -> None:
    net = answerer(Model(width=0.1), 12, 3)
    monitor = watching(Train(watch=1))
    assert monitor is not None and watching(Train()) is None
    batch = toy_batch(2)
    for asked in (lambda: net(batch), lambda: net.decide(net.encode(batch))):
        with monitor.looking(net) as pulse:
            asked()
        assert {*pulse.read()["entropy"]} == {"0 image", "1 text"}
    assert "decide" not in vars(net)


@pytest.mark.long
@pytest.mark.parametrize("family", ["ltpa", "ssa", "han", "vgp", "a2"])
def test_every_family_can_be_watched(family: str, tmp_path: Path) -> None:
    sets = ("train.watch=1", "train.steps=1", "data.limit=4")
    tiny.run(tiny.recipe(f"{family}-scenes", *sets), tmp_path / "run")
    found = told(tmp_path / "run")
    assert found and all(one["layers"]["entropy"] for one in found)


# Parts


def test_the_loop_is_given_every_limit() -> None:
    plan = Train(3, 7, 5, 2, patience=4, save_every=9, workers=1, precision=Precision.BF16)
    found = limits(plan)
    assert (found.epochs, found.steps, found.batch, found.accumulate) == (3, 7, 5, 2)
    assert (found.patience, found.save_every, found.workers, found.bf16) == (4, 9, 1, True)
    assert not limits(Train()).bf16


class Numbers:
    """Items 0, 1, 2 ..."""

    name, split = "numbers", "test"

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Any) -> Batch:
        return Batch(ids=tuple(str(index) for index in indices))

    def digest(self) -> str:
        return f"{self.count}"


@pytest.mark.parametrize(("limit", "wanted"), [(None, 5), (3, 3), (5, 5), (9, 5)])
def test_the_first_items_stand_at_their_places(limit: int | None, wanted: int) -> None:
    first = First(Numbers(5), limit)
    assert len(first) == wanted and (first.name, first.split) == ("numbers", "test")
    assert first.batch([2, 0]).ids == ("2", "0") and first.digest() == "5"
    assert building.source(first).n == wanted


@pytest.mark.parametrize("look", list(Look))
@pytest.mark.parametrize("width", [0.001, 0.25, 1.0])
def test_a_network_is_as_wide_as_asked(look: Look, width: float) -> None:
    model = answerer(Model(width=width, look=look, glimpses=3, dropout=0.2), 11, 7)
    sizes = model.sizes
    assert (sizes.vocabulary, sizes.answers, sizes.dropout) == (11, 7, 0.2)
    assert sizes.cell == max(4, round(64 * width))
    assert sizes.hidden == max(4, round(192 * width))
    assert model.attend.config()["kind"] == look.value
    assert model.attend.glimpses == (3 if look is Look.SOFT else 1)


# On files


@pytest.fixture
def on_files(few: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    tiny.expect_few(monkeypatch)
    return lambda name, *sets: tiny.recipe(name, *sets).build(Context(tmp_path, 0, "cpu", few))


def test_pictures_are_varied_while_training_alone(
    on_files: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, few: Path, tmp_path: Path
) -> None:
    seen: list[torch.Tensor] = []

    def note(batch: Batch, generator: torch.Generator) -> Batch:
        assert batch.images is not None
        seen.append(batch.images)
        return replace(batch, images=batch.images.flip(-1))

    monkeypatch.setattr("overt.data.vary", note)
    for vary, wanted in (("true", 2), ("false", 0)):
        seen.clear()
        recipe = tiny.recipe("cifar10-cnn", f"data.vary={vary}")
        tiny.run(recipe, tmp_path / vary, data_root=few)
        assert len(seen) == wanted  # once a step, never for validation or the test


def test_classes_and_words_are_those_of_the_data(on_files: Callable[..., Any]) -> None:
    with torch.no_grad():
        for name, classes in (("cifar10-cnn", 10), ("cifar100-cnn", 100), ("easyvqa-soft", 4)):
            experiment = on_files(name)
            assert experiment.model.eval()(experiment.example()).prediction.shape[1] == classes
        experiment = on_files("trec-attention", "model.hops=3")
        output = experiment.model.eval()(experiment.example())
    assert output.prediction.shape[1] == 6 and output.attention[0].values.shape[2] == 3


def test_easy_questions_are_read_where_the_user_keeps_them(
    on_files: Callable[..., Any], few: Path
) -> None:
    (train, val, test) = on_files("easyvqa-soft", "data.limit=100").sources
    assert (train.n, val.n, test.n) == (24, 12, 36)  # of `few`, not of the package


def test_the_penalty_weighs_on_repeated_hops(few: Path, tmp_path: Path, on_files: Any) -> None:
    weights = []
    for penalty in (0.0, 10.0):
        recipe = tiny.recipe("trec-attention", f"model.penalty={penalty}")
        tiny.run(recipe, tmp_path / str(penalty), data_root=few)
        weights.append((tmp_path / str(penalty) / "model/model.safetensors").read_bytes())
    assert weights[0] != weights[1]


def test_data_is_hashed_for_the_record(on_files: Callable[..., Any]) -> None:
    first, second = on_files("trec-attention").sources, on_files("trec-attention").sources
    assert first == second and len({one.hash for one in first}) == 3
    assert [one.split for one in first] == ["train", "val", "test"]


def test_the_decisive_number_of_validation_is_accuracy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With patience, the weights of the best validation are the ones that are tested."""
    values = iter([0.5, 0.9, 0.1, 0.1, 0.1])
    monkeypatch.setattr(evaluation.Judge, "accuracy", lambda *args: next(values))
    sets = ("train.patience=1", "train.steps=9", "train.epochs=9")
    results = tiny.run(tiny.recipe("scenes-none", *sets), tmp_path / "a")
    assert results["steps"] == 4  # two without a new best are one too many
    best = files.read_tensors(tmp_path / "a/checkpoints/train/best/model.safetensors")
    last = files.read_tensors(tmp_path / "a/model/model.safetensors")
    assert all(torch.equal(best[name], last[name]) for name in last)


def test_moves_are_drawn_from_the_stream_of_a_card_that_records_and_else_from_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing changes for steps that are not recorded; a recording holds no number of the host."""

    class OnCard(torch.Tensor):
        is_cuda = True

        def get_device(self) -> int:
            return 1

    here = toy_batch()
    assert here.images is not None
    there = replace(here, images=here.images.as_subclass(OnCard))
    streams = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", streams)
    before = torch.get_rng_state()
    assert building.dice(there, recorded=True) is streams[1]
    assert torch.equal(torch.get_rng_state(), before), "the host draws nothing"
    for batch, recorded in ((here, True), (here, False), (there, False)):
        torch.manual_seed(3)
        seed = int(torch.randint(2**31, ()))
        torch.manual_seed(3)
        assert building.dice(batch, recorded).initial_seed() == seed
