"""Predictions and maps of a network of overt for any image and text, with parts removed.

Three maps are available: the network's `attention`, the `gradient` of the answer with respect to
each cell and word, and the attention on the masked input with the highest confidence (`search`).
Networks over boxes (`predict_grounding`) and captioners (`predict_caption`) have their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt.errors import UserError
from overt.experiments import inference_spec
from overt.inspect import predict_caption, predict_grounding
from overt.inspect.answers import Answer, top_classes
from overt.inspect.collate import PAIRED_NETWORK, keep_masks, make_batch
from overt.inspect.inputs import ModelInput, model_errors
from overt.inspect.loaded_model import LoadedModel, run_notes
from overt.inspect.ltpa_networks import level_maps, ltpa_classes
from overt.inspect.panels import ViewOptions, find_layer, map_panels
from overt.papers.catalog import networks

if TYPE_CHECKING:
    from torch import Tensor

    from overt.attention import AttentionMap, Layout
    from overt.data.batch import Batch
    from overt.nn.output import Output
    from overt.viz.panel import Choice, Panel

    View = tuple[list[Panel], list[Choice], list[str], list[Answer]]

MAPS = {
    "attention": "attention of the network",
    "gradient": "gradient of the answer with respect to each cell and word",
    "search": "attention on the masked input with the highest confidence",
}
MAX_PROBES = 50  # per search
SEARCH_SIDE = 4  # blocks per side that a search removes, at most


@dataclass(frozen=True, eq=False)
class NetworkResult:
    """Batch, features, output and keep mask of one forward pass."""

    batch: "Batch"
    features: Any
    output: "Output"
    mask: Mapping[str, "Tensor"] | None


def load_network(folder: Path, name: str) -> LoadedModel:
    """Load the network in a folder with an inference specification, in eval mode."""
    known = inference_spec.read_spec(folder)
    # The name comes from a file: only known classes are built.
    kind = networks().get(known.network)
    if kind is None:
        raise UserError(
            f"{folder} has the network {known.network[:60]!r}, which is not one of overt: name the "
            "Python file of its recipe, with --recipe FILE.py:NAME; code is never read from a "
            "folder."
        )
    model = kind.from_pretrained(folder)
    return LoadedModel(name, model, spec=known, notes=run_notes(folder))


def available_maps(known: inference_spec.InferenceSpec) -> dict[str, str]:
    """Return the maps of a network by name, with descriptions."""
    if known.generates_text:
        return predict_caption.MAPS
    return predict_grounding.MAPS if known.network == PAIRED_NETWORK else MAPS


def view_network(loaded: LoadedModel, model_input: ModelInput, options: ViewOptions) -> "View":
    """Return panels, choices, notes, and answers with probabilities.

    A network without attention has no panel for `attention`. A map without the chosen layer, head
    or query is left out, unless no map has it.
    """
    known = loaded.spec
    assert known is not None
    offered = available_maps(known)
    if options.method not in offered:
        raise UserError(
            f"{loaded.name} has no map '{options.method}': choose one of {', '.join(offered)}."
        )
    if known.generates_text:
        caption = predict_caption.caption_image(loaded, model_input, options.method)
        shown = map_panels(caption.maps, model_input, options)
        return *shown, [*loaded.notes, *caption.notes], predict_caption.caption_answers(caption)
    if known.network == PAIRED_NETWORK and options.method == "gradient":
        predict_grounding.check_two_captions(model_input.text)
    result = run_network(loaded, model_input)
    found, notes = compute_maps(loaded.model, result, options.method)
    # Every level is a map of its own, so a layer selects one of the maps.
    if isinstance(loaded.model, ltpa_classes()) and options.method == "attention":
        level = find_layer(list(found), options.layer, loaded.name)
        found = found if level is None else dict(list(found.items())[level : level + 1])
        options = replace(options, layer=None)
    chances, more = top_answers(loaded, result.output, model_input)
    all_notes = [*loaded.notes, *unknown_words(loaded, result.batch), *notes, *more]
    return *map_panels(found, model_input, options), all_notes, chances


def unknown_words(loaded: LoadedModel, batch: "Batch") -> list[str]:
    """Return a note on words that are not in the vocabulary."""
    from overt.data.vocabulary import UNKNOWN

    assert loaded.spec is not None
    if batch.tokens is None or batch.text is None or loaded.spec.words is None:
        return []
    pairs = zip(batch.text.tokens(0), batch.tokens[0].tolist(), strict=True)
    words = list(dict.fromkeys(word for word, number in pairs if number == UNKNOWN))
    return [f"Not in its vocabulary: {', '.join(words)}."] if words else []


def run_network(loaded: LoadedModel, model_input: ModelInput) -> NetworkResult:
    """Run the network; removed parts are removed from its features."""
    import torch

    batch = make_batch(loaded, model_input)
    with torch.no_grad(), model_errors(loaded.name):
        features = loaded.model.encode(batch)
        mask = keep_masks(feature_layouts(features, batch), model_input)
        return NetworkResult(batch, features, loaded.model.decide(features, mask or None), mask)


def top_answers(
    loaded: LoadedModel, output: "Output", model_input: ModelInput
) -> tuple[list[Answer], list[str]]:
    """Return the most probable answers with probabilities, and notes."""
    known = loaded.spec
    assert known is not None
    if known.network == PAIRED_NETWORK:
        assert model_input.text is not None
        chances = output.prediction[0].detach().float().softmax(dim=-1)
        return predict_grounding.caption_answers(known, model_input.text, chances)
    names = dict(enumerate(known.answers))
    return top_classes(output.prediction[0], lambda at: names.get(at, f"class {at}")), []


def feature_layouts(features: Any, batch: "Batch") -> dict[str, "Layout"]:
    """Return the layouts of the removable features by span name: image cells and words."""
    from overt.attention import regions, words
    from overt.geometry import RegionGeometry
    from overt.nn import ImageFeatures
    from overt.nn.learned_attention.attention import MultiLevelFeatures
    from overt.nn.text_classifier import WordFeatures
    from overt.nn.vlbert.model import VLBertFeatures
    from overt.nn.vqa.model import VQAFeatures as Both
    from overt.papers.ltpa.vgg import ProgressiveFeatures

    match features:
        case VLBertFeatures(words=text, regions=boxes):
            assert batch.boxes is not None
            where = RegionGeometry(batch.boxes)
            return {
                "text": words(text.shape[1], geometry=batch.text),
                "regions": regions(boxes.shape[1], geometry=where),
            }
        case Both(cells=cells, words=text):
            return {**feature_layouts(cells, batch), **feature_layouts(text, batch)}
        case ImageFeatures(layout=layout):
            return {"image": layout}
        case MultiLevelFeatures(cells=cells):
            return {"image": cells[-1].layout}
        case ProgressiveFeatures(cells=cells):
            return {"image": cells.layout}
        case WordFeatures(values=values, geometry=geometry):
            return {"text": words(values.shape[1], geometry=geometry)}
    return {}


# --- maps


def compute_maps(
    model: Any, result: NetworkResult, method: str
) -> tuple[dict[str, "AttentionMap"], list[str]]:
    """Compute the maps of this method by title, and notes."""
    from overt.nn.vlbert.model import VLBertOutput

    if isinstance(result.output, VLBertOutput) and method != "gradient":
        return predict_grounding.word_region_maps(result.output, result.batch, method)
    match method:
        case "gradient":
            return gradient_maps(model, result), [f"Shown: {MAPS[method]}."]
        case "search":
            return search_maps(model, result)
    return attention_maps(model, result), []


def attention_maps(model: Any, result: NetworkResult) -> dict[str, "AttentionMap"]:
    """Return the network's own maps by title."""
    if isinstance(model, ltpa_classes()):
        return level_maps(model, result.batch, result.output)
    titles = {"image": "attention over the image", "text": "attention over the words"}
    return {titles.get(one.keys.spans[0].name, "attention"): one for one in result.output.attention}


