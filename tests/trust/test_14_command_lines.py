"""Trust 14: whatever is typed or lies in a file, there is an answer or one sentence."""

import argparse
import dataclasses
import io
import json
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from overt import files
from overt.errors import BadInput, Damaged
from overt.recipes import folder, recipes, settings
from tests import toys
from tests.serve.conftest import write_run
from tests.test_bad_input import check_sentence, ended, leave_run, use_toys
from tests.trust.hostile import mutated

REAL = recipes()
KEYS = sorted({key for make in REAL.values() for key in settings.flatten(make())})
LIMIT = 600  # seconds, on however busy a machine, in which any command line here has an end

COMMANDS = "run table list demo report doctor look serve measure data check prepare".split()
FLAGS = """--out --seed --device --data --set --rows --seeds --resume --json --version --help -h
    --out=a --x --repair --layer --head --query --map --host --port --limit --measures --portion
    --compare --maps --over --list""".split()
THINGS = """toy toys toy-files plain all cifar10 none -- soft soft/model photo.png file . a b/c run
    0 -1 3 999999999999 cpu cuda:9 = raw rollout 127.0.0.1 hf:no/model timm:none ../x /etc/passwd
    photo.png/x nan 1e999""".split()
VALUES = st.one_of(
    st.text(max_size=8),
    st.floats().map(str),
    st.integers().map(str),
    st.sampled_from(["", "none", "true", "[]", "{}", "'", "1,2", "0x10", "1_0", "٣", "½", "-0"]),
)
WORDS = st.one_of(
    st.sampled_from(COMMANDS),
    st.sampled_from(FLAGS),
    st.sampled_from(THINGS),
    st.builds("{}={}".format, st.sampled_from([*settings.flatten(toys.toy()), "x.y"]), VALUES),
    st.text(max_size=12),
    st.binary(max_size=6).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
)
LINES = st.tuples(st.sampled_from(COMMANDS), st.lists(WORDS, max_size=8)).map(
    lambda line: [line[0], *line[1]]
)
RUNS = st.lists(WORDS, max_size=6).map(lambda line: ["run", "toy", "--out", "new", *line])
LOOKS = st.lists(WORDS, max_size=5).map(lambda line: ["look", "soft", "photo.png", *line])


@pytest.fixture(scope="module")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a run, a network, a photo and a file, where nothing is trained or fetched."""
    from overt.serve.shelf import offer

    place = tmp_path_factory.mktemp("fuzz")
    (place / "file").write_text("mine")
    Image.fromarray(np.zeros((40, 60, 3), np.uint8)).save(place / "photo.png")
    leave_run(place / "run")
    write_run(place / "soft")
    patch = pytest.MonkeyPatch()
    patch.chdir(place)
    use_toys(patch)

    def run(recipe: Any, out: Path, **options: Any) -> dict[str, Any]:
        return {"recipe": recipe.name, "seed": options["seed"], "ours": {}}

    def measured(*args: Any, **options: Any) -> Any:
        raise BadInput("nothing is measured here.")

    patch.setattr("overt.recipes.running.run", run)
    patch.setattr("overt.recipes.measuring.run", measured)
    patch.setattr("overt.serve.running.serve", lambda models, *more: offer(models))
    patch.setattr("overt.recipes.demo.pick", lambda labels: labels)
    patch.setattr("overt.recipes.demo.run_demo", lambda *args, **options: [])
    patch.setattr("overt.data.sets.fetch", lambda root, chosen, on_progress=None: "fetched")
    yield place
    patch.undo()


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """A hang is an error and not a wait."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"no end within {seconds} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def judged(line: list[str]) -> int:
    """The exit code of a line, after all that must hold of it."""
    with within(LIMIT):
        code, out, err = ended(line)
    assert code in (0, 2), (line, err)
    assert "Traceback" not in out + err, line
    if code == 2:
        check_sentence("overt: " + err.rpartition("overt: ")[2])
    assert Path("file").read_text() == "mine" and files.is_whole(Path("run"))
    assert files.is_whole(Path("soft/model"))
    return code


def is_asked(line: list[str]) -> bool:
    """Whether a line may be run here: completion would change the shell of whoever tests."""
    return not {"--install-completion", "--show-completion"} & set(line)


def fuzz(
    lines: st.SearchStrategy[list[str]],
    most: int,
    also: Callable[[list[str]], object] = lambda line: None,
) -> dict[int, int]:
    """How often lines end with 0 and with 2; `also` is given each of them too."""
    codes = {0: 0, 2: 0}

    @hypothesis.settings(max_examples=most)
    @hypothesis.given(lines.filter(is_asked))
    def one(line: list[str]) -> None:
        codes[judged(line)] += 1
        also(line)

    one()
    return codes


def short_program(line: list[str]) -> bool:
    """Whether a command line of the usual kind ends otherwise than with 0 or a sentence.

    Options are taken by argparse, settings split at the sign of equality and converted to the kind
    of what is there, files opened: nothing that a reviewer would stop at.
    """
    parser = argparse.ArgumentParser(prog="short", exit_on_error=False)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("what", nargs="*")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            asked, _ = parser.parse_known_args(line)
            recipe = toys.toy()
            for change in (*asked.set, *(word for word in asked.what if "=" in word)):
                recipe = naively(recipe, change)
            for name in asked.what[1:] if asked.command == "look" else ():
                Image.open(name).convert("RGB")
            if asked.out is not None and asked.command == "run":
                (asked.out / "results.json").exists()
    except (SystemExit, argparse.ArgumentError):
        return False
    except Exception:
        return True
    return False


