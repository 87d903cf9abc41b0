"""Bad input through the real command line: one sentence, the right exit code, nothing lost."""

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import strategies as st

from overt import cli, files
from overt.recipes import folder, recipes, settings, tables
from tests import toys

REAL = recipes()
SMALL = ("--device", "cpu", "--set", "data.limit=8", "--set", "train.epochs=1")

Refuse = Callable[..., str]


def ended(args: list[str]) -> tuple[int, str, str]:
    """The exit code of a command line, with its stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(args)
    return code, out.getvalue(), err.getvalue()


def check_sentence(err: str) -> str:
    assert err.startswith("overt: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert "Traceback" not in err and err.rstrip()[-1] in ".?)", err
    return err[len("overt: ") :].rstrip()


def contents(place: Path) -> dict[str, bytes | None]:
    """Every file below a folder, but for locks."""
    return {
        str(path.relative_to(place)): path.read_bytes() if path.is_file() else None
        for path in place.rglob("*")
        if path.name != ".lock"
    }


def use_toys(patch: pytest.MonkeyPatch) -> None:
    """The commands find toys and no recipes."""
    patch.setattr("overt.recipes.recipes", lambda: dict(toys.RECIPES))
    patch.setattr(tables, "tables", lambda: {"toys": toys.TABLE, "needy": toys.NEEDY})
    for name in ("OVERT_DATA", "OVERT_TRACEBACK", "RANK", "WORLD_SIZE"):
        patch.delenv(name, raising=False)


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """`refuse("run", ...)` checks exit code 2, one sentence and that no file changed."""
    use_toys(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def refuse(*args: str | Path, code: int = 2) -> str:
        before = contents(tmp_path)
        got, _, err = ended([str(one) for one in args])
        assert got == code, err
        after = contents(tmp_path)
        assert {name: after.get(name) for name in before} == before
        return check_sentence(err)

    return refuse


def leave_run(out: Path, *sets: str, seed: int = 0, status: str = "done") -> Path:
    toys.leave(out, settings.apply(toys.toy(), sets), seed, status)
    return out


# Names and values


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run", "toi"], "there is no recipe 'toi'; the nearest are toy, toy"),
        (["run", "\x1b[31m"], "there is no recipe '\\x1b[31m'"),
        (["run", "toy", "--set", "train.epoch=1"], "no setting 'train.epoch'; the nearest are"),
        (["run", "toy", "--set", "train.epochs=many"], "a whole number of at least 1"),
        (["run", "toy", "--set", "train.epochs=0"], "a whole number of at least 1"),
        (["run", "toy", "--set", "train.precision=fp23"], "did you mean fp32?"),
        (["run", "toy", "--set", "train.rate=nan"], "a number"),
        (["run", "toy", "--set", "train.epochs"], "has no '='"),
        (["run", "toy", "--seed", "-1"], "--seed"),
        (["run", "toy", "--seed", "pi"], "--seed"),
        (["run", "toy", "--device", "gpu"], "there is no device 'gpu'"),
        (["run", "toy", "--sed", "1"], "--seed"),
        (["run", "toy", "more"], "unexpected extra argument"),
        (["run", "toy", "--data", "/nowhere"], "--data names '/nowhere', which is not a folder"),
        (["table", "toi"], "there is no table 'toi'; the nearest is toys"),
        (["table", "toys", "--rows", "wid"], "table toys has no row 'wid'; the nearest is wide"),
        (["table", "toys", "--seeds", "0"], "--seeds"),
        (["table", "toys", "--set", "x=1"], "has no setting 'x'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_names_and_values(refuse: Refuse, tmp_path: Path, args: list[str], said: str) -> None:
    assert said in refuse(*args, "--out", "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["train"], "No such command 'train'"),
        (["run"], "Missing argument 'RECIPE'"),
        (["run", "toy"], "Missing option '--out'"),
        (["list", "nothing-like-it"], "there is no recipe or table 'nothing-like-it'"),
        (["report"], "Missing argument"),
        (["report", "none"], "'none' is not a folder"),
        (["report", "."], "holds no run"),
        (["doctor", "."], "holds no run"),
        (["doctor", "none"], "not a folder"),
        (["doctor", "--data", "none"], "--data names 'none'"),
        (["data", "check"], "No data folder is named"),
        (
            ["data", "check", "cifar11"],
            "There is no data set 'cifar11'; the nearest: cifar10, cifar100",
        ),
        (["data", "prepare", "daquar", "--data", "."], "cannot be fetched by a program"),
        (["data", "prepare", "trec6", "--data", "a.txt"], "a.txt is a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_commands(refuse: Refuse, tmp_path: Path, args: list[str], said: str) -> None:
    (tmp_path / "a.txt").touch()
    assert said in refuse(*args)


# Folders


def test_a_file_in_the_place_of_a_folder(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refuse("run", "toy", "--out", "file")
    assert "is a file" in refuse("run", "toy", "--out", "file/below")
    assert "is a file" in refuse("table", "toys", "--out", "file/below")
    assert "is a file" in refuse("report", leave_run(tmp_path / "r"), "--out", "file/page.html")


def test_a_folder_that_cannot_be_written(refuse: Refuse) -> None:
    if not Path("/proc").is_dir():
        pytest.skip("this system has no /proc")
    assert "/proc/overt" in refuse("run", "toy", "--out", "/proc/overt")


def test_a_folder_with_somebody_elses_files(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("hard work")
    assert "thesis.tex" in refuse("run", "toy", "--out", "mine")


def test_a_finished_run(refuse: Refuse, tmp_path: Path) -> None:
    leave_run(tmp_path / "a")
    assert "holds a finished run" in refuse("run", "toy", "--out", "a")


def test_an_unfinished_run(refuse: Refuse, tmp_path: Path) -> None:
    leave_run(tmp_path / "a", status="stopped")
    assert "add --resume" in refuse("run", "toy", "--out", "a")


def test_nothing_to_resume(refuse: Refuse) -> None:
    assert "no run to resume" in refuse("run", "toy", "--out", "a", "--resume")


def test_resume_with_other_settings_or_seed(refuse: Refuse, tmp_path: Path) -> None:
    leave_run(tmp_path / "a", "data.limit=9", status="stopped")
    assert "data.limit is none, was 9" in refuse("run", "toy", "--out", "a", "--resume")
    said = refuse("run", "toy", "--out", "a", "--resume", "--set", "data.limit=9", "--seed", "3")
    assert "the seed is 3, was 0" in said


def test_resume_with_another_recipe(refuse: Refuse, tmp_path: Path) -> None:
    leave_run(tmp_path / "a", status="stopped")
    said = refuse("run", "toy-stated", "--out", "a", "--resume")
    assert "the recipe is toy-stated, was toy" in said


@pytest.mark.parametrize("text", ["{", "[]", '{"status": 1}', "\0"])
def test_corrupt_results(refuse: Refuse, tmp_path: Path, text: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/results.json").write_text(text)
    assert "a/results.json" in refuse("run", "toy", "--out", "a", "--resume")
    assert "results.json" in refuse("doctor", "a")


def test_a_finished_run_that_was_changed_since(refuse: Refuse, tmp_path: Path) -> None:
    leave_run(tmp_path / "a")
    path = tmp_path / "a/results.json"
    path.write_text(path.read_text().replace("0.25", "0.95"))
    assert "results.json" in refuse("run", "toy", "--out", "a", "--resume")


def test_a_table_over_runs_of_other_settings(refuse: Refuse, tmp_path: Path) -> None:
    leave_run(tmp_path / "t/plain/seed-0")
    args = ("table", "toys", "--rows", "plain", "--out", "t", "--seeds", "1")
    assert "holds a finished run" in refuse(*args, "--set", "data.limit=3")


def test_a_run_that_another_process_is_busy_with(refuse: Refuse, tmp_path: Path) -> None:
    leave_run(tmp_path / "a", status="running")
    (tmp_path / "new").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", toys.HOLD, str(tmp_path / "a"), str(tmp_path / "new")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert str(other.pid) in refuse("run", "toy", "--out", "a", "--resume")
        assert str(other.pid) in refuse("run", "toy", "--out", "new")
        other.communicate("")


# Data


def test_no_data_folder(refuse: Refuse) -> None:
    assert "--data or OVERT_DATA" in refuse("run", "toy-files", "--out", "a")


def test_a_data_set_that_is_not_there(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    said = refuse("run", "toy-files", "--out", "a", "--data", "data")
    assert "toy-files needs the data set cifar10, not found in data" in said
    said = refuse("table", "needy", "--out", "t", "--data", "data")
    assert "needs the data set cifar10" in said
    assert not (tmp_path / "a").exists() and not (tmp_path / "t").exists()


def test_a_data_folder_in_the_environment_that_is_not_there(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERT_DATA", "none")
    assert "OVERT_DATA names 'none'" in refuse("run", "toy-files", "--out", "a")


def cifar10(root: Path, records: int = 20) -> Path:
    """Files in the official layout, much too small: what a broken download may leave."""
    (root / "cifar-10-batches-bin").mkdir(parents=True)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        data = bytes(3073) * records
        (root / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(data)
    return root


def test_a_truncated_data_file_is_found(refuse: Refuse, tmp_path: Path) -> None:
    cifar10(tmp_path / "data")
    assert "data_batch_1.bin" in refuse("data", "check", "cifar10", "--data", "data")


# Real recipes that begin to run


@pytest.fixture
def real(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """As `refuse`, with the recipes that are shipped."""
    for name in ("scenes-soft", "cifar10-cnn"):
        if name not in REAL:
            pytest.skip(f"{name} is not there")
    monkeypatch.setattr("overt.recipes.recipes", lambda: dict(REAL))
    return refuse


def test_a_truncated_data_file(real: Refuse, tmp_path: Path) -> None:
    cifar10(tmp_path / "data")
    broken = tmp_path / "data/cifar-10-batches-bin/data_batch_3.bin"
    broken.write_bytes(broken.read_bytes()[:-100])
    said = real("run", "cifar10-cnn", "--out", "a", "--data", "data", *SMALL)
    assert "data_batch_" in said


def test_a_loss_that_is_not_finite(real: Refuse, tmp_path: Path) -> None:
    wild = ("--set", "train.rate=1e30", "--set", "train.clip=none", "--set", "train.batch=2")
    said = real("run", "scenes-soft", "--out", "a", *SMALL, *wild, code=1)
    assert "finite" in said
    held = folder.look(tmp_path / "a")
    assert held is not None and held.results["status"] == "failed"


def test_corrupt_checkpoints(real: Refuse, tmp_path: Path) -> None:
    args = ["run", "scenes-soft", "--out", "a", *SMALL, "--set", "train.save_every=1"]
    code, _, err = ended(args)
    assert code == 0, err
    results = files.read_json(tmp_path / "a/results.json")
    files.write_json(tmp_path / "a/results.json", {**results, "status": "running"})
    (tmp_path / "a" / files.MANIFEST).unlink()
    weights = list((tmp_path / "a/checkpoints").rglob("*.safetensors"))
    assert weights
    for path in weights:
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    before = contents(tmp_path / "a/checkpoints")
    code, _, err = ended([*args, "--resume"])
    assert code == 2 and "checkpoint" in check_sentence(err.splitlines(keepends=True)[-1])
    assert contents(tmp_path / "a/checkpoints") == before


# A hundred command lines; tests/trust has a thousand, of all commands

LINES = st.lists(
    st.one_of(
        st.sampled_from(
            ["run", "table", "list", "demo", "report", "doctor", "data", "check", "prepare"]
        ),
        st.sampled_from(["toy", "toys", "toy-files", "plain", "all", "cifar10", "none", "--"]),
        st.sampled_from(["--out", "--seed", "--device", "--data", "--set", "--rows", "--seeds"]),
        st.sampled_from(["--resume", "--json", "--version", "--help", "-h", "--out=a", "--x"]),
        st.sampled_from(["a", "b/c", ".", "file", "run", "0", "-1", "3", "cpu", "cuda:9", "", "="]),
        st.sampled_from(["data.limit=5", "train.epochs=x", "model.width=-1", "train.rate=1e999"]),
        st.builds(
            "{}={}".format,
            st.sampled_from([*settings.flatten(toys.toy()), "x.y"]),
            st.text(max_size=8) | st.floats().map(str) | st.integers().map(str),
        ),
        st.text(max_size=12),
        st.binary(max_size=6).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
    ),
    max_size=9,
)


@pytest.fixture(scope="module")
def playground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working folder with a few things in it, where no command trains, fetches or downloads."""
    place = tmp_path_factory.mktemp("fuzz")
    (place / "file").write_text("mine")
    leave_run(place / "run")
    patch = pytest.MonkeyPatch()
    patch.chdir(place)
    use_toys(patch)
    patch.setattr("overt.recipes.running.run", lambda recipe, out, **options: {
        "recipe": recipe.name, "seed": options["seed"], "ours": {}})  # fmt: skip
    demo = SimpleNamespace(pick=lambda labels: labels, run_demo=lambda *args, **options: [])
    patch.setattr("overt.recipes.demo", demo, raising=False)
    patch.setattr("overt.data.sets.fetch", lambda root, chosen, on_progress=None: "fetched")
    yield place
    patch.undo()


def fuzz(line: list[str]) -> None:
    hypothesis.assume("--install-completion" not in line and "--show-completion" not in line)
    code, out, err = ended(line)
    assert code in (0, 2), (line, err)
    assert "Traceback" not in out + err
    if code == 2:
        check_sentence("overt: " + err.rpartition("overt: ")[2])
    assert Path("file").read_text() == "mine" and files.is_whole(Path("run"))


@hypothesis.settings(max_examples=100)
@hypothesis.given(LINES)
def test_a_hundred_fuzzed_command_lines(playground: Path, line: list[str]) -> None:
    fuzz(line)
