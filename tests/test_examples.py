"""The scripts in examples/ run unchanged, and the page that lists them is complete."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name != "dots.py")
PRINTED = {
    "aligned_captioner": "torch.Size([8,",
    "box_loss": "step 9: attention loss",
    "hard_attention": "cells kept: 6",
    "learned_attention": "keys: image 8×8",
    "rationales_with_trainer": "[1.",
    "rollout_or_grad_cam": "rollout - Grad-CAM: Interval(",
    "surrogates_of_text": "task ",
    "vit_heat_map": "",
    "where_an_answer_looked": "looked at",
}


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_examples_run(
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert PRINTED[script.stem] in capsys.readouterr().out
    pictures = {"vit_heat_map": "heat.png", "where_an_answer_looked": "answer.html"}
    assert (tmp_path / pictures.get(script.stem, ".")).exists()


def test_the_page_of_tasks_lists_every_example_with_its_length() -> None:
    page = (ROOT / "docs/first-tasks.md").read_text()
    listed = dict(re.findall(r"\(\.\./examples/(\w+)\.py\) \| (\d+) \|", page))
    lines = {
        script.stem: str(sum(bool(line.strip()) for line in script.read_text().splitlines()))
        for script in [*SCRIPTS, ROOT / "examples/dots.py"]
    }
    assert listed == lines
