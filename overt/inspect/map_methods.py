"""Maps of a model for a scorecard, by the word of their method: rollout, Grad-CAM, gradients.

The same words are used by `overt measure --method` and, where a page can draw them, `overt look
--map`. The explained score is that of the predicted class.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from overt.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from overt.attention import AttentionMap, Layout
    from overt.attribution.attribution_map import AttributionMap
    from overt.data.batch import Batch
    from overt.metrics.scorecard.metric_context import MapFunction

ATTENTION = "attention"  # the map that a scorecard has anyway
METHODS = {
    ATTENTION: "attention of the last layer, mean over heads",
    "values": "weights of the last layer times the norms of the values",
    "rollout": "attention rollout through all layers",
    "relevance": "gradient times attention through all layers (Chefer et al.)",
    "gradcam": "Grad-CAM of the last layer with cells",
    "gradcam++": "Grad-CAM++ of that layer",
    "hirescam": "HiResCAM of that layer",
    "layercam": "LayerCAM of that layer",
    "saliency": "size of the gradient by the input",
    "inputxgradient": "input times gradient",
    "smoothgrad": "mean gradient under noise",
    "vargrad": "variance of the gradient under noise",
    "ig": "integrated gradients from zero",
    "deeplift": "DeepLift, rescale rule, from zero",
    "occlusion": "fall of the score without each cell, word or region",
    "rise": "mean score of randomly masked images",
    "shap": "Shapley values of cells, words or regions (KernelSHAP)",
    "lime": "weights of a local linear model of cells, words or regions",
}
OF_ATTENTION = ("values", "rollout", "relevance")
OF_LAYER = ("gradcam", "gradcam++", "hirescam", "layercam")
RANDOM = ("smoothgrad", "vargrad", "rise", "shap", "lime")
RISE_MASKS = 1000
VERSION = 2  # higher when a method gives other maps


def check_methods(methods: Sequence[str]) -> None:
    """Raise for an unknown method.

    Raises:
        UserError: with the known words.
    """
    for method in methods:
        if method not in METHODS:
            raise UserError(f"--method: {method!r} is unknown; use {', '.join(METHODS)}.")


def method_maps(
    methods: Sequence[str], model: Any, over: str | None = None, seed: int = 0
) -> "dict[str, MapFunction]":
    """Return the maps of each method as functions of a batch.

    Args:
        methods: words of `METHODS`; `attention` is the map that a scorecard has anyway.
        model: a model of batches; None for external maps.
        over: "image" or "text"; by default the image if there is one.
        seed: seed of the methods that draw at random.

    Returns:
        One function per method except `attention`.

    Raises:
        UserError: a method is unknown, or there is no model.
    """
    from torch import nn

    check_methods(methods)
    if methods and not isinstance(model, nn.Module):
        raise UserError("--method needs a model with a prediction: there are only maps.")
    chosen = [method for method in dict.fromkeys(methods) if method != ATTENTION]
    return {method: MethodMap(method, model, over, seed) for method in chosen}


@dataclass(frozen=True, eq=False)
class MethodMap:
    """The maps of one method, as a function of a batch."""

    method: str
    model: "nn.Module"
    over: str | None = None
    seed: int = 0

    @property
    def digest(self) -> str:
        """What the maps depend on besides the model and the data."""
        return f"{self.method} {VERSION} {self.seed}"

    def __call__(self, batch: "Batch") -> "AttentionMap":
        """Compute the maps of a batch, one row per sample.

        Raises:
            ValueError: The method does not apply to the model or the samples.
        """
        from overt.metrics.scorecard.metric_context import input_embedding

        if self.method in OF_ATTENTION:
            return _attention_map(self.method, self.model, batch, self.over)
        text = self.over == "text" or (self.over is None and batch.images is None)
        function = _BatchFunction(self.model, batch)
        if text:
            if self.method in OF_LAYER or self.method == "rise":
                raise ValueError(f"{self.method} is for images, not for text")
            return _word_map(self, function, input_embedding(self.model))
        if function.reads_regions:
            if self.method in OF_LAYER or self.method == "rise":
                raise ValueError(f"{self.method} is for pixels, and the model reads regions")
            return _region_map(self, function)
        if batch.images is None:
            raise ValueError(f"{self.method} needs images, and the samples have none")
        if self.method in OF_LAYER:
            return _layer_map(self.method, function)
        return _pixel_map(self, function)


class _BatchFunction:
    """A model of batches, its prediction, and how to make it a function of one tensor."""

    def __init__(self, model: "nn.Module", batch: "Batch") -> None:
        self.model = model
        self.batch = replace(batch.with_own_images(), target=None)

    @cached_property
    def output(self) -> Any:
        """The output for the batch as it is."""
        import torch

        from overt.capture.eval_mode import eval_mode_forked_rng

        with torch.no_grad(), eval_mode_forked_rng(self.model):
            return self.model(self.batch)

    def predict(self, batch: "Batch") -> "Tensor":
        """Return the logits, without capturing attention, which costs more than a small model."""
        from overt.nn.wrappers.hf_inputs import extract_prediction
        from overt.nn.wrappers.wrapped_model import WrappedModel

        if isinstance(self.model, WrappedModel):
            return extract_prediction(self.model.call(self.model.model, batch))
        found: Tensor = self.model(batch).prediction
        return found

    @property
    def classes(self) -> "Tensor":
        """The predicted class of each sample."""
        return self.output.prediction.argmax(dim=-1)

    def sample(self, row: int) -> "_BatchFunction":
        """Return the function for one sample alone."""
        import torch

        return _BatchFunction(self.model, self.batch.select(torch.tensor([row])))

    def module(self) -> "nn.Module":
        """Return a module of pixels, tokens or regions, and of the sample of each row.

        Pixels are those that the first convolution reads, after any normalization.
        """
        from torch import nn

        whole = self
        layer: Any = None if self.reads_regions else self.first_convolution

        class Rows(nn.Module):
            """The model of some samples, with other pixels or tokens."""

            def __init__(self) -> None:
                super().__init__()
                self.inner = whole.model

            def forward(
                self,
                pixels: Any = None,
                rows: Any = None,
                input_ids: Any = None,
                attention_mask: Any = None,
                features: Any = None,
            ) -> Any:
                batch = whole.batch if rows is None else whole.batch.select(rows.cpu())
                batch = batch.with_own_images()
                if input_ids is not None:
                    return whole.predict(replace(batch, tokens=input_ids))
                if features is not None:
                    return whole.predict(replace(batch, features=features))
                handle = layer.register_forward_pre_hook(lambda one, given: (pixels, *given[1:]))
                try:
                    return whole.predict(batch)
                finally:
                    handle.remove()

        return Rows()

    @cached_property
    def reads_regions(self) -> bool:
        """Whether the image is given as features of regions: there is no convolution."""
        from torch import nn

        layers = [one for one in self.model.modules() if isinstance(one, nn.Conv2d)]
        return self.batch.features is not None and not layers

    @cached_property
    def pixels(self) -> "Tensor":
        """What the first convolution reads."""
        return self._first[1]

    @cached_property
    def first_convolution(self) -> Any:
        """The first convolution that reads the images; None for texts."""
        return None if self.batch.images is None else self._first[0]

    @cached_property
    def _first(self) -> "tuple[Any, Tensor]":
        import torch
        from torch import nn

        found: list[tuple[Any, Any]] = []

        def note(module: Any, given: Any) -> None:
            if given and isinstance(given[0], torch.Tensor) and given[0].ndim == 4:
                found.append((module, given[0].detach()))

        layers = [one for one in self.model.modules() if isinstance(one, nn.Conv2d)]
        handles = [layer.register_forward_pre_hook(note) for layer in layers]
        try:
            _ = self.output
        finally:
            for handle in handles:
                handle.remove()
        images = self.batch.images
        assert images is not None
        if not found or found[0][1].shape[:2] != images.shape[:2]:
            raise ValueError("the model has no convolution that reads the images")
        return found[0]

    @cached_property
    def layout(self) -> "Layout | None":
        """The layout of the tokens of a wrapped model."""
        from overt.nn.wrappers.map_selection import layout_pair
        from overt.nn.wrappers.wrapped_model import WrappedModel

        if not isinstance(self.model, WrappedModel):
            return None
        return layout_pair(self.model.encode(self.batch).layout)[1]


def _attention_map(
    method: str, model: "nn.Module", batch: "Batch", over: str | None
) -> "AttentionMap":
    """Compute a map of attention in all layers, in the row from which the model answers."""
    import torch

    from overt.attribution import relevance, rollout, value_norms
    from overt.attribution.value_weighted import find_output_projection
    from overt.capture.eval_mode import eval_mode_forked_rng
    from overt.capture.trace import AttentionTrace
    from overt.nn.wrappers.map_selection import last_layer_of, matching_calls
    from overt.nn.wrappers.wrapped_model import WrappedModel

    if not isinstance(model, WrappedModel):
        raise ValueError(f"{method} needs a Transformer of Hugging Face or timm")
    with eval_mode_forked_rng(model), torch.inference_mode(False), torch.enable_grad():
        features = model.encode(replace(batch, target=None))
        prediction, trace = model.run_traced(features, model.call)
        calls = AttentionTrace(matching_calls(trace), trace.layout)
        if method == "rollout":
            found = rollout(calls)
        elif method == "relevance":
            found = relevance(calls, prediction.amax(dim=-1))
        else:
            last = AttentionTrace(calls.calls[-1:], trace.layout)
            found = value_norms(last, project=find_output_projection(model.model)).over_heads()
        maps = last_layer_of(trace, found.detach())
    return _choose(maps, over).detach()


def _choose(maps: "Sequence[AttentionMap]", over: str | None) -> "AttentionMap":
    """Return the map over a span; by default the last one, as a scorecard does."""
    for one in reversed(maps):
        if over is None or one.keys.spans[0].name == over:
            return one
    raise ValueError(f"the model attends to {[m.keys.spans[0].name for m in maps]}, not {over!r}")


def _layer_map(method: str, function: _BatchFunction) -> "AttentionMap":
    """Compute a class activation map of the last layer whose cells have context."""
    from overt import attribution

    kinds: dict[str, Callable[..., AttentionMap]] = {
        "gradcam": attribution.grad_cam,
        "gradcam++": attribution.grad_cam_plus_plus,
        "hirescam": attribution.hires_cam,
        "layercam": attribution.layer_cam,
    }
    layer, layout = _cell_layer(function)
    return kinds[method](
        function.module(),
        function.pixels,
        function.classes,
        layer,
        function.batch.sample_geometry,
        layout=layout,
    ).detach()


def _cell_layer(function: _BatchFunction) -> "tuple[nn.Module, Layout | None]":
    """Return the last layer with cells: of a CNN or Swin, or the last block of a ViT but one."""
    from overt.metrics.scorecard.feature_maps import last_feature_layer

    height, width = function.pixels.shape[-2:]
    batch, model = function.batch, function.model
    found = last_feature_layer(model, lambda: function.predict(batch), (height, width))
    if found is not None:
        return found, None
    layout = function.layout
    block = _block_before_last(model, batch) if layout is not None else None
    if block is None:
        raise ValueError("no layer of the model has cells of the image")
    return block, layout


def _block_before_last(model: Any, batch: "Batch") -> "nn.Module | None":
    """Return the block before the last one with attention, whose tokens are all still read."""
    import torch

    with torch.no_grad():
        _, trace = model.run_traced(model.encode(batch), model.call)
    parts = trace.calls[-1].name.split(".")
    for at in reversed(range(len(parts))):
        if parts[at].isdigit() and int(parts[at]) > 0:
            before: nn.Module = model.model.get_submodule(
                ".".join([*parts[:at], str(int(parts[at]) - 1)])
            )
            return before
    return None


def _pixel_map(source: MethodMap, function: _BatchFunction) -> "AttentionMap":
    """Compute a map over pixels, on the grid of the model's attention or of the target."""
    import torch

    from overt.attention import grid
    from overt.metrics.resample import resample_to_grid

    rows = torch.arange(len(function.batch), device=function.pixels.device)
    cells, size = _image_grid(function), _size(function.pixels)
    given = {"pixels": function.pixels, "rows": rows}
    geometry = function.batch.sample_geometry
    keys = grid(*size, geometry=None if geometry is None else geometry.resize(size))
    found = replace(_run(source, function, given, cells), keys=keys)
    return resample_to_grid(found, cells)


