"""Settings: parsing, error messages, and conversion to and from JSON."""

import json
import re
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overt.errors import UserError
from overt.experiments import settings
from overt.experiments.recipe import NO_PUBLISHED_VALUES, Precision, TrainConfig
from overt.papers.catalog import recipes


class Score(Enum):
    ADDITIVE = "additive"
    DOT = "dot"


@dataclass(frozen=True)
class Head:
    heads: int = 2
    score: Score | None = Score.DOT


@dataclass(frozen=True)
class Model:
    width: float = 0.5
    head: Head = Head()  # a section inside a section
    sizes: tuple[int, ...] = (8, 16)
    pair: tuple[int, str] = (1, "a")
    scores: tuple[Score, ...] = ()
    mode: Literal["hard", "soft"] = "soft"
    dropout: float = 0.1
    either: int | str = "auto"


@dataclass(frozen=True)
class Data:
    name: str = "toy"
    limit: int | None = None
    flip: bool = True
    angle: int = field(default=0, metadata={"low": -10, "high": 10})

    def __post_init__(self) -> None:
        if self.name == "odd" and self.flip:
            raise ValueError("odd data cannot be flipped.")


for section in (Head, Model, Data):
    section.__module__ = "overt"  # they stand for sections of the library


@dataclass(frozen=True)
class OwnModel:
    width: int = 32


@dataclass(frozen=True)
class Toy:
    name: str = "toy"
    about: str = "nothing to learn"
    paper: Any = field(default_factory=lambda: NO_PUBLISHED_VALUES)
    data: Data = Data()
    model: Model | OwnModel = Model()
    train: TrainConfig = field(default_factory=TrainConfig)
    supervise: Head | None = None

    def build(self, context: object) -> Any:
        raise NotImplementedError


def settings_error(*changes: str) -> str:
    with pytest.raises(UserError) as caught:
        settings.apply(Toy(), list(changes))
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence[-1] in ".?"
    return sentence


def test_flatten_has_every_field_of_every_section() -> None:
    flat = settings.flatten(Toy())
    assert list(flat)[:4] == ["data.name", "data.limit", "data.flip", "data.angle"]
    assert flat["model.head.score"] is Score.DOT
    assert flat["train.precision"] is Precision.FP32
    assert not {"name", "about", "paper", "supervise"} & set(flat)
    assert "supervise.heads" in settings.flatten(Toy(supervise=Head()))


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("data.limit=512", 512),
        ("data.limit=none", None),
        (" data.limit = 512 ", 512),
        ("data.flip=false", False),
        ("data.flip=YES", True),
        ("data.name=a=b", "a=b"),
        ("data.name=", ""),
        ("data.angle=-10", -10),
        ("train.rate=3", 3.0),
        ("train.rate=1e-4", 1e-4),
        ("train.precision=bf16", Precision.BF16),
        ("train.clip=none", None),
        ("model.width=0.25", 0.25),
        ("model.head.heads=4", 4),
        ("model.head.score=additive", Score.ADDITIVE),
        ("model.head.score=none", None),
        ("model.sizes=1,2, 3", (1, 2, 3)),
        ("model.sizes=", ()),
        ("model.pair=7,b", (7, "b")),
        ("model.scores=dot,additive", (Score.DOT, Score.ADDITIVE)),
        ("model.mode=hard", "hard"),
        ("model.either=3", 3),
        ("model.either=auto", "auto"),
    ],
)
def test_values_are_parsed_by_the_type_of_their_field(change: str, value: object) -> None:
    changed = settings.apply(Toy(), [change])
    key = change.partition("=")[0].strip()
    assert settings.flatten(changed)[key] == value
    assert type(settings.flatten(changed)[key]) is type(value)
    others = {k: v for k, v in settings.flatten(changed).items() if k != key}
    assert others == {k: v for k, v in settings.flatten(Toy()).items() if k != key}


