"""Copies of a model that is being watched have no hooks of ours."""

import copy
import copyreg
import io
import pickle

import pytest
import torch
from torch import nn

from overt.capture import watch
from overt.capture.model_copies import exclude_from_copies, install_reducers, remove_reducers
from tests.capture.toys import FusedAttention, Stack


def hooks(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    return sum(len(getattr(one, kind)) for one in model.modules() for kind in kinds)


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # noqa: S301


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved, pickled])
def test_a_copy_that_is_made_inside_the_block_has_no_hooks(duplicate):
    model, x = Stack(FusedAttention(), FusedAttention()), torch.randn(2, 6, 16)
    with watch(model) as trace:
        model(x)
        other = duplicate(model)
        model(x)
    assert hooks(other) == hooks(model) == 0
    assert len(trace) == 4 and FusedAttention not in copyreg.dispatch_table
    torch.testing.assert_close(other(x), model(x))


class OwnCopy(FusedAttention):
    """A class that copies its attributes itself."""

    def __deepcopy__(self, memo):
        made = OwnCopy()
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made


def parametrized() -> nn.Module:
    model = FusedAttention()
    first = next(one for one in model.modules() if isinstance(one, nn.Linear))
    nn.utils.parametrizations.weight_norm(first)
    return model


@pytest.mark.parametrize("make", [OwnCopy, parametrized])
def test_a_class_that_copies_itself_has_no_hooks_in_the_copy(make):
    model, x = Stack(make(), make()), torch.randn(2, 6, 16)
    with watch(model), watch(model) as trace:
        model(x)
        others = [copy.deepcopy(model)]
        others += [saved(model), pickled(model)] if make is OwnCopy else []
        model(x)
    assert len(trace) == 4 and not hooks(model)
    for other in (model, *others):
        assert not hooks(other)
        assert not any("__deepcopy__" in vars(one) for one in other.modules())
        torch.testing.assert_close(other(x), model(x))


def test_a_graph_module_is_pickled_inside_the_block():
    model = Stack(FusedAttention(), torch.fx.symbolic_trace(nn.Sequential(nn.Linear(16, 16))))
    model.forward = lambda x: model.layers[1](model.layers[0](x))
    with watch(model):
        model(torch.randn(2, 6, 16))
        other = pickled(model.layers[1])
    assert not hooks(other)


def own_hook(module, inputs, output):
    return output * 2


def test_hooks_of_the_user_are_copied():
    model, x = Stack(FusedAttention()), torch.randn(2, 6, 16)
    model.layers[0].register_forward_hook(own_hook, always_call=True)
    with watch(model):
        model(x)
        other = copy.deepcopy(model)
    assert hooks(other) == hooks(model) == 2
    torch.testing.assert_close(other(x), model(x))


def test_classes_are_released_when_the_last_watcher_has_gone():
    class Own(nn.Module):
        pass

    modules = [Own(), Own()]
    install_reducers(modules)
    install_reducers(modules[:1])
    remove_reducers(modules)
    assert Own in copyreg.dispatch_table
    remove_reducers(modules[:1])
    assert Own not in copyreg.dispatch_table


def test_a_reducer_of_the_users_own_stays():
    class Own(nn.Module):
        pass

    def reducer(module):
        return Own, ()

    copyreg.dispatch_table[Own] = reducer
    install_reducers([Own()])
    remove_reducers([Own()])
    assert copyreg.dispatch_table.pop(Own) is reducer


def test_hooks_can_be_named():
    module = nn.Identity()
    exclude_from_copies(left := lambda *_: None)
    module.register_forward_pre_hook(left)
    install_reducers([module])
    assert hooks(copy.deepcopy(module)) == 0 and hooks(module) == 1
    remove_reducers([module])
