"""Loaded models: processors are optional."""

import torch

from overt.inspect.loaded_model import LoadedModel


def test_processors_are_optional() -> None:
    loaded = LoadedModel("toy", torch.nn.Identity())
    parts = (loaded.processor, loaded.tokenizer, loaded.image_processor, loaded.transform)
    assert parts == (None, None, None, None) and loaded.notes == () and loaded.spec is None
