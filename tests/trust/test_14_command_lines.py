"""Trust 14: fuzzed command lines, settings and run files succeed or fail with one line."""

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

from overt import io as overt_io
from overt.errors import CorruptFileError, UserError
from overt.experiments import run_folder, settings
from overt.papers.catalog import recipes
from tests import toys
from tests.inspect.server.conftest import write_run
from tests.test_bad_input import check_error_line, run_command, use_toys, write_toy_run
from tests.trust.hostile import mutate_bytes

REAL = recipes()
KEYS = sorted({key for make in REAL.values() for key in settings.flatten(make())})
TIMEOUT = 600  # seconds for one command line, also on a busy machine

COMMANDS = "run table list demo report doctor look serve measure data check prepare".split()
FLAGS = """--out --seed --device --data --set --rows --seeds --resume --json --version --help -h
    --out=a --x --repair --layer --head --query --map --host --port --limit --measures --portion
    --compare --maps --over --list""".split()
ARGUMENTS = """toy toys toy-files plain all cifar10 none -- soft soft/model photo.png file . a b/c
    run 0 -1 3 999999999999 cpu cuda:9 = raw rollout 127.0.0.1 hf:no/model timm:none ../x
    /etc/passwd photo.png/x nan 1e999""".split()
VALUES = st.one_of(
    st.text(max_size=8),
    st.floats().map(str),
    st.integers().map(str),
    st.sampled_from(["", "none", "true", "[]", "{}", "'", "1,2", "0x10", "1_0", "٣", "½", "-0"]),
)
WORDS = st.one_of(
    st.sampled_from(COMMANDS),
    st.sampled_from(FLAGS),
    st.sampled_from(ARGUMENTS),
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
    """A folder with a run, a model, a photo and a file; training and downloads are patched."""
    from overt.inspect.server.model_cache import find_models

    place = tmp_path_factory.mktemp("fuzz")
    (place / "file").write_text("mine")
    Image.fromarray(np.zeros((40, 60, 3), np.uint8)).save(place / "photo.png")
    write_toy_run(place / "run")
    write_run(place / "soft")
    patch = pytest.MonkeyPatch()
    patch.chdir(place)
    use_toys(patch)

    def run(recipe: Any, out: Path, build: Any, **options: Any) -> dict[str, Any]:
        return {"recipe": recipe.name, "seed": options["seed"], "ours": {}}

    def fail_to_measure(*args: Any, **options: Any) -> Any:
        raise UserError("nothing is measured here.")

    patch.setattr("overt.experiments.runner.run", run)
    patch.setattr("overt.inspect.measure.run_measure", fail_to_measure)
    patch.setattr(
        "overt.inspect.server.run_server.serve", lambda models, *more: find_models(models)
    )
    patch.setattr("overt.papers.demo.select_rows", lambda labels: labels)
    patch.setattr("overt.papers.demo.run_demo", lambda *args, **options: [])
    patch.setattr("overt.papers.demo.comparison_table", lambda out, rows: [])
    patch.setattr(
        "overt.data.catalog.download_dataset", lambda root, chosen, on_progress=None: "fetched"
    )
    yield place
    patch.undo()


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise if the block takes longer."""

    def raise_timeout(number: int, frame: object) -> None:
        raise AssertionError(f"no end within {seconds} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def checked_exit_code(line: list[str]) -> int:
    """Run a command line, check its output and return its exit code."""
    with time_limit(TIMEOUT):
        code, out, err = run_command(line)
    assert code in (0, 2), (line, err)
    assert "Traceback" not in out + err, line
    if code == 2:
        check_error_line("overt: " + err.rpartition("overt: ")[2])
    assert Path("file").read_text() == "mine" and overt_io.is_intact(Path("run"))
    assert overt_io.is_intact(Path("soft/model"))
    return code


def is_allowed(line: list[str]) -> bool:
    """Whether a line may run here: completion would change the shell of the user."""
    return not {"--install-completion", "--show-completion"} & set(line)


def fuzz(
    lines: st.SearchStrategy[list[str]],
    most: int,
    also: Callable[[list[str]], object] = lambda line: None,
) -> dict[int, int]:
    """Count lines that exit with 0 and with 2; `also` is called with each line too."""
    codes = {0: 0, 2: 0}

    @hypothesis.settings(max_examples=most)
    @hypothesis.given(lines.filter(is_allowed))
    def one(line: list[str]) -> None:
        codes[checked_exit_code(line)] += 1
        also(line)

    one()
    return codes


def naive_program_fails(line: list[str]) -> bool:
    """Whether a naive program ends with an unexpected exception.

    It parses options with argparse, splits settings at `=` and converts them to the type of the
    current value, and opens files.
    """
    parser = argparse.ArgumentParser(prog="short", exit_on_error=False)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("what", nargs="*")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            options, _ = parser.parse_known_args(line)
            recipe = toys.toy()
            for change in (*options.set, *(word for word in options.what if "=" in word)):
                recipe = apply_naively(recipe, change)
            for name in options.what[1:] if options.command == "look" else ():
                Image.open(name).convert("RGB")
            if options.out is not None and options.command == "run":
                (options.out / "results.json").exists()
    except (SystemExit, argparse.ArgumentError):
        return False
    except Exception:
        return True
    return False


def test_a_naive_program_fails_on_bad_command_lines() -> None:
    assert not naive_program_fails(["run", "toy", "--seed", "x"])  # argparse reports it
    assert not naive_program_fails(["list"])
    assert naive_program_fails(["run", "toy", "--set", "train.epochs"])
    assert naive_program_fails(["look", "soft", "no.png"])


def test_fuzzed_command_lines_exit_with_0_or_2(playground: Path) -> None:
    codes = fuzz(RUNS | LOOKS | LINES, 40)
    assert codes[2] > 10


@pytest.mark.long
def test_a_thousand_fuzzed_command_lines_exit_with_0_or_2(
    playground: Path, record_result: Callable[..., None]
) -> None:
    count = 1_000
    naive: list[bool] = []
    codes = fuzz(RUNS | LOOKS | LINES, count, lambda line: naive.append(naive_program_fails(line)))
    assert sum(codes.values()) >= count and codes[2] > count // 4 and codes[0] > 0
    assert sum(naive) > count // 20
    record_result(
        14,
        "1,000 command lines: exit 0 or 2 with one line, no traceback, no hang",
        f"{codes[0]} exit with 0 and {codes[2]} with 2 of {sum(codes.values())}",
        f"argparse, splitting and opening end in a traceback in {sum(naive)}",
    )


# --- recipes


def apply_naively(recipe: Any, change: str) -> Any:
    """Apply KEY=VALUE without checks."""
    key, value = change.split("=")
    section, name = key.split(".")
    part = getattr(recipe, section)
    kind = type(getattr(part, name))
    new = dataclasses.replace(part, **{name: kind(value)})
    return dataclasses.replace(recipe, **{section: new})


@pytest.mark.long
def test_a_thousand_fuzzed_settings_apply_or_raise_one_line(
    record_result: Callable[..., None],
) -> None:
    """Settings raise one line, or give a recipe that is equal after writing and reading."""
    counts = {"taken": 0, "refused": 0, "raised": 0}
    known_keys = st.integers(0, 99).map(lambda place: lambda keys: keys[place % len(keys)])
    unknown_keys = st.sampled_from([*KEYS, "x.y", "train", ""]).map(lambda key: lambda keys: key)
    change = st.tuples(
        known_keys | unknown_keys, VALUES | st.sampled_from(["1", "2", "0.5", "none"])
    )
    count = 1_000

    @hypothesis.settings(max_examples=count)
    @hypothesis.given(st.sampled_from(sorted(REAL)), st.lists(change, min_size=1, max_size=2))
    def one(name: str, drawn: Sequence[tuple[Callable[[list[str]], str], str]]) -> None:
        recipe = REAL[name]()
        keys = list(settings.flatten(recipe))
        changes = [f"{key(keys)}={value}" for key, value in drawn]
        try:
            found = settings.apply(recipe, changes)
        except UserError as problem:
            check_error_line(f"overt: {str(problem).encode('utf-8', 'replace').decode()}.\n")
            counts["refused"] += 1
        else:
            written = json.loads(json.dumps(settings.to_json(found), allow_nan=False))
            assert settings.flatten(settings.restore(recipe, written)) == settings.flatten(found)
            counts["taken"] += 1
        try:
            apply_naively(recipe, changes[0])
        except Exception:
            counts["raised"] += 1

    one()
    assert (
        counts["refused"] > count // 10 and counts["taken"] > 10 and counts["raised"] > count // 10
    )
    record_result(
        14,
        "1,000 recipes: applied or rejected with one line",
        f"{counts['taken']} applied and {counts['refused']} rejected; 0 other exceptions",
        f"splitting and converting raises other exceptions in {counts['raised']}",
    )


def test_fuzzed_run_files_load_or_raise_one_line(
    tmp_path: Path, full: bool, record_result: Callable[..., None]
) -> None:
    """JSON with changed bytes or values raises one line, never another exception."""
    rng = random.Random(14)
    write_toy_run(tmp_path / "run", status="stopped")
    path = tmp_path / "run/results.json"
    intact = path.read_bytes()
    value = json.loads(intact)
    strange_values: list[Any] = [
        None,
        [],
        {},
        "",
        0,
        -1,
        1e308,
        "\0",
        "../..",
        [[]],
        {"a": {}},
        True,
    ]
    count = 1_000 if full else 300
    refused = raised = 0
    for number in range(count):
        if number % 2:
            data = mutate_bytes(intact, rng)
        else:
            changed = json.loads(intact)
            place, keys = changed, []
            while isinstance(place, dict) and place:
                keys.append(rng.choice(list(place)))
                if rng.random() < 0.5 or not isinstance(place[keys[-1]], dict):
                    break
                place = place[keys[-1]]
            if keys:
                place[keys[-1]] = rng.choice(strange_values)
            data = json.dumps(changed).encode()
        path.write_bytes(data)
        try:
            run_folder.check_claim(tmp_path / "run", toys.toy(), 0, resume=True)
        except (UserError, CorruptFileError) as problem:
            refused += 1
            message = str(problem)
            assert "\n" not in message
        try:
            parsed = json.loads(data)
            assert set(parsed) >= set(value)
            settings.restore(toys.toy(), parsed["settings"])
        except (UserError, CorruptFileError):
            pass
        except Exception:
            raised += 1
    assert refused > count // 4 and raised
    with suppress(FileNotFoundError):
        path.unlink()
    record_result(
        14,
        "files of a run: applied or rejected with one line",
        f"{refused} rejected of {count}; 0 other exceptions",
        f"json.load and look-ups raise other exceptions in {raised}",
    )
