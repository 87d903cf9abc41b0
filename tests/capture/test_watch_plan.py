"""Plans of watchers: cached per model, and made again when its modules change."""

import gc
import weakref

import pytest
import torch
from torch import nn

from overt.capture import watch_plan
from overt.capture.watch_plan import plan_watch
from tests.capture.families import family
from tests.capture.toys import FusedAttention, Stack


@pytest.fixture
def model() -> Stack:
    return Stack(FusedAttention(), nn.Identity(), FusedAttention())


def test_names_are_those_of_named_modules(model: Stack):
    shared = FusedAttention()
    for one in (model, Stack(shared, Stack(shared)), family("BERT").build("sdpa")):
        assert plan_watch(one).names == {m: name for name, m in one.named_modules()}


def test_plans_are_cached_per_arguments(model: Stack, monkeypatch: pytest.MonkeyPatch):
    made = []
    original = watch_plan._make_plan
    monkeypatch.setattr(watch_plan, "_make_plan", lambda *a: made.append(a) or original(*a))
    for _ in range(3):
        assert plan_watch(model).watched == set(model.modules())
    for _ in range(2):
        assert plan_watch(model, layers=[-1]).expected == {model.layers[2]}
    assert len(made) == 2


def test_a_changed_model_gets_a_new_plan(model: Stack):
    assert len(plan_watch(model).expected) == 2
    model.layers[1] = FusedAttention()
    assert plan_watch(model).expected == set(model.layers)
    model.layers.append(FusedAttention())
    assert len(plan_watch(model).expected) == 4
    del model.layers[0]
    assert plan_watch(model).expected == set(model.layers)


def test_excluded_modules_are_not_watched(model: Stack):
    plan = plan_watch(model, without=["layers.0"])
    assert plan.excluded == set(model.layers[0].modules())
    assert not plan.excluded & plan.watched
    assert plan.expected == {model.layers[2]}


def test_named_modules_are_declared_as_attention(model: Stack):
    plan = plan_watch(model, layers=["layers.1"])
    assert plan.declared == {model.layers[1]} and plan.expected == {model.layers[1]}
    assert plan_watch(model, attention=["layers.1"]).declared == {model.layers[1]}


def test_native_encoders_are_recognized():
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    assert plan_watch(nn.Sequential(layer)).native_encoder
    assert not plan_watch(nn.Sequential(nn.MultiheadAttention(8, 2))).native_encoder


def test_compiled_parts_are_recognized(model: Stack):
    assert not plan_watch(model).compiled
    model.layers[0] = torch.compile(model.layers[0])
    assert plan_watch(model).compiled


@pytest.mark.parametrize("argument", ["layers", "without", "attention"])
def test_a_single_name_is_rejected(model: Stack, argument: str):
    with pytest.raises(TypeError, match=argument):
        plan_watch(model, **{argument: "layers.0"})


def test_unknown_names_are_rejected(model: Stack):
    with pytest.raises(ValueError, match="nothing"):
        plan_watch(model, layers=["nothing"])


def test_the_cache_keeps_no_module_alive(model: Stack):
    plan_watch(model)
    layer = weakref.ref(model.layers[0])
    del model.layers[0]
    gc.collect()
    assert layer() is None
