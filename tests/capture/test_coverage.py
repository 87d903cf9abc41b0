"""Nothing is silently empty."""

import pytest
import torch
from torch import nn

from overt.capture import Unseen, watch
from overt.capture.coverage import verify
from overt.capture.places import FLEX
from tests.capture.toys import FusedAttention, Stack


class HiddenAttention(nn.Module):
    """Attention that nobody can see."""

    def forward(self, x, mask=None):
        return x


def test_a_model_without_attention():
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 4), nn.Softmax(-1))
    with pytest.raises(Unseen, match=r"no attention that could be seen.*grad_cam"), watch(model):
        model(torch.randn(1, 3, 8, 8))


def test_a_model_that_was_not_called():
    with (
        pytest.raises(Unseen, match="was not called while it was watched"),
        watch(FusedAttention()),
    ):
        pass


def test_only_another_part_was_called():
    model = nn.ModuleDict({"eye": FusedAttention(), "head": nn.Linear(16, 2)})
    model.forward = model["head"].forward
    with pytest.raises(Unseen, match=r"none of .* of ModuleDict ran: 'eye'"), watch(model):
        model(torch.randn(1, 2, 16))


def test_modules_that_ran_unseen_are_named_with_a_remedy():
    model = Stack(FusedAttention(), HiddenAttention(), HiddenAttention())
    x = torch.randn(1, 3, 16)
    missed = r"2 of 3 .* 'layers.1', 'layers.2'\. HiddenAttention attends"
    with pytest.raises(Unseen, match=missed), watch(model):
        model(x)
    with watch(model, layers=[0]) as seen:
        model(x)
    assert len(seen) == 1


def test_seen_fewer_times_than_run():
    class Sometimes(FusedAttention):
        def forward(self, x, mask=None):
            return super().forward(x) if len(x) > 1 else x

    class SometimesAttention(Sometimes):
        pass

    model = Stack(SometimesAttention())

    def twice():
        with watch(model):
            model(torch.randn(2, 3, 16))
            model(torch.randn(1, 3, 16))

    with pytest.raises(Unseen, match="1 of 1 attention modules ran"):
        twice()


def test_hugging_face_modules_are_told_how_to_switch():
    module = HiddenAttention()
    module.config = type("Config", (), {"_attn_implementation": "magic"})()
    with pytest.raises(Unseen, match=r'set_attn_implementation\("sdpa"\)'):
        verify(module, module, {module}, [(module,), module], [])
    module.config._attn_implementation = "sdpa"
    with pytest.raises(Unseen, match=r'set_attn_implementation\("eager"\) does'):
        verify(module, module, {module}, [(module,), module], [])
    module.config._attn_implementation = "eager"  # there is nothing left to switch to
    with pytest.raises(Unseen, match="a custom kernel") as refused:
        verify(module, module, {module}, [(module,), module], [])
    assert "set_attn" not in str(refused.value)


def test_flex_attention_of_nobody():
    module = HiddenAttention()
    with pytest.raises(Unseen, match="FlexAttention inside a compiled model"):
        verify(module, module, set(), [(FLEX, None)], [])


def test_an_error_of_the_model_is_not_hidden_by_ours():
    model = Stack(HiddenAttention())
    with pytest.raises(ZeroDivisionError), watch(model):
        model(torch.randn(1, 2, 16) / (1 // 0))
