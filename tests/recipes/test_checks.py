"""Devices and data, judged before anything heavy is imported."""

from pathlib import Path
from typing import Any

import pytest

from overt.errors import BadInput
from overt.recipes import checks


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:12", "mps"])
def test_devices_there_can_be(name: str) -> None:
    checks.device(name)


@pytest.mark.parametrize("name", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "tpu"])
def test_devices_there_cannot_be(name: str) -> None:
    with pytest.raises(BadInput, match="there is no device"):
        checks.device(name)


def test_the_data_folder_is_the_one_given_or_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OVERT_DATA", raising=False)
    assert checks.data_root(None) is None
    assert checks.data_root(tmp_path) == tmp_path
    monkeypatch.setenv("OVERT_DATA", str(tmp_path))
    assert checks.data_root(None) == tmp_path
    with pytest.raises(BadInput, match="--data names"):
        checks.data_root(tmp_path / "none")
    monkeypatch.setenv("OVERT_DATA", str(tmp_path / "none"))
    with pytest.raises(BadInput, match="OVERT_DATA names"):
        checks.data_root(None)


def test_a_recipe_without_files_needs_none(toy_table: Any) -> None:
    checks.data(toy_table.rows[0].recipe(), None)
