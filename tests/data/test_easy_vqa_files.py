from pathlib import Path

import pytest

from overt.data import catalog
from overt.data.easy_vqa_files import INSTRUCTIONS, easy_vqa_folder
from overt.errors import UserError


def write_questions(folder: Path) -> Path:
    (folder / "train").mkdir(parents=True)
    (folder / "train" / "questions.json").write_text("[]")
    return folder


def test_given_folder_takes_precedence(tmp_path):
    assert easy_vqa_folder(write_questions(tmp_path)) == tmp_path
    inner = write_questions(tmp_path / "easy-vqa")
    assert easy_vqa_folder(str(tmp_path)) == inner


def test_missing_package_raises(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for root in (None, tmp_path):
        with pytest.raises(UserError, match="install easy-vqa"):
            easy_vqa_folder(root)


def test_catalog_gives_the_same_instructions():
    assert catalog.find_dataset("easyvqa").instructions == INSTRUCTIONS
