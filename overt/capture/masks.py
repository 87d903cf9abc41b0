"""Interpret the mask of an SDPA call as the kernel does."""

import sys

import torch
from torch import Tensor, nn

from overt.capture import _torch_compat


def resolve_mask(
    module: nn.Module, mask: Tensor | None, causal: bool, device: torch.device
) -> tuple[Tensor | None, bool]:
    """Return the mask as a plain tensor, and whether the call is causal from the upper left.

    `CausalBias` is a tensor without values; SDPA uses its variant and sizes.

    Raises:
        NotImplementedError: For any other tensor subclass that overrides SDPA: its values need not
            be the bias that the kernel adds.
    """
    if mask is None or type(mask) in (Tensor, nn.Parameter):
        return mask, causal
    # not imported here, because it imports Dynamo; a CausalBias needs it to exist
    known = sys.modules.get("torch.nn.attention.bias")
    if known is not None and isinstance(mask, known.CausalBias):
        if mask.seq_len_q == mask.seq_len_kv or mask.variant == known.CausalVariant.UPPER_LEFT:
            return None, True
        return mask._materialize(device), causal
    if not _torch_compat.overrides_functions(type(mask)):
        return mask, causal
    raise NotImplementedError(
        f"unsupported mask of type {type(mask).__name__} in {type(module).__name__}: this subclass "
        "overrides what the kernel adds; pass a bool or float tensor, or leave this module out by "
        "naming the layers you need: watch(model, layers=[...])"
    )


def autocast_mask(mask: Tensor | None) -> Tensor | None:
    """Return a float mask in the precision in which autocast passes it to the kernel."""
    if mask is None or not mask.is_floating_point() or mask.dtype == torch.float64:
        return mask
    return mask.to(torch.get_autocast_dtype(mask.device.type))
