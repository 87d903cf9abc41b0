"""Switching attention implementations, and what is restored."""

from typing import Any

import pytest
import torch
from torch import nn

from overt.errors import RunError
from overt.inspect.implementation_switch import (
    copy_to_dtype,
    describe_error,
    name_as_loaded,
    restore_hooks,
    use_implementation,
)
from tests.experiments import foreign

transformers = foreign.transformers


def clip() -> Any:
    sizes = foreign.SIZES
    config = transformers.CLIPConfig(
        text_config={"vocab_size": 30, "eos_token_id": 3, **sizes},
        vision_config={"image_size": 32, "patch_size": 8, **sizes},
    )
    return transformers.CLIPModel(config)


def implementations(model: Any) -> list[str]:
    parts = (model, model.text_model, model.vision_model)
    return [part.config._attn_implementation for part in parts]


def test_each_part_gets_its_own_implementation_back() -> None:
    model = clip()
    model.vision_model.config._attn_implementation_internal = "eager"
    assert name_as_loaded(model) == "mixed (eager, sdpa)"
    with use_implementation(model, "eager"):
        assert implementations(model) == ["eager"] * 3 and name_as_loaded(model) == "eager"
    assert implementations(model) == ["sdpa", "sdpa", "eager"]
    with pytest.raises(KeyError), use_implementation(model, "eager"):
        raise KeyError
    assert implementations(model) == ["sdpa", "sdpa", "eager"]


def test_an_implementation_that_the_model_lacks_is_an_error() -> None:
    model = clip()
    with pytest.raises(ValueError, match="nothing"), use_implementation(model, "nothing"):
        pass
    with pytest.raises(ValueError, match="Linear"), use_implementation(nn.Linear(2, 2), "sdpa"):
        pass
    assert implementations(model) == ["sdpa"] * 3


def test_only_new_hooks_are_removed() -> None:
    model, calls = nn.Linear(2, 2), []
    model.register_forward_hook(lambda *args: calls.append("old"))
    with restore_hooks(model):
        model.register_forward_hook(lambda *args: calls.append("new"))
        model.register_forward_pre_hook(lambda *args: calls.append("new"))
        model(torch.ones(2))
    model(torch.ones(2))
    assert calls == ["new", "old", "new", "old"]


def test_a_copy_keeps_shared_weights_and_buffers_that_are_not_saved() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
            self.two.weight = self.one.weight
            self.register_buffer("saved", torch.ones(2))
            self.register_buffer("angles", torch.ones(2), persistent=False)
            self.register_buffer("count", torch.ones(2, dtype=torch.long))

    model = Tied()
    copied: Any = copy_to_dtype(model, torch.bfloat16)
    assert copied.one.weight is copied.two.weight and copied.one.weight.dtype == torch.bfloat16
    kinds = (copied.saved.dtype, copied.angles.dtype, copied.count.dtype)
    assert kinds == (torch.bfloat16, torch.float32, torch.long)
    assert model.one.weight.dtype == torch.float32


def test_an_error_is_described_by_its_cause_in_one_line() -> None:
    outer = RunError("The model failed.")
    outer.__cause__ = ValueError("no kernel for 3 heads.\nSee below.")
    assert describe_error(outer) == "no kernel for 3 heads"
    assert describe_error(ValueError("A is missing. Please open an issue.")) == "A is missing"
    assert describe_error(KeyError()) == "KeyError"
    assert "memory" in describe_error(torch.OutOfMemoryError("CUDA out of memory"))
