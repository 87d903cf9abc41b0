"""Where attention is in a model, and who is at work."""

import torch
from torch import nn

from overt.capture.hooks import add_module_hooks, remove_module_hooks
from overt.capture.state import STATE


def test_a_module_is_hooked_once_however_many_watch_it():
    module = nn.Identity()
    own = module.register_forward_hook(lambda *_: None)
    for attending in ([], [module]):
        add_module_hooks([module], attending, compiled=False)
    assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (1, 2)
    remove_module_hooks([module])
    assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (1, 2)
    remove_module_hooks([module])
    assert not module._forward_pre_hooks and list(module._forward_hooks) == [own.id]
    assert not module._forward_hooks_always_called


def test_hooks_are_quiet_when_nobody_watches():
    module = nn.Identity()
    add_module_hooks([module], [module], compiled=False)
    module(torch.zeros(1))
    assert not STATE.module_stack and not STATE.events.since(None)
    remove_module_hooks([module])
