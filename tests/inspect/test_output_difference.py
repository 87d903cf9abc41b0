"""Differences of outputs and generated tokens, against values by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from overt.errors import RunError
from overt.inspect import output_difference as module
from overt.inspect.output_difference import ModelAnswers


def answers(values: Any, name: str = "logits") -> ModelAnswers:
    return ModelAnswers(name, torch.as_tensor(values, dtype=torch.float32), None, ())


@pytest.mark.parametrize("block", [1, 1 << 22])
def test_outputs_are_compared_as_by_hand(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    first = answers([[[1.0, 2.0], [0.0, -8.0]], [[4.0, -math.inf], [0.0, 1.0]]])
    second = answers([[[1.5, 2.0], [0.0, -6.0]], [[4.0, -math.inf], [2.0, 1.0]]])
    found = module.output_difference(first, second)
    assert found["output_max"] == 2 and found["output_mean"] == pytest.approx(4.5 / 8)
    assert found["output_scale"] == 8 and found["same_argmax"] == 3 / 4


def test_not_a_number_is_the_largest_difference() -> None:
    found = module.output_difference(answers([[1.0, math.nan]]), answers([[9.0, 1.0]]))
    assert math.isnan(found["output_max"])
    assert module.output_difference(answers([[1.0]], "x"), answers([[1.0]]))["same_argmax"] is None


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ([[1, 2, 3]], [[1, 2, 3]], (3, None)),
        ([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 0, 6]], (3, 1)),
        ([[1, 2, 3]], [[1, 2]], (3, 2)),
        ([[1]], [[1, 2]], (2, 1)),
    ],
)
def test_the_first_token_that_differs(first: Any, second: Any, found: Any) -> None:
    assert module.token_difference(torch.tensor(first), torch.tensor(second)) == found


def test_the_main_output_is_found() -> None:
    x = torch.ones(1, 2)

    def main(output: Any) -> tuple[str, Tensor]:
        return module._main_output("Model", output)

    assert main(x) == ("outputs", x) and main((x, None)) == ("0", x)
    assert main({"loss": torch.tensor(1.0), "logits": x})[0] == "logits"
    assert main({"pooled": x, "last_hidden_state": x})[0] == "last hidden states"
    assert main(SimpleNamespace(scores=x))[0] == "scores"
    with pytest.raises(RunError, match="Model"):
        main({"ids": torch.ones(1, dtype=torch.long)})


def test_rows_are_split_into_blocks_that_cover_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 10)
    assert list(module.row_blocks(5, 4)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert len(list(module.row_blocks(2, 99))) == 2 and list(module.row_blocks(0, 4)) == []
