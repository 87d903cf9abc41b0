"""`overt bench`: output, files and bad input."""

from pathlib import Path

import pytest

from tests.cli.conftest import Call

pytestmark = pytest.mark.usefixtures("clean_environment")
FILE = Path(__file__).parents[1] / "inspect" / "bench_squares.py"


def test_bench_prints_ranks_and_the_trust_of_metrics(call: Call, tmp_path: Path) -> None:
    code, out, err = call(
        "bench", "--model", f"corner={FILE}:model", "--on", f"{FILE}:data", "--limit", 4,
        "--method", "saliency,occlusion", "--measures", "mass_inside,spearman",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0, err
    assert "corner on squares test, 4 samples: spearman" in out and "67 % of planted tests" in out
    assert "beats all controls" in out and "(random)" in out and "(target)" in out
    assert (tmp_path / "out" / "index.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "needs at least one --model"),
        (("--model", "missing"), "'missing' does not exist"),
        (("--model", "hf:a/b", "--on", "nowhere"), "nowhere"),
        (("--model", "hf:a/b", "--on", "scenes", "--method", "lrp"), "'lrp' is unknown"),
    ],
)
def test_bench_rejects_wrong_arguments_with_one_line(
    call: Call, arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    code, _, err = call("bench", *arguments, "--out", tmp_path / "out")
    assert code == 2 and message in err and err.count("\n") <= 2
    assert not (tmp_path / "out").exists()
