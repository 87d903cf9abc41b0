"""Settings: what can be set, what is refused and with which words, and the way to JSON and back."""

import json
import subprocess
import sys
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overt.errors import BadInput
from overt.recipes import recipes, settings
from overt.recipes.recipe import NO_FIGURES, Precision, Train


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


@dataclass(frozen=True)
class Toy:
    name: str = "toy"
    about: str = "nothing to learn"
    paper: Any = field(default_factory=lambda: NO_FIGURES)
    data: Data = Data()
    model: Model = Model()
    train: Train = field(default_factory=Train)
    supervise: Head | None = None

    def build(self, context: object) -> Any:
        raise NotImplementedError


def refused(*changes: str) -> str:
    with pytest.raises(BadInput) as caught:
        settings.apply(Toy(), list(changes))
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence[-1] in ".?"
    return sentence


def test_flatten_names_every_field_of_every_section_and_nothing_else() -> None:
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
def test_a_value_is_read_by_the_type_of_its_field(change: str, value: object) -> None:
    changed = settings.apply(Toy(), [change])
    key = change.partition("=")[0].strip()
    assert settings.flatten(changed)[key] == value
    assert type(settings.flatten(changed)[key]) is type(value)
    others = {k: v for k, v in settings.flatten(changed).items() if k != key}
    assert others == {k: v for k, v in settings.flatten(Toy()).items() if k != key}


def test_the_last_of_two_wins_and_nothing_leaves_the_recipe_as_it_is() -> None:
    assert settings.apply(Toy(), ["data.limit=1", "data.limit=2"]).data.limit == 2
    assert settings.apply(Toy(), []) == Toy()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("train.epoch=3", "toy has no setting 'train.epoch'; the nearest are train.epochs"),
        ("epochs=3", "the nearest is train.epochs"),
        ("model.heads=3", "the nearest is model.head.heads"),
        ("quite.another=3", "there are data.name, data.limit"),
        ("name=x", "no setting 'name'"),
        ("data=x", "no setting 'data'"),
        ("=3", "no setting ''"),
        ("data.limit", "--set 'data.limit' has no '='; write KEY=VALUE"),
        ("data.limit=few", "data.limit takes a whole number of at least 1, or none, not 'few'."),
        ("data.limit=1.5", "a whole number"),
        ("data.limit=0", "at least 1"),
        ("data.limit=-1", "at least 1"),
        ("data.limit=99999999999999999999", "a whole number"),
        ("data.limit=" + "9" * 5000, "a whole number"),
        ("train.epochs=-1", "at least 1"),
        ("train.watch=-1", "a whole number of at least 0"),
        ("train.epochs=none", "a whole number of at least 1, not 'none'."),
        ("train.rate=nan", "a number of at least 0, not 'nan'."),
        ("train.rate=inf", "not 'inf'."),
        ("train.clip=0", "a number above 0, or none"),
        ("model.width=-0.5", "a number above 0"),
        ("model.dropout=1.5", "a number from 0 to 1"),
        ("data.angle=11", "from -10 to 10"),
        ("data.flip=maybe", "true or false"),
        ("data.name=a\nb", "printable text, not 'a\\nb'"),
        ("train.precision=fp23", "one of fp32, bf16, not 'fp23'; did you mean fp32?"),
        ("model.mode=sof", "did you mean soft?"),
        ("model.head.score=", "one of additive, dot, or none"),
        ("model.scores=dot,ditive", "each one of additive, dot"),
        ("model.sizes=1,,2", "a comma-separated list, each a whole number"),
        ("model.pair=1", "2 values with commas between: a whole number; printable text"),
        ("data.name=odd", "these settings do not go together: odd data cannot be flipped."),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_right(change: str, said: str) -> None:
    assert said in refused(change)


def test_a_long_mistake_is_cut() -> None:
    assert len(refused("data." + "x" * 10_000 + "=1")) < 1000
    assert len(refused("data.limit=" + "x" * 10_000)) < 200


def test_describe_says_what_each_setting_takes() -> None:
    found = {one.key: one for one in settings.describe(Toy())}
    assert found["train.steps"].wants == "a whole number of at least 1, or none"
    assert found["train.precision"].wants == "one of fp32, bf16"
    assert settings.shown(found["train.precision"].value) == "fp32"
    assert settings.shown(found["model.sizes"].value) == "8,16"


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
        width=st.floats(0, 1e9, exclude_min=True),
        head=st.builds(Head, heads=st.integers(1, 9), score=st.none() | st.sampled_from(Score)),
        sizes=st.lists(st.integers(-9, 9)).map(tuple),
        scores=st.lists(st.sampled_from(Score)).map(tuple),
        either=st.integers(0, 9) | st.just("auto"),
    ),
    train=st.builds(Train, rate=st.floats(0, 1e9), precision=st.sampled_from(Precision)),
)