def gradient_maps(model: Any, result: NetworkResult) -> dict[str, "AttentionMap"]:
    """Compute the gradient of the answer's score with respect to the mask of each cell and word.

    Only positive values are shown.
    """
    import torch

    from overt.attention import AttentionMap, Kind

    where = feature_layouts(result.features, result.batch)
    answer = int(result.output.prediction[0].argmax())
    found = {}
    with torch.enable_grad():
        mask = {}
        for name, layout in where.items():
            # At the mask of the view: parts that were removed stay removed.
            start = None if result.mask is None else result.mask.get(name)
            count = len(layout.find(name))
            start = torch.ones(1, count) if start is None else start
            mask[name] = start.detach().clone().requires_grad_()
        score = model.decide(result.features, mask).prediction[0, answer]
        slope: tuple[Tensor | None, ...] = (None,) * len(mask)
        # A network that does not use the mask gives no gradient.
        if score.requires_grad:
            slope = torch.autograd.grad(score, list(mask.values()), allow_unused=True)
    for (name, layout), one in zip(where.items(), slope, strict=True):
        if one is None:
            continue
        slope_of, layout = _word_gradients(result, name, one.detach().clamp_min(0), layout)
        model_input = AttentionMap.from_cells(slope_of, layout.only(name))
        title = "the words, by gradient" if name == "text" else "the picture, by gradient"
        found[title] = replace(model_input, kind=Kind.AMOUNT)
    if not found:
        raise UserError("This network has no gradient with respect to its input: use another map.")
    return found


