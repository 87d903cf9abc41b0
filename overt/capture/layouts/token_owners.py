"""Measure which token of a language model each element of a media input belongs to.

With the self-attention of the image encoder restricted to the diagonal, an element of the input
(a colour of a pixel) reaches the tokens of its own cell and no other: whatever resizes, tiles,
shuffles, pools, merges or projects in between is followed by its gradient. Tokens are numbered in
binary: one backward pass per bit, and one for its complement, give the number of the token that
each element belongs to, or show that it reaches several.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from overt.capture.layouts.influence import (
    LanguageModelStates,
    add_noise,
    language_model_states,
)

NONE, SHARED = -1, -2  # an element that reaches no token, or several
SAMPLED = 24  # tokens of which the dependence without restriction is measured
CLOSEST = 0.1  # share of the cells among which the own one has to be
SAME = 1e-6  # of the largest change: smaller ones are rounding errors
MOST_ELEMENTS = 100_000_000  # that reach shared tokens, together
COMPARED = 4  # of the first shared tokens, and as many spread over all of them


@dataclass(frozen=True, eq=False)
class TokenOwners:
    """The token of each element of a media input.

    Attributes:
        owner: The number of the token, through the batch; NONE or SHARED.
        length: Tokens per sample.
        beside: Name of the argument if the tokens are keys of cross-attention, else the empty
            string: they are positions of the sequence.
        shared: The image tokens, if some share elements; else none.
        reach: The elements that reach each of them, in the flat input.
        resampled: Whether the shared tokens are queries of a resampler, which read all of an image.
    """

    owner: Int[Tensor, "..."]
    length: int
    beside: str
    shared: Int[Tensor, " t"]
    reach: tuple[Int[Tensor, " _"], ...]
    resampled: bool


def measure_owners(model: nn.Module, inputs: Mapping[str, Any], name: str) -> TokenOwners:
    """Measure the token of each element of the media input `name`.

    The last result is kept for each model, and returned for inputs with the same ids and sizes.

    Args:
        model: A model that reads texts and media.
        inputs: Its inputs.
        name: Name of the media input.

    Returns:
        The owners: tokens of the sequence, or, if the media reach none of them, keys of
        cross-attention.

    Raises:
        ValueError: If the positions of the sequence cannot be recorded, no gradient reaches the
            media input (discrete codes), or tokens depend less on their own elements than on
            others if attention is not restricted.
    """
    form = (name, *_form(inputs))
    known = _LAST.get(model)
    if known is not None and known[0] == form:
        return known[1]
    # The caller may have switched gradients off; tensors of inference mode cannot have any.
    with torch.inference_mode(False), torch.enable_grad():
        own = {key: v.clone() if isinstance(v, Tensor) else v for key, v in inputs.items()}
        found = _measure_owners(model, own, name)
    _LAST[model] = form, found
    return found


# The last measurement of each model, for another look at the same images and text.
_LAST: WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], TokenOwners]] = WeakKeyDictionary()


def _form(inputs: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """Yield what owners depend on: ids, sizes, settings, and which tiles or patches are empty."""
    for name, value in sorted(inputs.items()):
        if not isinstance(value, Tensor):  # a setting, such as the layer whose features are used
            yield name, (), repr(value).encode()
        else:
            real = value.is_floating_point()
            axes = tuple(range(value.ndim))[-3 if value.ndim > 3 else -1 :]
            known = value.ne(0).sum(dim=axes).gt(0) if real else value
            yield name, tuple(value.shape), known.cpu().numpy().tobytes()


def _measure_owners(model: nn.Module, inputs: Mapping[str, Any], name: str) -> TokenOwners:
    media = inputs[name].detach().clone().requires_grad_()
    states = language_model_states(model, {**inputs, name: media}, True, differentiable=True)
    if states is None:
        raise ValueError("no stack of layers has one vector per input id")
    beside, changed = _changed_tokens(model, inputs, name, states)
    tokens = _token_rows(states, beside)
    values = _weighted(tokens)
    if not _gradient(values, media).any():
        raise ValueError(
            f"the image tokens change with {name}, but have no gradient: discrete codes"
        )
    owner = _binary_owners(values, media)
    shared, reach = torch.zeros(0, dtype=torch.long), tuple[Tensor, ...]()
    resampled = False
    if bool((owner == SHARED).any()):
        shared = changed.nonzero()[:, 0]
        resampled = states.resampled and _reads_alike(values, media, shared)
        reach = () if resampled else _reach_of_all(values, media, shared)
    found = TokenOwners(
        owner.cpu(),
        len(tokens) // len(inputs["input_ids"]),
        beside,
        shared.cpu(),
        reach,
        resampled,
    )
    if not resampled and not _is_local(model, inputs, name, found):
        raise ValueError(
            "image tokens do not depend most on their own position of the image encoder: they are "
            "resampled, mixed or in another order"
        )
    return found


def _reads_alike(
    values: Float[Tensor, " n"], media: Float[Tensor, "..."], shared: Int[Tensor, " t"]
) -> bool:
    """Return whether tokens that share elements share all of them, as latent queries do.

    Queries read one image, or one tile, at a time: all of them depend on the same elements, or on
    more and more of them (causal). Neighbours that overlap depend on some that others do not. A few
    neighbours and a few others show it.
    """
    spread = torch.linspace(0, len(shared) - 1, min(len(shared), COMPARED)).round().long()
    some = shared[torch.cat([torch.arange(min(len(shared), COMPARED)), spread]).unique()]
    reach = [_reach(values[n : n + 1], media) for n in some.tolist()]
    overlaps = 0
    for one, other in pairwise(reach):
        small, large = sorted((one, other), key=len)
        among = torch.isin(small, large)
        if bool(among.any()) and not bool(among.all()):
            return False
        overlaps += bool(among.any())
    return overlaps > 0


def _reach_of_all(
    values: Float[Tensor, " n"], media: Float[Tensor, "..."], shared: Int[Tensor, " t"]
) -> tuple[Int[Tensor, " _"], ...]:
    """Return the elements that reach each of these tokens."""
    found: list[Tensor] = []
    total = 0
    for number in shared.tolist():
        found.append(_reach(values[number : number + 1], media))
        total += len(found[-1])
        if total > MOST_ELEMENTS:
            raise ValueError(
                f"{len(shared)} tokens depend on overlapping parts of the image, each on much of it"
            )
    return tuple(found)


def _token_rows(states: LanguageModelStates, beside: str) -> Float[Tensor, "n d"]:
    """Return the tokens of all samples. Keys of several images of a sample are one sequence."""
    found = states.beside[beside] if beside else states.sequence
    return found.reshape(-1, found.shape[-1])


def _changed_tokens(
    model: nn.Module, inputs: Mapping[str, Any], name: str, states: LanguageModelStates
) -> tuple[str, Bool[Tensor, " n"]]:
    """Return the sequence that changes with the media input, and its tokens that change."""
    noisy = {**inputs, name: add_noise(inputs[name])}
    other = language_model_states(model, noisy, True)
    for beside in ("", *states.beside):
        if other is None:
            break
        one, two = _token_rows(states, beside).detach(), _token_rows(other, beside)
        change = (one - two).abs().amax(dim=-1)
        changed = change > SAME * change.max()
        if bool(changed.any()):
            return beside, changed
    raise ValueError(f"no token depends on {name}")


def _is_local(model: nn.Module, inputs: Mapping[str, Any], name: str, found: TokenOwners) -> bool:
    """Return whether tokens depend most on their own elements if nothing is restricted.

    The restriction to the diagonal is meant for positions that attend to each other. Latent queries
    that are as many as the positions they read would pass for them.
    """
    media = inputs[name].detach().clone().requires_grad_()
    states = language_model_states(model, {**inputs, name: media}, differentiable=True)
    if states is None:
        return False
    values = _weighted(_token_rows(states, found.beside))
    flat = found.owner.flatten()
    numbers = found.shared if len(found.shared) else flat[flat >= 0].unique()
    cells = found.reach or token_elements(flat, numbers)
    sizes = torch.tensor([len(cell) for cell in cells])
    elements, cell = torch.cat(cells), torch.arange(len(cells)).repeat_interleave(sizes)
    picked = torch.linspace(0, len(cells) - 1, min(len(cells), SAMPLED)).round().long().unique()
    # Energy per element of each cell, since cells at the border may be smaller. A token is local if
    # few cells have more than its own.
    near = 0
    for at in picked.tolist():
        (gradient,) = torch.autograd.grad(values[numbers[at]], media, retain_graph=True)
        energy = gradient.flatten().double().square().cpu()[elements]
        each = torch.zeros(len(cells), dtype=torch.float64).index_add_(0, cell, energy) / sizes
        near += int((each > each[at]).sum()) <= CLOSEST * len(cells)
    return near > len(picked) / 2


def token_elements(
    owner: Int[Tensor, " e"], numbers: Int[Tensor, " t"]
) -> tuple[Int[Tensor, " _"], ...]:
    """Return the elements of each token."""
    order = owner.argsort(stable=True)
    starts = torch.searchsorted(owner[order], numbers)
    ends = torch.searchsorted(owner[order], numbers, right=True)
    return tuple(order[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True))


def _reach(of: Float[Tensor, " n"], media: Float[Tensor, "..."]) -> Int[Tensor, " _"]:
    """Return the elements with a gradient, in the flat input."""
    return _gradient(of, media).flatten().nonzero()[:, 0].cpu()


def _weighted(tokens: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """Return a random combination of the features of each token."""
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(tokens.shape[-1], generator=random).to(tokens)
    return tokens @ weights


def _gradient(of: Float[Tensor, " n"], media: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """Return which elements have a gradient."""
    (found,) = torch.autograd.grad(of.sum(), media, retain_graph=True, allow_unused=True)
    return torch.zeros_like(media).bool() if found is None else found.ne(0)


def _binary_owners(values: Float[Tensor, " n"], media: Float[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Return the token of each element from one pass per bit of the number and its complement."""
    number = torch.arange(len(values), device=values.device)
    owner = torch.zeros(media.shape, dtype=torch.long, device=media.device)
    shared = torch.zeros_like(owner).bool()
    touched = torch.zeros_like(shared)
    for bit in range(max(1, (len(values) - 1).bit_length())):
        ones = (number >> bit & 1).bool()
        one, zero = (_gradient(values[which], media) for which in (ones, ~ones))
        owner |= one.long() << bit
        shared |= one & zero
        touched |= one | zero
    owner[~touched] = NONE
    owner[shared] = SHARED
    return owner