def test_the_last_value_wins_and_no_change_keeps_the_recipe() -> None:
    assert settings.apply(Toy(), ["data.limit=1", "data.limit=2"]).data.limit == 2
    assert settings.apply(Toy(), []) == Toy()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.epoch=3", "toy .*'train.epoch'.* train.epochs"),
        ("epochs=3", "train.epochs"),
        ("model.heads=3", "model.head.heads"),
        ("quite.another=3", "data.name, data.limit"),
        ("name=x", "'name'"),
        ("data=x", "'data'"),
        ("=3", "''"),
        ("data.limit", "KEY=VALUE.*'data.limit'"),
        ("data.limit=few", "data.limit .* 1.*none.*'few'"),
        ("data.limit=1.5", "'1.5'"),
        ("data.limit=0", "at least 1"),
        ("data.limit=-1", "at least 1"),
        ("data.limit=99999999999999999999", "data.limit.*9{20}"),
        ("data.limit=" + "9" * 5000, "data.limit.*9{20}"),
        ("train.epochs=-1", "at least 1"),
        ("train.watch=-1", "at least 0"),
        ("train.workers=100000", "256"),
        ("model.head.heads=1000000000", "1024"),
        ("train.epochs=none", "at least 1.*'none'"),
        ("train.rate=nan", "at least 0.*'nan'"),
        ("train.rate=inf", "'inf'"),
        ("train.clip=0", "above 0.*none"),
        ("model.width=-0.5", "above 0 .*64"),
        ("model.width=1e300", "above 0 .*64"),
        ("model.dropout=1.5", "0 to 1"),
        ("data.angle=11", "-10 to 10"),
        ("data.flip=maybe", "true.*false"),
        ("data.name=a\nb", r"printable.*'a\\nb'"),
        ("train.precision=fp23", "fp32, bf16.*'fp23'.*fp32"),
        ("model.mode=sof", "soft"),
        ("model.head.score=", "additive, dot.*none"),
        ("model.scores=dot,ditive", "additive, dot"),
        ("model.sizes=1,,2", "list.*whole number"),
        ("model.pair=1", "2 .*whole number.*text"),
        ("data.name=odd", "odd.*flipped"),
    ],
)
def test_invalid_settings_raise_with_the_accepted_values(change: str, message: str) -> None:
    assert re.search(message, settings_error(change))


def test_ranges_of_names_do_not_limit_sections_of_a_user() -> None:
    recipe = settings.apply(replace(Toy(), model=OwnModel()), ["model.width=128"])
    assert recipe.model == OwnModel(128)
    assert settings.restore(recipe, settings.to_json(recipe)) == recipe
    with pytest.raises(UserError, match="at least 1"):
        settings.apply(recipe, ["train.epochs=0"])


def test_long_invalid_values_are_truncated_in_messages() -> None:
    assert len(settings_error("data." + "x" * 10_000 + "=1")) < 1000
    assert len(settings_error("data.limit=" + "x" * 10_000)) < 200


def test_describe_lists_the_accepted_values_of_settings() -> None:
    found = {one.key: one for one in settings.describe(Toy())}
    assert found["train.steps"].accepts == "a whole number of at least 1, or none"
    assert found["train.precision"].accepts == "one of fp32, bf16"
    assert settings.format_value(found["train.precision"].value) == "fp32"
    assert settings.format_value(found["model.sizes"].value) == "8,16"


toys = st.builds(
    Toy,
    data=st.builds(
        Data,
        name=st.text(st.characters(exclude_categories=["C", "Z"]), max_size=5),
        limit=st.none() | st.integers(1, 10**9),
        flip=st.booleans(),
    ),
    model=st.builds(
        Model,
        width=st.floats(0, 64, exclude_min=True),
        head=st.builds(Head, heads=st.integers(1, 9), score=st.none() | st.sampled_from(Score)),
        sizes=st.lists(st.integers(-9, 9)).map(tuple),
        scores=st.lists(st.sampled_from(Score)).map(tuple),
        either=st.integers(0, 9) | st.just("auto"),
    ),
    train=st.builds(TrainConfig, rate=st.floats(0, 1e9), precision=st.sampled_from(Precision)),
)


@given(toys)
def test_json_round_trip_gives_an_equal_recipe(toy: Toy) -> None:
    written = json.loads(json.dumps(settings.to_json(toy), allow_nan=False))
    assert settings.restore(Toy(), written) == toy
    assert settings.describe_changes(settings.to_json(toy), written) == []