def test_a_short_program_does_not_end_so_well() -> None:
    assert not short_program(["run", "toy", "--seed", "x"])  # argparse has a sentence for it
    assert not short_program(["list"])
    assert short_program(["run", "toy", "--set", "train.epochs"])
    assert short_program(["look", "soft", "no.png"])


def test_a_few_fuzzed_command_lines(playground: Path) -> None:
    codes = fuzz(RUNS | LOOKS | LINES, 40)
    assert codes[2] > 10


@pytest.mark.long
def test_a_thousand_fuzzed_command_lines(playground: Path, reached: Callable[..., None]) -> None:
    count = 1_000
    naive: list[bool] = []
    codes = fuzz(RUNS | LOOKS | LINES, count, lambda line: naive.append(short_program(line)))
    assert sum(codes.values()) >= count and codes[2] > count // 4 and codes[0] > 0
    assert sum(naive) > count // 20
    reached(
        14,
        "1,000 command lines: exit 0 or 2 with one sentence, no traceback, no hang",
        f"{codes[0]} ended with 0 and {codes[2]} with 2 of {sum(codes.values())}",
        f"argparse, splitting and opening end in a traceback in {sum(naive)}",
    )


# --- recipes


def naively(recipe: Any, change: str) -> Any:
    """What a short program does with KEY=VALUE."""
    key, value = change.split("=")
    section, name = key.split(".")
    part = getattr(recipe, section)
    kind = type(getattr(part, name))
    new = dataclasses.replace(part, **{name: kind(value)})
    return dataclasses.replace(recipe, **{section: new})


@pytest.mark.long
def test_a_thousand_fuzzed_settings_of_recipes(reached: Callable[..., None]) -> None:
    """Refused in a sentence, or a recipe that is the same after being written and read."""
    told = {"taken": 0, "refused": 0, "raised": 0}
    known = st.integers(0, 99).map(lambda place: lambda keys: keys[place % len(keys)])
    wrong = st.sampled_from([*KEYS, "x.y", "train", ""]).map(lambda key: lambda keys: key)
    change = st.tuples(known | wrong, VALUES | st.sampled_from(["1", "2", "0.5", "none"]))
    count = 1_000

    @hypothesis.settings(max_examples=count)
    @hypothesis.given(st.sampled_from(sorted(REAL)), st.lists(change, min_size=1, max_size=2))
    def one(name: str, drawn: Sequence[tuple[Callable[[list[str]], str], str]]) -> None:
        recipe = REAL[name]()
        keys = list(settings.flatten(recipe))
        changes = [f"{key(keys)}={value}" for key, value in drawn]
        try:
            found = settings.apply(recipe, changes)
        except BadInput as problem:
            check_sentence(f"overt: {str(problem).encode('utf-8', 'replace').decode()}.\n")
            told["refused"] += 1
        else:
            written = json.loads(json.dumps(settings.to_json(found), allow_nan=False))
            assert settings.flatten(settings.restore(recipe, written)) == settings.flatten(found)
            told["taken"] += 1
        try:
            naively(recipe, changes[0])
        except Exception:
            told["raised"] += 1

    one()
    assert told["refused"] > count // 10 and told["taken"] > 10 and told["raised"] > count // 10
    reached(
        14,
        "1,000 recipes: taken or refused in one sentence",
        f"{told['taken']} taken and {told['refused']} refused; 0 other exceptions",
        f"splitting and converting raises other exceptions in {told['raised']}",
    )


def test_fuzzed_files_of_a_run(tmp_path: Path, full: bool, reached: Callable[..., None]) -> None:
    """JSON that was changed, byte by byte or value by value: a sentence, never another exception.

    No YAML is read anywhere.
    """
    dice = random.Random(14)
    leave_run(tmp_path / "run", status="stopped")
    path = tmp_path / "run/results.json"
    whole = path.read_bytes()
    value = json.loads(whole)
    strange: list[Any] = [None, [], {}, "", 0, -1, 1e308, "\0", "../..", [[]], {"a": {}}, True]
    count = 1_000 if full else 300
    refused = raised = 0
    for number in range(count):
        if number % 2:
            data = mutated(whole, dice)
        else:
            changed = json.loads(whole)
            place, keys = changed, []
            while isinstance(place, dict) and place:
                keys.append(dice.choice(list(place)))
                if dice.random() < 0.5 or not isinstance(place[keys[-1]], dict):
                    break
                place = place[keys[-1]]
            if keys:
                place[keys[-1]] = dice.choice(strange)
            data = json.dumps(changed).encode()
        path.write_bytes(data)
        try:
            folder.claim(tmp_path / "run", toys.toy(), 0, resume=True)
        except (BadInput, Damaged) as problem:
            refused += 1
            told = str(problem)
            assert "\n" not in told
        try:
            held = json.loads(data)
            assert set(held) >= set(value)
            settings.restore(toys.toy(), held["settings"])
        except (BadInput, Damaged):
            pass
        except Exception:
            raised += 1
    assert refused > count // 4 and raised
    with suppress(FileNotFoundError):
        path.unlink()
    reached(
        14,
        "files of a run: taken or refused in one sentence",
        f"{refused} refused of {count}; 0 other exceptions",
        f"json.load and look-ups raise other exceptions in {raised}",
    )
