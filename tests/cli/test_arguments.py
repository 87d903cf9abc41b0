"""Names and keys that the shell completes."""

import pytest

from tests.cli.conftest import Call

pytestmark = pytest.mark.usefixtures("toy_recipes")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("overt run toy", "toy-stated"),
        ("overt run toy --set train.e", "train.epochs="),
        ("overt table toys --set train.e", "train.epochs="),
        ("overt table to", "toys"),
        ("overt data check cif", "cifar100"),
        ("overt do", "doctor"),
    ],
)
def test_the_shell_completes(
    call: Call, monkeypatch: pytest.MonkeyPatch, words: str, wanted: str
) -> None:
    monkeypatch.setenv("_OVERT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    code, out, _ = call()
    assert code == 0 and wanted in out.split()
