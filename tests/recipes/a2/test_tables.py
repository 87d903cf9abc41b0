"""The tables of the aligned captioner, and that smoke versions can be filled."""

from dataclasses import replace
from pathlib import Path

import pytest

from overt.recipes import tables
from overt.recipes.a2.recipe import FUSIONS, A2Recipe, Baseline, Critic, Written
from overt.recipes.tables import run_table
from tests.recipes.a2.small import SETS

NAMES = ("a2-1", "a2-3", "a2-scenes", "a2-fig4", "a2-flickr8k")


def test_all_of_them_are_there():
    assert [name for name in tables.tables() if name.startswith("a2-")] == list(NAMES)


def test_rows_of_the_paper_have_its_numbers():
    for name in ("a2-1", "a2-3"):
        for row in tables.find(name).rows:
            stated = tables.made(row, []).paper
            assert ("cider_d" in stated) is (row.label != "none-critic"), row.label
    assert [row.label for row in tables.find("a2-3").rows] == list(FUSIONS)
    homes = {row.label: row.home for row in tables.find("a2-1").rows}
    assert homes == {"none": "a2-3", "gate": "a2-3", "none-critic": "", "gate-critic": ""}


def test_critics_of_beams_hold_them_against_their_mean():
    for name in ("a2-scenes", "a2-flickr8k"):
        rows = [row for row in tables.find(name).rows if row.label.endswith("-beams-critic")]
        assert [row.label for row in rows] == ["none-beams-critic", "gate-beams-critic"]
        for row in rows:
            recipe = tables.made(row, [])
            assert isinstance(recipe, A2Recipe)
            assert recipe.critic == replace(
                Critic(rate=1e-4), epochs=6, written=Written.BEAMS, baseline=Baseline.ALL
            )


@pytest.mark.long
def test_a_table_with_a_critic_is_filled_and_stands_on_its_first_stage(tmp_path: Path):
    filled = run_table(
        tables.find("a2-scenes"),
        tmp_path,
        rows=["gate", "gate-critic"],
        seeds=1,
        device="cpu",
        sets=SETS,
        show_progress=False,
        say=lambda line: None,
        committed=tmp_path / "none",
    )
    assert not filled.failures
    text = (tmp_path / "table.md").read_text()
    for column in ("bleu_4 ↑ (share)", "cider_d ↑ (score)", "mask_spread", "pointing_before"):
        assert column in text
    first = (tmp_path / "gate-critic" / "seed-0" / "ground.json").read_text()
    assert str(tmp_path / "gate" / "seed-0" / "model") in first
    assert filled.cell("gate-critic", "cider_d").mean is not None
    assert filled.cell("gate", "mask_mean").mean == pytest.approx(0.5, abs=0.4)
