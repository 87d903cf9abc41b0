"""Inputs that a method varies: pixels, features, or the embeddings of words.

A model is seen as a function of one tensor, which returns one score per row. Rows are copies of the
samples, changed by a method; they are run in chunks, so that memory does not grow with the number
of copies.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from overt.attention import GLOBAL_QUERY, Kind, Layout, grid, words
from overt.attribution.attribution_map import AttributionMap
from overt.attribution.target_scores import Target, score_target
from overt.capture.eval_mode import eval_mode_forked_rng
from overt.geometry import PixelGeometry, TextGeometry

# Pixels (b, c, y, x), features (b, n, d) or (b, n), tokens (b, n), or keyword arguments of the
# model, such as the output of a Hugging Face tokenizer or image processor.
Inputs = Tensor | Mapping[str, Any]
Model = nn.Module | Callable[..., Any]
PlaceGeometry = PixelGeometry | TextGeometry
TOKENS, MASK = "input_ids", "attention_mask"


@dataclass(frozen=True, eq=False)
class VariedInput:
    """The score of a target as a function of the tensor that a method varies.

    Args:
        values: The tensor of the samples.
        call: Runs the model on changed values; the second argument is the sample of each row.
        target: What is explained.
        keys: The positions of the tensor: pixels or words.
        present: Which positions are not padding; None if all are.
        embed: Returns the embeddings of other tokens, if the inputs are tokens.
    """

    values: Float[Tensor, "b ..."]
    call: Callable[[Tensor, Tensor], Any]
    target: Target
    keys: Layout
    present: Bool[Tensor, "b k"] | None = None
    embed: Callable[[Tensor], Tensor] | None = None

    def score(
        self,
        values: Float[Tensor, "n ..."],
        rows: Int[Tensor, " n"],
        squash: Callable[..., Tensor] | None = None,
    ) -> Float[Tensor, " n"]:
        """Compute the score of each row."""
        output = self.call(values, rows)
        score = score_target(output, self.target, squash, rows, len(self.values))
        if len(score) != len(values):
            raise ValueError(f"the model returned {len(score)} scores for {len(values)} rows")
        return score

    def score_in_chunks(
        self, values: Float[Tensor, "b ..."], chunk: int | None
    ) -> Float[Tensor, " b"]:
        """Compute the score of each sample with these values, without a gradient."""
        parts = (self.score(values[at], at) for _, at in self.chunks(1, chunk))
        return torch.cat([part.to(precise(part)) for part in parts])

    def gradient(
        self, values: Float[Tensor, "n ..."], rows: Int[Tensor, " n"]
    ) -> Float[Tensor, "n ..."]:
        """Compute the gradient of each row's score, in float32 at least."""
        with torch.enable_grad():
            leaf = values.detach().requires_grad_()
            score = self.score(leaf, rows)
            found = None
            if score.requires_grad:
                (found,) = torch.autograd.grad(score.sum(), leaf, allow_unused=True)
        if found is None:
            raise ValueError(
                "the target has no gradient to the inputs: the model may detach them, or the "
                "target may not depend on them; use occlusion, rise, kernel_shap or lime"
            )
        return found.to(precise(found))

    def chunks(
        self, copies: int, chunk: int | None, samples: Int[Tensor, " s"] | None = None
    ) -> Iterator[tuple[Int[Tensor, " n"], Int[Tensor, " n"]]]:
        """Yield the copy and the sample of each row, at most `chunk` rows at a time.

        All samples of the first copy come first; by default these are all of the batch. By default
        as many rows as there are samples are run at a time: memory is then that of one pass over
        the inputs.
        """
        device = self.values.device
        if samples is None:
            samples = torch.arange(len(self.values), device=device)
        b = len(samples)
        size = b if chunk is None else chunk
        if size < 1:
            raise ValueError(f"chunk must be at least 1 row, got {size}")
        for start in range(0, copies * b, size):
            pair = torch.arange(start, min(start + size, copies * b), device=device)
            yield pair // b, samples[pair % b]

    def fill(self, baseline: float | Tensor) -> Float[Tensor, "b ..."]:
        """Return the values of absent inputs: a number, values, or tokens for embeddings."""
        if isinstance(baseline, Tensor) and not baseline.is_floating_point():
            if self.embed is None:
                raise ValueError(f"baseline must be floating point, got {baseline.dtype}")
            return self.embed(baseline)
        try:
            given = torch.as_tensor(baseline).to(self.values)
            return given.broadcast_to(self.values.shape)
        except RuntimeError:
            shape = tuple(torch.as_tensor(baseline).shape)
            raise ValueError(
                f"baseline of the shape {shape} does not fit inputs of the shape "
                f"{tuple(self.values.shape)}"
            ) from None

    def channels(self, values: Float[Tensor, "n ..."]) -> Float[Tensor, "n c k"]:
        """Arrange values as (rows, channels, positions)."""
        if values.ndim == 4:
            return values.flatten(2)
        return values.mT if values.ndim == 3 else values[:, None]

    def spread(self, positions: Tensor) -> Tensor:
        """Arrange numbers of positions (n, k) so that they broadcast over the values (n, ...)."""
        if self.values.ndim == 4:
            return positions.unflatten(1, self.values.shape[2:])[:, None]
        return positions[..., None] if self.values.ndim == 3 else positions

    def to_map(
        self, values: Float[Tensor, "b k"], kind: Kind = Kind.SIGNED, **guarantees: Any
    ) -> AttributionMap:
        """Return the map of one number per position; padding has zero."""
        mask = None
        if self.present is not None:
            values, mask = values * self.present, self.present[:, None]
        return AttributionMap(
            values[:, None, None, None], self.keys, GLOBAL_QUERY, mask, kind, **guarantees
        )


