"""Checks of devices and data before heavy imports."""

from pathlib import Path
from typing import Any

import pytest

from overt.errors import UserError
from overt.experiments import preflight


@pytest.mark.parametrize("name", ["auto", "cpu", "cuda", "cuda:0", "cuda:12", "mps"])
def test_valid_device_names_are_accepted(name: str) -> None:
    preflight.check_device_name(name)


@pytest.mark.parametrize("name", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "tpu"])
def test_invalid_device_names_raise(name: str) -> None:
    with pytest.raises(UserError, match="unknown device"):
        preflight.check_device_name(name)


def test_a_missing_device_raises() -> None:
    preflight.check_device("auto")
    preflight.check_device("cpu")
    with pytest.raises(UserError, match="'cuda:99'"):
        preflight.check_device("cuda:99")


def test_the_data_root_is_an_option_or_an_environment_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OVERT_DATA", raising=False)
    assert preflight.resolve_data_root(None) is None
    assert preflight.resolve_data_root(tmp_path) == tmp_path
    monkeypatch.setenv("OVERT_DATA", str(tmp_path))
    assert preflight.resolve_data_root(None) == tmp_path
    with pytest.raises(UserError, match="--data .*none"):
        preflight.resolve_data_root(tmp_path / "none")
    monkeypatch.setenv("OVERT_DATA", str(tmp_path / "none"))
    with pytest.raises(UserError, match="OVERT_DATA .*none"):
        preflight.resolve_data_root(None)


def test_a_recipe_without_files_needs_no_data_root(toy_table: Any) -> None:
    preflight.check_dataset(toy_table.rows[0].recipe(), None)
