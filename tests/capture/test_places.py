"""Where attention is in a model, and who is at work."""

import pytest
import torch
from torch import nn

from overt.capture.places import (
    HERE,
    Chain,
    attention_modules,
    choose,
    few,
    hook,
    is_compiled,
    looks_like_attention,
    named_cross,
    sized_cross,
    unhook,
    worth_a_hook,
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


def test_parts_that_are_only_named_after_attention_do_not_count():
    class SelfAttentionOutput(nn.Module):
        pass

    assert looks_like_attention(FusedAttention())
    assert not looks_like_attention(SelfAttentionOutput())
    assert worth_a_hook(nn.MultiheadAttention(16, 4)) and worth_a_hook(FusedAttention())
    assert not worth_a_hook(nn.Linear(2, 2))
    activations = pytest.importorskip("transformers.activations")
    assert not worth_a_hook(activations.GELUActivation())


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

    assert not worth_a_hook(Block()) and not worth_a_hook(Stack())
    assert all(worth_a_hook(kind()) for kind in (Helped, Inherits, Hidden))
    replaced = Block()
    replaced.forward = lambda x: torch.softmax(x, -1)
    assert worth_a_hook(replaced)


def test_layers_are_chosen_by_place_and_by_name():
    model = Stack(FusedAttention(), FusedAttention())
    assert choose(model, None) is None
    assert list(choose(model, [-1, "layers.0"])) == ["layers.1", "layers.0"]
    with pytest.raises(ValueError, match="layer 5 is not among the 2"):
        choose(model, [5])


def test_names_and_sizes_tell_cross_attention():
    model = Stack(AttentionBlock(), FusedAttention())
    square, wide = (1, 1, 4, 4), (1, 1, 4, 9)
    assert named_cross(model, "layers.0.cross_attn")
    assert not named_cross(model, "layers.1")
    assert not sized_cross(model.layers[1], square)
    assert sized_cross(model.layers[1], wide)
    model.layers[1].is_causal = True
    assert not sized_cross(model.layers[1], wide)  # a decoder with a cache


def test_long_lists_are_cut_short():
    assert few([]) == "none"
    assert few(["a", "b", "c"], most=2) == "'a', 'b' and 1 more"


def test_a_module_is_hooked_once_however_many_watch_it():
    module = nn.Identity()
    own = module.register_forward_hook(lambda *_: None)
    for attending in ([], [module]):
        hook([module], attending, compiled=False)
    assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (1, 2)
    unhook([module])
    assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (1, 2)
    unhook([module])
    assert not module._forward_pre_hooks and list(module._forward_hooks) == [own.id]
    assert not module._forward_hooks_always_called


def test_hooks_are_quiet_when_nobody_watches():
    module = nn.Identity()
    hook([module], [module], compiled=False)
    module(torch.zeros(1))
    assert not HERE.stack and not HERE.events.since(None)
    unhook([module])


def test_events_are_read_from_a_mark_on():
    chain = Chain()
    chain.add(1)
    mark = chain.last
    chain.add(2)
    chain.add(3)
    assert chain.since(mark) == [2, 3]
    assert chain.since(None) == [1, 2, 3]


def test_compiled_parts_are_found():
    model = Stack(FusedAttention())
    assert not is_compiled(model)
    assert is_compiled(torch.compile(model))
    model.layers[0].compile()
    assert is_compiled(model)


def test_what_is_forgotten_leaves_its_place():
    chain = Chain()
    chain.add("a")
    mark = chain.last
    chain.add(1)
    chain.add("b")
    chain.forget(int)
    assert chain.since(mark) == ["b"] and chain.since(None) == ["a", "b"]