@contextmanager
def vary_input(
    model: Model,
    inputs: Inputs,
    target: Target,
    geometry: PlaceGeometry | None = None,
    embedding: nn.Module | None = None,
) -> Iterator[VariedInput]:
    """Run a model as a function of its pixels or word embeddings for a block.

    The model is in evaluation mode; its mode, hooks and random state are restored. Only
    `VariedInput.gradient` records a graph.

    Args:
        model: The network, or for pixels any function of them.
        inputs: Pixels, features, tokens, or keyword arguments of the model.
        target: What is explained.
        geometry: How the images were resized and cropped, or the characters of each token.
        embedding: For tokens: the layer whose output is varied; by default the token embedding of
            a Hugging Face model, or the only `nn.Embedding`.

    Yields:
        The function.

    Raises:
        ValueError: It is not clear which tensor to vary.
    """
    # Leaving inference mode also enables gradients.
    with eval_mode_forked_rng(model), torch.inference_mode(False), torch.no_grad():
        given = {name: _leave_inference(one) for name, one in _named(inputs).items()}
        name = _varied_name(given, embedding)
        whole = given[name]
        assert isinstance(whole, Tensor)
        if not len(whole):
            raise ValueError("expected at least one sample, got an empty batch")

        def run(rows: Tensor, changed: Tensor | None = None) -> Any:
            more = {key: _take_rows(one, rows, len(whole)) for key, one in given.items()}
            if changed is not None:
                more[name] = changed
            return model(**more) if isinstance(inputs, Mapping) else model(more[name])

        if whole.is_floating_point() and embedding is None:
            keys = _layout(whole, geometry)
            yield VariedInput(whole.detach(), lambda x, rows: run(rows, x), target, keys)
            return
        if not isinstance(model, nn.Module):
            raise ValueError("tokens need a module whose embeddings are varied, got a function")
        layer = embedding if embedding is not None else _find_embedding(model)

        def embed(tokens: Tensor) -> Tensor:
            shown = tokens.to(whole.device).broadcast_to(whole.shape)
            everything = torch.arange(len(whole), device=whole.device)
            return _first_output(layer, lambda: run(everything, shown))

        def call(values: Tensor, rows: Tensor) -> Any:
            with _ReplacedOutput(layer, values):
                return run(rows)

        values, present = embed(whole), given.get(MASK)
        present = present.bool() if isinstance(present, Tensor) and present.ndim == 2 else None
        yield VariedInput(values, call, target, _layout(values, geometry), present, embed)


class _FoundError(Exception):
    """Stops a model whose remaining layers are not needed."""


