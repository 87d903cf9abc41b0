"""Bad input through the command line: one-line error, exit code and no changed files."""

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
from hypothesis import strategies as st

from overt import cli
from overt import io as overt_io
from overt.experiments import run_folder, settings
from overt.papers.catalog import recipes
from tests import toys

REAL = recipes()
SMALL = ("--device", "cpu", "--set", "data.limit=8", "--set", "train.epochs=1")

Refuse = Callable[..., str]


def run_command(args: list[str]) -> tuple[int, str, str]:
    """Run a command line; return exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(args)
    return code, out.getvalue(), err.getvalue()


def check_error_line(err: str) -> str:
    assert err.startswith("overt: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert "Traceback" not in err and err.rstrip()[-1] in ".?)", err
    return err[len("overt: ") :].rstrip()


def read_files(place: Path) -> dict[str, bytes | None]:
    """Read every file below a folder except locks."""
    return {
        str(path.relative_to(place)): path.read_bytes() if path.is_file() else None
        for path in place.rglob("*")
        if path.name != ".lock"
    }


def use_toys(patch: pytest.MonkeyPatch) -> None:
    """Replace the recipes and tables by toys."""
    patch.setattr("overt.papers.catalog.recipes", lambda: dict(toys.RECIPES))
    patch.setattr(
        "overt.papers.catalog.tables", lambda: {"toys": toys.TABLE, "needy": toys.FILES_TABLE}
    )
    for name in ("OVERT_DATA", "OVERT_TRACEBACK", "RANK", "WORLD_SIZE"):
        patch.delenv(name, raising=False)


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Return `refuse("run", ...)`: checks exit code 2, a one-line error and unchanged files."""
    use_toys(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def refuse(*args: str | Path, code: int = 2) -> str:
        before = read_files(tmp_path)
        got, _, err = run_command([str(one) for one in args])
        assert got == code, err
        after = read_files(tmp_path)
        assert {name: after.get(name) for name in before} == before
        return check_error_line(err)

    return refuse


def write_toy_run(out: Path, *sets: str, seed: int = 0, status: str = "done") -> Path:
    toys.write_run_folder(out, settings.apply(toys.toy(), sets), seed, status)
    return out


# Names and values


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "toi"], "'toi'.* toy"),
        (["run", "\x1b[31m"], r"'\\x1b\[31m'"),
        (["run", "toy", "--set", "train.epoch=1"], "'train.epoch'.* train.epochs"),
        (["run", "toy", "--set", "train.epochs=many"], "at least 1.*'many'"),
        (["run", "toy", "--set", "train.epochs=0"], "at least 1.*'0'"),
        (["run", "toy", "--set", "train.precision=fp23"], "fp32"),
        (["run", "toy", "--set", "train.rate=nan"], "'nan'"),
        (["run", "toy", "--set", "train.epochs"], "KEY=VALUE"),
        (["run", "toy", "--seed", "-1"], "--seed"),
        (["run", "toy", "--seed", "pi"], "--seed"),
        (["run", "toy", "--device", "gpu"], "'gpu'"),
        (["run", "toy", "--sed", "1"], "--seed"),
        (["run", "toy", "more"], "extra argument.*more"),
        (["run", "toy", "--data", "/nowhere"], "--data.*'/nowhere'"),
        (["table", "toi"], "table 'toi'.* toys"),
        (["table", "toys", "--rows", "wid"], "toys .*'wid'.* wide"),
        (["table", "toys", "--seeds", "0"], "--seeds"),
        (["table", "toys", "--first-seed", "-1"], "--first-seed"),
        (["table", "toys", "--first-seed", "4294967295"], "--first-seed"),
        (["table", "toys", "--first-seed", "20-24"], "--first-seed"),
        (["table", "toys", "--set", "x=1"], "'x'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_names_and_values_are_rejected(
    refuse: Refuse, tmp_path: Path, args: list[str], message: str
) -> None:
    assert re.search(message, refuse(*args, "--out", "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train"], "command.*'train'"),
        (["run"], "Missing option '--out'"),
        (["run", "--out", "new"], "Missing argument 'RECIPE'"),
        (["run", "--out", "new", "--resume"], "Missing argument 'RECIPE'"),
        (["run", "mine.py:experiment", "--out", "new"], "mine.py does not exist"),
        (["run", "toy"], "Missing option '--out'"),
        (["list", "nothing-like-it"], "'nothing-like-it'"),
        (["report"], "Missing argument"),
        (["report", "none"], "folder of a run.*'none'"),
        (["report", "."], "has no run"),
        (["doctor", "."], "not a run folder"),
        (["doctor", "none"], "not a folder"),
        (["doctor", "--data", "none"], "--data.*'none'"),
        (["data", "check"], "No data folder is set"),
        (
            ["data", "check", "cifar11"],
            "cifar10 .*cifar100",
        ),
        (["data", "prepare", "daquar", "--data", "."], "cannot be downloaded automatically"),
        (["data", "prepare", "trec6", "--data", "a.txt"], "a.txt is a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_commands_are_rejected(
    refuse: Refuse, tmp_path: Path, args: list[str], message: str
) -> None:
    (tmp_path / "a.txt").touch()
    assert re.search(message, refuse(*args))


