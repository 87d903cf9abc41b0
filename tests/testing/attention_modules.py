"""Call of every attention module of the library, and the checks each is exempt from."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import overt
from overt.attention import GLOBAL_QUERY, AttentionMap, Form
from overt.nn.captioning.captioner import CausalAttention, CrossAttention, MultiHeadAttention
from overt.nn.hard_attention.aggregate import MeanAggregation, NonLocalAggregation
from overt.nn.hard_attention.attention import HardAttention
from overt.nn.hard_attention.selection import keep_above_uniform, keep_top
from overt.nn.learned_attention.attention import (
    AdditiveCompatibility,
    DotCompatibility,
    ParametrisedCompatibility,
    UniformCompatibility,
    attend,
)
from overt.nn.text_classifier import WordAttention, WordFeatures
from overt.nn.vlbert.encoder import BertEncoder, BertLayer, BertSelfAttention
from overt.nn.vqa.model import SoftAttention
from overt.nn.vqa.stacked_attention import AttentionHop
from overt.testing import AttentionInputs, InputSizes

ONE_QUERY = InputSizes(queries=1)
OutputAndMap = tuple[Tensor, AttentionMap]


# --- calls


def call_with_words(module: Any, given: AttentionInputs) -> OutputAndMap:
    return module(given.keys, WordFeatures(given.keys, given.present, None))


def call_with_cells(module: Any, given: AttentionInputs) -> OutputAndMap:
    return module(given.keys, given.queries[:, 0], given.grid_layout)


def call_with_masked_cells(module: Any, given: AttentionInputs) -> OutputAndMap:
    return module(
        given.keys, given.queries[:, 0], given.grid_layout, given.present.to(given.keys.dtype)
    )


def call_score(module: Any, given: AttentionInputs) -> OutputAndMap:
    return attend(given.keys, given.queries[:, 0], given.grid_layout, module)


def _dot_product_map(
    query: Tensor, key: Tensor, given: AttentionInputs, allowed: Tensor
) -> AttentionMap:
    scores = (query @ key.mT) * query.shape[-1] ** -0.5
    asking = given.query_layout if scores.shape[-2] > 1 else GLOBAL_QUERY
    return AttentionMap.from_scores(scores[:, None], given.text_layout, asking, allowed)


def call_multi_head(module: Any, given: AttentionInputs) -> OutputAndMap:
    query, (key, value) = module.project_query(given.queries), module.project_key_value(given.keys)
    output = module(query, key, value, given.present[:, None, None])
    return output, _dot_product_map(query, key, given, given.present[:, None])


def call_causal(module: Any, given: AttentionInputs) -> OutputAndMap:
    query, (key, value) = module.project_query(given.keys), module.project_key_value(given.keys)
    count = given.keys.shape[1]
    before = torch.ones(count, count, dtype=torch.bool, device=given.keys.device).tril()
    allowed = before.expand(len(given.keys), -1, -1)
    return module(query, key, value, causal=True), _dot_product_map(query, key, given, allowed)


def _map_of_source(source: Any, given: AttentionInputs) -> AttentionMap:
    weights = source.log_weights()[:, None]
    mask = given.present[:, None]
    return AttentionMap(weights, given.text_layout, given.query_layout, mask, form=Form.LOG)


def call_self_attention(module: Any, given: AttentionInputs) -> OutputAndMap:
    output, source, *_ = module(given.keys, None, given.present[:, None, None])
    return output, _map_of_source(source, given)


def call_encoder(module: Any, given: AttentionInputs) -> OutputAndMap:
    output, calls = module(given.keys, given.present)
    return output, _map_of_source(calls[-1].source, given)


# --- exemptions

NO_MASK_REASON = "every cell of an image is present: it takes no mask"
NO_MASK = dict.fromkeys(
    (
        "masked_keys_get_no_weight",
        "masked_keys_are_not_read",
        "padding_changes_nothing",
        "fully_masked_rows_are_zero",
    ),
    NO_MASK_REASON,
)


@dataclass(frozen=True)
class ModuleCase:
    """A module, its call, and the checks that it is exempt from."""

    make: Callable[[], nn.Module]
    attend: Callable[[Any, AttentionInputs], OutputAndMap]
    sizes: InputSizes
    exempt: Mapping[str, str] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()


SELF_ATTENTION = InputSizes(queries=None)
AUTOCAST_REASON = "scores are computed outside autocast, which torch lacks for the meta device"
DEVICE = {"device_can_be_changed": AUTOCAST_REASON}
HARD = {
    "map_can_be_supervised": "a hard selection has no gradient: only the kept cells get one",
    "can_be_exported": "the number of kept cells depends on values, but exported sizes are fixed",
}
PAIRS = {
    **HARD,
    "device_can_be_changed": "the number of kept cells is a tensor value, which meta tensors lack",
}
QUERY_REASON = "the map does not depend on the query, by the form of the paper"
UNIFORM_REASON = "a uniform map depends on no input"
CAUSAL_REASON = "words attend to all words before them; there is no padding mask"
CAUSAL_EXEMPTIONS = {
    **dict.fromkeys(("masked_keys_get_no_weight", "fully_masked_rows_are_zero"), CAUSAL_REASON),
    "key_order_is_equivariant": "the causal mask depends on the order of words",
}
MODULES: dict[str, ModuleCase] = {
    "WordAttention": ModuleCase(
        lambda: WordAttention(8, 6, 2), call_with_words, InputSizes(0, 8, 1)
    ),
    "SoftAttention": ModuleCase(
        lambda: SoftAttention(8, 8, 6), call_with_cells, ONE_QUERY, NO_MASK
    ),
    "SoftAttention by a sum": ModuleCase(
        lambda: SoftAttention(8, 8, 6, 1, torch.add), call_with_cells, ONE_QUERY, NO_MASK
    ),
    "Hop": ModuleCase(lambda: AttentionHop(8, 6, 0.1), call_with_cells, ONE_QUERY, NO_MASK),
    "HardAttention": ModuleCase(
        # `keep_top` refuses a count above the number of cells, which one check varies down to 1.
        lambda: HardAttention(
            8,
            8,
            8,
            selection=lambda s: keep_top(s, min(3, s.shape[-1])),
            aggregate=MeanAggregation(8),
        ),
        call_with_masked_cells,
        ONE_QUERY,
        HARD,
    ),
    "HardAttention above uniform": ModuleCase(
        lambda: HardAttention(8, 8, selection=keep_above_uniform),
        call_with_masked_cells,
        ONE_QUERY,
        HARD,
    ),
    "HardAttention in pairs": ModuleCase(
        lambda: HardAttention(8, 8, 8, 1, keep_above_uniform, NonLocalAggregation(8, 8)),
        call_with_masked_cells,
        ONE_QUERY,
        PAIRS,
    ),
    "Uniform": ModuleCase(
        UniformCompatibility,
        call_score,
        ONE_QUERY,
        {
            **NO_MASK,
            "gradient_reaches_every_input": UNIFORM_REASON,
            "map_can_be_supervised": UNIFORM_REASON,
        },
    ),
    "Dot": ModuleCase(DotCompatibility, call_score, ONE_QUERY, {**NO_MASK, **DEVICE}),
    "Parametrised": ModuleCase(
        lambda: ParametrisedCompatibility(8),
        call_score,
        ONE_QUERY,
        {**NO_MASK, **DEVICE, "gradient_reaches_every_input": QUERY_REASON},
    ),
    "Additive": ModuleCase(
        lambda: AdditiveCompatibility(8), call_score, ONE_QUERY, {**NO_MASK, **DEVICE}
    ),
    "MultiHeadAttention": ModuleCase(
        lambda: MultiHeadAttention(8, 2, 0.1), call_multi_head, InputSizes()
    ),
    "CrossAttention": ModuleCase(lambda: CrossAttention(8, 2, 0.1), call_multi_head, InputSizes()),
    "CausalAttention": ModuleCase(
        lambda: CausalAttention(8, 2, 0.1), call_causal, SELF_ATTENTION, CAUSAL_EXEMPTIONS
    ),
    "SelfAttention": ModuleCase(
        lambda: BertSelfAttention(8, 2, 0.1), call_self_attention, SELF_ATTENTION
    ),
    "Layer": ModuleCase(
        lambda: BertLayer(8, 2, 16, 0.1, 1e-5), call_self_attention, SELF_ATTENTION
    ),
    "Encoder": ModuleCase(
        lambda: BertEncoder(2, 8, 2, 16, 0.1, 1e-5), call_encoder, SELF_ATTENTION
    ),
}


# --- all of them

# Patterns in the source of a class that computes or passes on attention.
ATTENTION_SOURCE = re.compile(
    r"AttentionMap|scaled_dot_product_attention|softmax\(|weigh\(|from_scores\("
)
# Classes with such a pattern that are not attention modules.
EXCLUDED = {
    "QuestionOnly": "ignores the image and returns no map",
    "MeanPooling": "averages all cells and returns no map",
    "AttentionClassifier": "several levels; checked within VGGAttention and ResNetAttention",
    "PrunedModel": "has no attention of its own: a model of the user with fewer tokens",
    "PrunedDecoder": "has no attention of its own: a vision-language model with fewer tokens",
    "AttentiveQuestionEncoder": "a WordAttention; checked in ShowAskAttend and StackedAttention",
}


@dataclass(frozen=True)
class AttentionClass:
    """A class in the source of the library, and whether it is a model."""

    place: str
    name: str
    model: bool


def attention_classes() -> Iterator[AttentionClass]:
    """Yield every class of the library whose forward pass involves attention.

    The source is parsed, because importing all modules would take longer than all checks.
    """
    root = Path(overt.__file__).parent
    for path in sorted([*(root / "nn").rglob("*.py"), *(root / "papers").rglob("*.py")]):
        source = path.read_text()
        for node in ast.parse(source).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            called = methods & {"forward", "encode", "decide"}
            text = ast.get_source_segment(source, node) or ""
            if (
                called
                and ATTENTION_SOURCE.search(text)
                and "Protocol" not in text.partition(":")[0]
            ):
                model = bool(methods & {"encode", "decide"})
                yield AttentionClass(path.relative_to(root).as_posix(), node.name, model)
