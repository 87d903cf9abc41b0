"""Tables of the aligned captioner: published numbers, critic rows, and a small filled table."""

from dataclasses import replace
from pathlib import Path

import pytest

from overt.experiments import table_runner
from overt.papers import catalog
from overt.papers.a2.config import FUSIONS, A2Baseline, A2Critic, A2Recipe, A2Sampling
from tests.experiments import tiny
from tests.papers.a2.small import SETS


def test_rows_of_the_paper_have_published_numbers():
    for name in ("a2-1", "a2-3"):
        for row in catalog.find_table(name).rows:
            stated = table_runner.row_recipe(row, []).paper
            assert ("cider_d" in stated) is (row.label != "none-critic"), row.label
    assert [row.label for row in catalog.find_table("a2-3").rows] == list(FUSIONS)
    homes = {row.label: row.home for row in catalog.find_table("a2-1").rows}
    assert homes == {"none": "a2-3", "gate": "a2-3", "none-critic": "", "gate-critic": ""}


def test_beam_critics_use_the_mean_of_all_beams_as_baseline():
    for name in ("a2-scenes", "a2-flickr8k"):
        rows = [row for row in catalog.find_table(name).rows if row.label.endswith("-beams-critic")]
        assert [row.label for row in rows] == ["none-beams-critic", "gate-beams-critic"]
        for row in rows:
            recipe = table_runner.row_recipe(row, [])
            assert isinstance(recipe, A2Recipe)
            assert recipe.critic == replace(
                A2Critic(rate=1e-4), epochs=6, written=A2Sampling.BEAMS, baseline=A2Baseline.ALL
            )


@pytest.mark.long
def test_a_table_fills_a_critic_row_from_the_model_of_its_first_stage(tmp_path: Path):
    table = catalog.find_table("a2-scenes")
    filled = tiny.fill(table, tmp_path, "gate", "gate-critic", sets=SETS)
    assert not filled.failures
    text = (tmp_path / "table.md").read_text()
    for column in ("bleu_4 ↑ (share)", "cider_d ↑ (score)", "mask_spread", "pointing_before"):
        assert column in text
    first = (tmp_path / "gate-critic" / "seed-0" / "ground.json").read_text()
    assert str(tmp_path / "gate" / "seed-0" / "model") in first
    assert filled.cell("gate-critic", "cider_d").mean is not None
    assert filled.cell("gate", "mask_mean").mean == pytest.approx(0.5, abs=0.4)