@given(toys)
def test_json_leads_back_to_an_equal_recipe(toy: Toy) -> None:
    written = json.loads(json.dumps(settings.to_json(toy), allow_nan=False))
    assert settings.restore(Toy(), written) == toy
    assert settings.changes(settings.to_json(toy), written) == []


@given(toys)
def test_what_is_shown_can_be_set(toy: Toy) -> None:
    flat = settings.flatten(toy)
    sets = [f"{key}={settings.shown(value)}" for key, value in flat.items() if value != ""]
    again = settings.apply(replace(Toy(), data=replace(Data(), name=toy.data.name)), sets)
    assert settings.flatten(again) == flat


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("data.limit", "512", "data.limit takes a whole number of at least 1, or none, not 512."),
        ("data.limit", True, "not true."),
        ("data.limit", -1, "not -1."),
        ("data.flip", 1, "true or false, not 1."),
        ("train.precision", "fp23", "one of fp32, bf16, not fp23."),
        ("model.sizes", [1, "2"], "each a whole number, not 1,2."),
        ("model.pair", [1], "2 values"),
    ],
)
def test_a_changed_file_is_not_believed(key: str, value: object, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        settings.restore(Toy(), {**settings.to_json(Toy()), key: value})


def test_settings_of_another_version_are_not_guessed() -> None:
    written = settings.to_json(Toy())
    del written["train.clip"]
    with pytest.raises(
        BadInput, match=r"another version of it, which differs in train\.clip, x\.y;"
    ):
        settings.restore(Toy(), {**written, "x.y": 1})


def test_changes_lists_each_difference() -> None:
    old = settings.to_json(Toy())
    new = settings.to_json(settings.apply(Toy(), ["data.limit=5", "model.sizes=8"]))
    assert settings.changes(old, new) == [
        "data.limit is 5, was none",
        "model.sizes is 8, was 8,16",
    ]
    assert settings.changes({"a": 1}, {"b": True}) == [
        "a is gone, was 1",
        "b is true, was not there",
    ]
    assert settings.changes({"a": 1}, {"a": 1.0}) == []
    assert settings.changes({"a": 1}, {"a": True}) == ["a is true, was 1"]


def test_what_earlier_settings_do_not_name_stands_at_its_default() -> None:
    now = settings.apply(Toy(), ["data.limit=5", "data.angle=3"])
    old = settings.to_json(now)
    for gained in ("data.angle", "model.sizes", "model.head.size"):
        old.pop(gained, None)
    found = settings.completed(old, now)
    assert found["data.angle"] == 0 and found["data.limit"] == 5  # the field's default, not ours
    assert found["model.sizes"] == settings.to_json(Toy())["model.sizes"]
    assert settings.changes(found, settings.to_json(now)) == ["data.angle is 3, was 0"]
    unknown = {**old, "data.gone": 1}
    assert settings.completed(unknown, now)["data.gone"] == 1


def test_a_section_that_is_new_as_a_whole_is_a_difference() -> None:
    new = settings.to_json(Toy())
    old = {key: value for key, value in new.items() if not key.startswith("model.")}
    assert settings.completed(old, Toy()) == old
    assert "model.width is 0.5, was not there" in settings.changes(old, new)


def test_checking_settings_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "import overt.recipes.settings\n"
        "print(*{'torch', 'numpy', 'scipy', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_section_of_every_recipe_says_what_it_means() -> None:
    for make in recipes().values():
        told = settings.explain(make())
        keys = settings.flatten(make())
        assert set(told) == {key.rpartition(".")[0] for key in keys}
        assert all(len(text) > 20 for text in told.values())


def test_choices_are_explained_by_their_own_words_unless_the_section_does() -> None:
    told = settings.explain(recipes()["scenes-soft"]())
    assert "`look`: How the model looks at the image." in told["model"]
    for name in [one.name for one in fields(Train)]:
        assert f"`{name}`" in told["train"], name
    assert "`precision`:" not in told["train"], "it is told already"


def test_every_setting_of_every_recipe_is_named_in_the_words_of_its_section() -> None:
    silent = []
    for name, make in recipes().items():
        told = settings.explain(make())
        for key in settings.flatten(make()):
            section, _, field_name = key.rpartition(".")
            if f"`{field_name}`" not in told[section]:
                silent.append(f"{name}: {key}")
    assert not silent, "say in the section's docstring what these do"