# Folders


def test_a_file_instead_of_a_folder_is_rejected(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refuse("run", "toy", "--out", "file")
    assert "is a file" in refuse("run", "toy", "--out", "file/below")
    assert "is a file" in refuse("table", "toys", "--out", "file/below")
    assert "is a file" in refuse("report", write_toy_run(tmp_path / "r"), "--out", "file/page.html")


def test_a_read_only_folder_is_rejected(refuse: Refuse) -> None:
    if not Path("/proc").is_dir():
        pytest.skip("this system has no /proc")
    assert "/proc/overt" in refuse("run", "toy", "--out", "/proc/overt")


def test_a_folder_with_other_files_is_rejected(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("hard work")
    assert "thesis.tex" in refuse("run", "toy", "--out", "mine")


def test_a_finished_run_is_not_overwritten(refuse: Refuse, tmp_path: Path) -> None:
    write_toy_run(tmp_path / "a")
    assert "already has a finished run" in refuse("run", "toy", "--out", "a")


def test_an_unfinished_run_needs_resume(refuse: Refuse, tmp_path: Path) -> None:
    write_toy_run(tmp_path / "a", status="stopped")
    assert "add --resume" in refuse("run", "toy", "--out", "a")


def test_resume_without_a_run_is_rejected(refuse: Refuse) -> None:
    assert "cannot resume" in refuse("run", "toy", "--out", "a", "--resume")


def test_resume_with_other_settings_or_seed_is_rejected(refuse: Refuse, tmp_path: Path) -> None:
    write_toy_run(tmp_path / "a", "data.limit=9", status="stopped")
    resume = ("run", "toy", "--out", "a", "--resume")
    assert "data.limit is 8, was 9" in refuse(*resume, "--set", "data.limit=8")
    assert "data.limit is none, was 9" in refuse(*resume, "--set", "data.limit=none")
    message = refuse(*resume, "--set", "data.limit=9", "--seed", "3")
    assert "3, was 0" in message


def test_resume_with_another_recipe_is_rejected(refuse: Refuse, tmp_path: Path) -> None:
    write_toy_run(tmp_path / "a", status="stopped")
    message = refuse("run", "toy-stated", "--out", "a", "--resume")
    assert "toy-stated, was toy" in message


@pytest.mark.parametrize("text", ["{", "[]", '{"status": 1}', "\0"])
def test_corrupt_results_are_reported(refuse: Refuse, tmp_path: Path, text: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/results.json").write_text(text)
    assert "a/results.json" in refuse("run", "toy", "--out", "a", "--resume")
    assert "results.json" in refuse("doctor", "a")


def test_a_changed_finished_run_is_reported(refuse: Refuse, tmp_path: Path) -> None:
    write_toy_run(tmp_path / "a")
    path = tmp_path / "a/results.json"
    path.write_text(path.read_text().replace("0.25", "0.95"))
    assert "results.json" in refuse("run", "toy", "--out", "a", "--resume")


def test_a_table_over_runs_of_other_settings_is_rejected(refuse: Refuse, tmp_path: Path) -> None:
    write_toy_run(tmp_path / "t/plain/seed-0")
    args = ("table", "toys", "--rows", "plain", "--out", "t", "--seeds", "1")
    assert "already has a finished run" in refuse(*args, "--set", "data.limit=3")


def test_a_run_locked_by_another_process_is_rejected(refuse: Refuse, tmp_path: Path) -> None:
    write_toy_run(tmp_path / "a", status="running")
    (tmp_path / "new").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", toys.HOLD_LOCKS, str(tmp_path / "a"), str(tmp_path / "new")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert str(other.pid) in refuse("run", "toy", "--out", "a", "--resume")
        assert str(other.pid) in refuse("run", "toy", "--out", "new")
        other.communicate("")


# Data


def test_a_missing_data_folder_is_rejected(refuse: Refuse) -> None:
    assert "--data or OVERT_DATA" in refuse("run", "toy-files", "--out", "a")


def test_a_missing_dataset_is_rejected(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    message = refuse("run", "toy-files", "--out", "a", "--data", "data")
    assert "cifar10" in message and "data" in message
    message = refuse("table", "needy", "--out", "t", "--data", "data")
    assert "cifar10" in message
    assert not (tmp_path / "a").exists() and not (tmp_path / "t").exists()


def test_a_missing_data_folder_in_the_environment_is_rejected(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERT_DATA", "none")
    assert "OVERT_DATA must be an existing folder, got 'none'" in refuse(
        "run", "toy-files", "--out", "a"
    )


def write_small_cifar10(root: Path, records: int = 20) -> Path:
    """Write files in the official layout but too small, as after a broken download."""
    (root / "cifar-10-batches-bin").mkdir(parents=True)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        data = bytes(3073) * records
        (root / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(data)
    return root


def test_data_check_finds_a_truncated_file(refuse: Refuse, tmp_path: Path) -> None:
    write_small_cifar10(tmp_path / "data")
    assert "data_batch_1.bin" in refuse("data", "check", "cifar10", "--data", "data")


# Shipped recipes that start to run


@pytest.fixture
def refuse_shipped(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Return `refuse` with the shipped recipes."""
    for name in ("scenes-soft", "cifar10-cnn"):
        if name not in REAL:
            pytest.skip(f"{name} is not there")
    monkeypatch.setattr("overt.papers.catalog.recipes", lambda: dict(REAL))
    return refuse


def test_a_run_on_a_truncated_data_file_is_rejected(refuse_shipped: Refuse, tmp_path: Path) -> None:
    write_small_cifar10(tmp_path / "data")
    broken = tmp_path / "data/cifar-10-batches-bin/data_batch_3.bin"
    broken.write_bytes(broken.read_bytes()[:-100])
    message = refuse_shipped("run", "cifar10-cnn", "--out", "a", "--data", "data", *SMALL)
    assert "data_batch_" in message


def test_a_non_finite_loss_fails_the_run(refuse_shipped: Refuse, tmp_path: Path) -> None:
    wild = ("--set", "train.rate=1e30", "--set", "train.clip=none", "--set", "train.batch=2")
    message = refuse_shipped("run", "scenes-soft", "--out", "a", *SMALL, *wild, code=1)
    assert "finite" in message
    run = run_folder.read_run(tmp_path / "a")
    assert run is not None and run.results["status"] == "failed"


@pytest.mark.long
def test_resume_from_corrupt_checkpoints_is_rejected(
    refuse_shipped: Refuse, tmp_path: Path
) -> None:
    args = ["run", "scenes-soft", "--out", "a", *SMALL, "--set", "train.save_every=1"]
    code, _, err = run_command(args)
    assert code == 0, err
    results = overt_io.read_json(tmp_path / "a/results.json")
    overt_io.write_json(tmp_path / "a/results.json", {**results, "status": "running"})
    (tmp_path / "a" / overt_io.MANIFEST).unlink()
    weights = list((tmp_path / "a/checkpoints").rglob("*.safetensors"))
    assert weights
    for path in weights:
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    before = read_files(tmp_path / "a/checkpoints")
    code, _, err = run_command([*args, "--resume"])
    assert code == 2 and "checkpoint" in check_error_line(err.splitlines(keepends=True)[-1])
    assert read_files(tmp_path / "a/checkpoints") == before


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
    """Make a working folder in which no command trains or downloads."""
    place = tmp_path_factory.mktemp("fuzz")
    (place / "file").write_text("mine")
    write_toy_run(place / "run")
    patch = pytest.MonkeyPatch()
    patch.chdir(place)
    use_toys(patch)
    patch.setattr("overt.experiments.runner.run", lambda recipe, out, build, **options: {
        "recipe": recipe.name, "seed": options["seed"], "ours": {}})  # fmt: skip
    demo = SimpleNamespace(
        select_rows=lambda labels: labels,
        run_demo=lambda *args, **options: [],
        comparison_table=lambda out, rows: [],
    )
    patch.setattr("overt.papers.demo", demo, raising=False)
    patch.setattr(
        "overt.data.catalog.download_dataset", lambda root, chosen, on_progress=None: "fetched"
    )
    yield place
    patch.undo()


def fuzz(line: list[str]) -> None:
    hypothesis.assume("--install-completion" not in line and "--show-completion" not in line)
    code, out, err = run_command(line)
    assert code in (0, 2), (line, err)
    assert "Traceback" not in out + err
    if code == 2:
        check_error_line("overt: " + err.rpartition("overt: ")[2])
    assert Path("file").read_text() == "mine" and overt_io.is_intact(Path("run"))


@hypothesis.settings(max_examples=100)
@hypothesis.given(LINES)
def test_fuzzed_command_lines_exit_with_0_or_2(playground: Path, line: list[str]) -> None:
    fuzz(line)