def _region_map(source: MethodMap, function: _BatchFunction) -> "AttentionMap":
    """Compute a map over the regions of an image, whose features are the input."""
    import torch

    from overt.attention import regions

    batch, features = function.batch, function.batch.features
    assert features is not None
    rows = torch.arange(len(batch), device=features.device)
    found = _run(source, function, {"features": features, "rows": rows}, None)
    there = batch.region_mask
    own = [one.keys for one in function.output.attention if len(one.keys) == len(found.keys)]
    keys = own[-1] if own else regions(len(found.keys))
    if there is None:
        return replace(found, keys=keys)
    values = found.values * there[:, None, None, None]  # absent regions have no features
    return replace(found, values=values, keys=keys, mask=there[:, None])


def _word_map(source: MethodMap, function: _BatchFunction, embedding: Any) -> "AttentionMap":
    """Compute a map over the words of a text, without special tokens."""
    import torch

    from overt.attention import words

    batch = function.batch
    if batch.tokens is None:
        raise ValueError(f"{source.method} needs a text, and the samples have none")
    rows = torch.arange(len(batch), device=batch.tokens.device)
    given = {"input_ids": batch.tokens, "rows": rows}
    if batch.token_mask is not None:
        given["attention_mask"] = batch.token_mask.long()
    found = _run(source, function, given, None, embedding)
    layout = function.layout
    if layout is None or len(layout) != len(found.keys):
        return replace(found, keys=words(len(found.keys), geometry=batch.text))
    return replace(found, keys=layout).block("global", "text")