def _first_output(layer: nn.Module, run: Callable[[], Any]) -> Tensor:
    """Run a model up to a layer and return the embeddings of the layer."""
    found: list[Tensor] = []

    def stop(module: nn.Module, given: Any, output: Any) -> None:
        found.append(_embeddings(layer, output))
        raise _FoundError

    handle = layer.register_forward_hook(stop)
    try:
        run()
    except _FoundError:
        return found[0]
    finally:
        handle.remove()
    raise ValueError(_times(layer, 0))


class _ReplacedOutput:
    """Replace the output of a layer that runs once."""

    def __init__(self, layer: nn.Module, values: Tensor) -> None:
        self.layer, self.values, self.times = layer, values, 0

    def __enter__(self) -> None:
        self.handle = self.layer.register_forward_hook(self._hook)

    def __exit__(self, kind: object, *_: object) -> None:
        self.handle.remove()
        if kind is None and self.times != 1:
            raise ValueError(_times(self.layer, self.times))

    def _hook(self, module: nn.Module, given: Any, output: Any) -> Tensor:
        _embeddings(self.layer, output)
        self.times += 1
        return self.values


def _embeddings(layer: nn.Module, output: Any) -> Tensor:
    if not isinstance(output, Tensor) or output.ndim != 3:
        raise ValueError(
            f"the layer {type(layer).__name__} must return embeddings (b, n, d); give another "
            "layer as embedding="
        )
    return output


def _times(layer: nn.Module, times: int) -> str:
    return (
        f"the embedding {type(layer).__name__} ran {times} times in one pass; give a layer that "
        "runs once as embedding="
    )


def precise(values: Tensor) -> torch.dtype:
    """Return the dtype for sums of these values: float32 or more."""
    return torch.promote_types(values.dtype, torch.float32)


def _named(inputs: Inputs) -> dict[str, Any]:
    return dict(inputs) if isinstance(inputs, Mapping) else {"": inputs}


def _leave_inference(value: Any) -> Any:
    """Copy inference tensors, which cannot be saved for a backward pass."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _varied_name(given: Mapping[str, Any], embedding: nn.Module | None) -> str:
    """Return which input is varied: the tokens, or the only tensor of pixels or features."""
    tensors = {name: one for name, one in given.items() if isinstance(one, Tensor)}
    if len(tensors) == 1:
        return next(iter(tensors))
    real = [name for name, one in tensors.items() if one.is_floating_point() and one.ndim > 2]
    if TOKENS in tensors and (embedding is not None or not real):
        return TOKENS
    if len(real) == 1 and TOKENS not in tensors:
        return real[0]
    raise ValueError(
        f"cannot tell which of the inputs {sorted(given)} to explain: give embedding= for tokens, "
        "or a tensor of pixels and as the model a function of it"
    )


def _take_rows(value: Any, rows: Tensor, samples: int) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != samples:
        return value
    return value[rows.to(value.device)]


def _find_embedding(model: nn.Module) -> nn.Module:
    find = getattr(model, "get_input_embeddings", None)
    found = find() if callable(find) else None
    if isinstance(found, nn.Module):
        return found
    layers = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if len(layers) != 1:
        raise ValueError(
            f"the model has {len(layers)} embeddings: give that of the words as embedding="
        )
    return layers[0]


def _layout(values: Tensor, geometry: PlaceGeometry | None) -> Layout:
    """Return the layout of pixels or words, with their geometry."""
    if values.ndim not in (2, 3, 4):
        raise ValueError(
            f"inputs must be pixels (b, c, y, x) or features (b, n, d), got {tuple(values.shape)}"
        )
    if geometry is not None and len(geometry) != len(values):
        raise ValueError(
            f"geometry has {len(geometry)} samples, the batch has {len(values)} samples"
        )
    if values.ndim == 4:
        if isinstance(geometry, TextGeometry):
            raise ValueError("pixels need a PixelGeometry, got a TextGeometry")
        return grid(values.shape[2], values.shape[3], geometry=geometry)
    if isinstance(geometry, PixelGeometry):
        raise ValueError("words need a TextGeometry, got a PixelGeometry")
    return words(values.shape[1], geometry=geometry)
