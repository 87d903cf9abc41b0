"""Steps that transformers compiles; run by `test_decode_rows.py`, without runtime type checks."""

from typing import Any

import pytest
import torch
import transformers

from overt.capture.coverage import UncapturedAttentionError
from overt.capture.generation import generate
from overt.capture.session import watch
from tests.capture import test_generation as plain
from tests.capture.test_generation import words


def compiled_settings() -> dict[str, Any]:
    """As on a GPU, where transformers compiles the steps with a static cache."""
    config = transformers.CompileConfig(backend="eager", mode=None, fullgraph=False)
    config._compile_all_devices = True
    return {**words(padded=0), "do_sample": False, "max_new_tokens": 4, "min_new_tokens": 4,
            "cache_implementation": "static", "compile_config": config}  # fmt: skip


def test_steps_that_transformers_would_compile_are_captured() -> None:
    model, settings = plain.made("llama"), compiled_settings()
    wanted = model.generate(**settings)
    assert hasattr(model, "_compiled_call"), "they were compiled"
    for _ in range(2):  # the second time without the mode
        found = generate(model, **settings)
        assert torch.equal(found.output.sequences, wanted)
        whole = plain.taught(model, words(padded=0), wanted)
        plain.same(found, plain.expected(whole, wanted, 9)[..., :9])


def test_compiled_steps_that_cannot_be_captured_raise() -> None:
    model, settings = plain.made("llama"), compiled_settings()
    with torch.no_grad(), watch(model):
        model(**words())
    with pytest.raises(UncapturedAttentionError), watch(model):
        model.generate(**settings)
    model.forward = torch.compile(model.forward, backend="eager")
    del settings["compile_config"]
    with pytest.raises(ValueError, match="force_eager"):
        generate(model, **settings)
    with torch.compiler.set_stance("force_eager"):
        assert generate(model, **settings).attention.shape[3] == 4