def _word_gradients(
    result: NetworkResult, name: str, slope: "Tensor", layout: "Layout"
) -> tuple["Tensor", "Layout"]:
    """Drop the gradients of begin and end tokens around captions."""
    from overt.nn.vlbert.model import VLBertFeatures

    if name != "text" or not isinstance(result.features, VLBertFeatures):
        return slope, layout
    rows = result.features.words[0].nonzero()[:, 0]
    return slope[:, rows], predict_grounding.word_layout(result.batch, rows)


def search_maps(model: Any, result: NetworkResult) -> tuple[dict[str, "AttentionMap"], list[str]]:
    """Return the attention on the masked input with the highest confidence in the answer."""
    import math

    import torch

    from overt.targets.surrogate import (
        GridMasks,
        RemoveWords,
        exhaustive_search,
        greedy_refine,
        masked_batch,
    )

    attending = {one.keys.spans[0].name for one in result.output.attention}
    where = {
        n: one
        for n, one in feature_layouts(result.features, result.batch).items()
        if n in attending
    }
    if not where:
        raise UserError("This network has no attention to search for.")
    # The search raises the probability of the predicted answer: there is no truth here.
    label = result.output.prediction.argmax(dim=-1)
    found, notes = {}, []
    for name, layout in where.items():
        with masked_batch(model, replace(result.batch, labels=label), [name]) as look:
            if result.mask:
                look = look.with_masks({n: m for n, m in result.mask.items() if n in attending})
            if name == "image":
                side = max(layout.find(name).shape)
                best = greedy_refine(
                    look, GridMasks(scale=max(1, math.ceil(side / SEARCH_SIDE))), MAX_PROBES
                )
            else:
                best = exhaustive_search(look, RemoveWords((1, 2), count=MAX_PROBES))
        title = "the picture, by search" if name == "image" else "the words, by search"
        found[title] = best.maps[name].detach()
        before, after = (float(torch.exp(one[0])) for one in (best.base, best.best))
        notes.append(
            f"Search over the {'image' if name == 'image' else 'words'}: {int(best.probes[0])} "
            f"masks were tried; the best raises the answer from {before:.0%} to {after:.0%}."
        )
    return found, notes
