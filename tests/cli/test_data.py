"""`overt data`: list, check and prepare datasets."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call

pytestmark = pytest.mark.usefixtures("toy_recipes")


def test_data_list_and_check_print_datasets_and_errors(call: Call, tmp_path: Path) -> None:
    code, out, _ = call("data", "list", "--data", tmp_path)
    assert code == 0 and "cifar10" in out and str(tmp_path) in out
    assert call("data")[0] == 0
    (tmp_path / "trec").mkdir()
    for name in ("train_5500.label", "TREC_10.label"):
        (tmp_path / "trec" / name).write_bytes(b"HUM:ind Who ?\nbroken\n")
    code, out, err = call("data", "check", "trec6", "--data", tmp_path)
    assert code == 2 and "line 2" in err and "(and 1 more)" in err and out.count("trec6") == 2


def test_data_prepare_reports_each_dataset(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overt.data import catalog

    def prepare(root: Path, name: str, on_progress: Any = None) -> str:
        on_progress(1, 2)
        return f"{name} was downloaded to {root}."

    monkeypatch.setattr(catalog, "prepare_dataset", prepare)
    code, out, _ = call("data", "prepare", "trec6", "cifar10", "--data", tmp_path / "new")
    assert code == 0 and out.count("was downloaded to") == 2


def test_a_file_as_data_root_is_rejected_with_its_option(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    code, _, err = call("data", "prepare", "svhn", "--data", tmp_path / "file")
    assert code == 2 and "--data needs a folder" in err and "is a file" in err
    monkeypatch.setenv("OVERT_DATA", str(tmp_path / "file"))
    code, _, err = call("data", "prepare", "svhn")
    assert code == 2 and "OVERT_DATA needs a folder" in err and "--out" not in err
