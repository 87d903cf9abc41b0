"""Finding the attention modules of a model."""

import pytest
import torch
from torch import nn

from overt.capture.discovery import (
    attention_modules,
    format_names,
    is_compiled,
    is_cross_by_name,
    is_cross_by_shape,
    looks_like_attention,
    needs_hook,
    select_layers,
    without_adapter,
)
from tests.capture.toys import FusedAttention, Stack


class AttentionBlock(nn.Module):
    """Named like attention, with attention inside."""

    def __init__(self):
        super().__init__()
        self.cross_attn, self.norm = FusedAttention(), nn.LayerNorm(16)


def test_the_innermost_of_each_nest_counts():
    model = Stack(AttentionBlock(), nn.MultiheadAttention(16, 4), nn.Linear(16, 16))
    assert list(attention_modules(model)) == ["layers.0.cross_attn", "layers.1"]


def test_an_adapter_around_a_model_is_left_out_of_names():
    class PeftModel(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_model = base

        def get_base_model(self):
            return self.base_model

    class PeftModelForText(PeftModel):
        pass

    model = Stack(FusedAttention())
    assert without_adapter(PeftModelForText(PeftModel(model))) is model
    assert without_adapter(model) is model
    assert list(attention_modules(PeftModel(model))) == ["layers.0"]


def test_parts_that_are_only_named_after_attention_do_not_count():
    class SelfAttentionOutput(nn.Module):
        pass

    assert looks_like_attention(FusedAttention())
    assert not looks_like_attention(SelfAttentionOutput())
    assert needs_hook(nn.MultiheadAttention(16, 4)) and needs_hook(FusedAttention())
    assert not needs_hook(nn.Linear(2, 2))
    activations = pytest.importorskip("transformers.activations")
    assert not needs_hook(activations.GELUActivation())


def test_a_forward_that_only_calls_children_has_no_hook():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
            self.helper = torch.softmax

        def forward(self, x):
            return x + self.second(self.first(x))

    class Helped(Block):
        def forward(self, x):
            return self.helper(self.first(x), -1) @ x

    class Inherits(Block):
        def forward(self, x):
            return super().forward(x)

    class Hidden(Block):
        def forward(self, x):
            def inside(y):
                return torch.softmax(y, -1)

            return inside(self.first(x))

    assert not needs_hook(Block()) and not needs_hook(Stack())
    assert all(needs_hook(kind()) for kind in (Helped, Inherits, Hidden))
    replaced = Block()
    replaced.forward = lambda x: torch.softmax(x, -1)
    assert needs_hook(replaced)


def test_layers_are_chosen_by_place_and_by_name():
    model = Stack(FusedAttention(), FusedAttention())
    assert select_layers(model, None) is None
    assert list(select_layers(model, [-1, "layers.0"])) == ["layers.1", "layers.0"]
    with pytest.raises(ValueError, match=r"layer 5 .* 2 "):
        select_layers(model, [5])


def test_names_and_sizes_tell_cross_attention():
    model = Stack(AttentionBlock(), FusedAttention())
    square, wide = (1, 1, 4, 4), (1, 1, 4, 9)
    assert is_cross_by_name(model, "layers.0.cross_attn")
    assert not is_cross_by_name(model, "layers.1")
    assert not is_cross_by_shape(model.layers[1], square)
    assert is_cross_by_shape(model.layers[1], wide)
    model.layers[1].is_causal = True
    assert not is_cross_by_shape(model.layers[1], wide)  # a decoder with a cache


def test_long_lists_are_cut_short():
    assert format_names([]) == "none"
    assert format_names(["a", "b", "c"], most=2) == "'a', 'b' and 1 more"


def test_compiled_parts_are_found():
    model = Stack(FusedAttention())
    assert not is_compiled(model)
    assert is_compiled(torch.compile(model))
    model.layers[0].compile()
    assert is_compiled(model)