@given(toys)
def test_formatted_values_can_be_set(toy: Toy) -> None:
    flat = settings.flatten(toy)
    sets = [f"{key}={settings.format_value(value)}" for key, value in flat.items() if value != ""]
    again = settings.apply(replace(Toy(), data=replace(Data(), name=toy.data.name)), sets)
    assert settings.flatten(again) == flat


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.limit", "512", "data.limit .*none, not 512."),
        ("data.limit", True, "not true."),
        ("data.limit", -1, "not -1."),
        ("data.flip", 1, "true.*false.* 1."),
        ("train.precision", "fp23", "fp32, bf16, .*fp23."),
        ("model.sizes", [1, "2"], "whole number, .*1,2."),
        ("model.pair", [1], "2 comma-separated"),
    ],
)
def test_restoring_invalid_values_raises(key: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings.restore(Toy(), {**settings.to_json(Toy()), key: value})


def test_missing_and_unknown_settings_raise() -> None:
    written = settings.to_json(Toy())
    del written["train.clip"]
    with pytest.raises(UserError, match=r"train\.clip, x\.y"):
        settings.restore(Toy(), {**written, "x.y": 1})


def test_describe_changes_lists_each_difference() -> None:
    old = settings.to_json(Toy())
    new = settings.to_json(settings.apply(Toy(), ["data.limit=5", "model.sizes=8"]))
    assert settings.describe_changes(old, new) == [
        "data.limit is 5, was none",
        "model.sizes is 8, was 8,16",
    ]
    assert settings.describe_changes({"a": 1}, {"b": True}) == [
        "a no longer exists, was 1",
        "b is true, did not exist",
    ]
    assert settings.describe_changes({"a": 1}, {"a": 1.0}) == []
    assert settings.describe_changes({"a": 1}, {"a": True}) == ["a is true, was 1"]


def test_missing_settings_of_older_runs_get_their_default() -> None:
    now = settings.apply(Toy(), ["data.limit=5", "data.angle=3"])
    old = settings.to_json(now)
    for gained in ("data.angle", "model.sizes", "model.head.size"):
        old.pop(gained, None)
    found = settings.fill_defaults(old, now)
    assert (
        found["data.angle"] == 0 and found["data.limit"] == 5
    )  # the default of the field instead of the current value
    assert found["model.sizes"] == settings.to_json(Toy())["model.sizes"]
    assert settings.describe_changes(found, settings.to_json(now)) == ["data.angle is 3, was 0"]
    unknown = {**old, "data.gone": 1}
    assert settings.fill_defaults(unknown, now)["data.gone"] == 1


def test_a_new_section_counts_as_a_difference() -> None:
    new = settings.to_json(Toy())
    old = {key: value for key, value in new.items() if not key.startswith("model.")}
    assert settings.fill_defaults(old, Toy()) == old
    assert "model.width is 0.5, did not exist" in settings.describe_changes(old, new)


@pytest.mark.parametrize("name", list(recipes()))
def test_json_round_trip_restores_every_recipe(name: str) -> None:
    recipe = recipes()[name]()
    assert settings.restore(recipes()[name](), settings.to_json(recipe)) == recipe


def test_every_section_of_every_recipe_is_explained() -> None:
    for make in recipes().values():
        explanation = settings.explain(make())
        keys = settings.flatten(make())
        assert set(explanation) == {key.rpartition(".")[0] for key in keys}
        assert all(len(text) > 20 for text in explanation.values())


def test_choices_are_explained_by_their_enum_or_section() -> None:
    explanation = settings.explain(recipes()["scenes-soft"]())
    assert "`look`: How image features are pooled" in explanation["model"]
    for name in [one.name for one in fields(TrainConfig)]:
        assert f"`{name}`" in explanation["train"], name
    assert "`precision`:" not in explanation["train"], "the section explains it already"


def test_every_setting_is_explained_in_its_section() -> None:
    unexplained = []
    for name, make in recipes().items():
        explanation = settings.explain(make())
        for key in settings.flatten(make()):
            section, _, field_name = key.rpartition(".")
            if f"`{field_name}`" not in explanation[section]:
                unexplained.append(f"{name}: {key}")
    assert not unexplained, "explain these in the docstring of the section"