def _run(
    source: MethodMap,
    function: _BatchFunction,
    inputs: "dict[str, Tensor]",
    cells: tuple[int, int] | None,
    embedding: Any = None,
) -> "AttentionMap":
    """Run a method on pixels, words or regions."""
    import torch

    from overt import attribution
    from overt.attention import AttentionMap
    from overt.metrics.rng import derive_seed

    method = source.method
    if method in RANDOM and len(function.batch) > 1:
        # Sample by sample, so that random numbers do not depend on the batch.
        maps = []
        for row in range(len(function.batch)):
            one = {name: value[row : row + 1] for name, value in inputs.items()}
            one["rows"] = torch.zeros_like(one["rows"])
            maps.append(_run(source, function.sample(row), one, cells, embedding))
        masks = None if maps[0].mask is None else torch.cat([one.visible for one in maps])
        values = torch.cat([one.values for one in maps])
        return AttentionMap(values, maps[0].keys, maps[0].queries, masks, maps[0].kind)
    model, classes = function.module(), function.classes
    calls: dict[str, Callable[..., AttributionMap]] = {
        "saliency": attribution.input_gradient,
        "inputxgradient": attribution.input_x_gradient,
        "ig": attribution.integrated_gradients,
        "deeplift": attribution.deep_lift,
        "occlusion": partial(attribution.occlusion, window=_window(function, cells)),
        "smoothgrad": attribution.smooth_grad,
        "vargrad": attribution.var_grad,
        "rise": partial(attribution.rise, masks=RISE_MASKS),
        "shap": attribution.kernel_shap,
        "lime": attribution.lime,
    }
    more: dict[str, Any] = {} if method == "rise" else {"embedding": embedding}
    if method in RANDOM:
        seed = derive_seed(source.seed, method, *function.batch.ids) % 2**63
        more["generator"] = torch.Generator().manual_seed(seed)
    if method in ("shap", "lime") and cells is None:
        if "features" in inputs:
            parts = inputs["features"].shape[1]
        else:
            there = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
            parts = int(there.sum(dim=1).max())
        more["samples"] = max(512, 4 * parts)  # whatever the padding is
    found: AttributionMap = calls[method](model, inputs, classes, **more)
    # The guarantees hold for these cells only.
    return AttentionMap(found.values, found.keys, found.queries, found.mask, found.kind)


def _window(function: _BatchFunction, cells: tuple[int, int] | None) -> int:
    """Return the side of a cell in pixels, or one word."""
    if cells is None:
        return 1
    height, width = _size(function.pixels)
    return max(1, min(height // cells[0], width // cells[1]))


def _image_grid(function: _BatchFunction) -> tuple[int, int]:
    """Return the cells of the model's attention, else those of external maps."""
    from overt.metrics.scorecard.external_maps import CELLS

    for one in reversed(function.output.attention):
        shape = one.keys.spans[0].shape
        if len(one.keys.spans) == 1 and len(shape) == 2:
            return shape[0], shape[1]
    height, width = _size(function.pixels)
    return min(CELLS[0], height), min(CELLS[1], width)


def _size(images: "Tensor") -> tuple[int, int]:
    return int(images.shape[-2]), int(images.shape[-1])
