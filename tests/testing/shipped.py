"""How every attention module of the library is called, and what of the contract does not apply."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import overt
from overt.attention import POINT, AttentionMap, Form
from overt.models.answering.stacked import Hop
from overt.models.answering.vqa import SoftAttention
from overt.models.captioning.captioner import CausalAttention, CrossAttention, MultiHeadAttention
from overt.models.hard.aggregate import Mean, Pairwise
from overt.models.hard.attention import HardAttention
from overt.models.hard.selection import keep_above_uniform, keep_top
from overt.models.paying.attention import Additive, Dot, Parametrised, Uniform, attend
from overt.models.text import WordAttention, Words
from overt.models.vlbert.encoder import Encoder, Layer, SelfAttention
from overt.testing import Given, Sizes

ONE = Sizes(queries=1)
Answered = tuple[Tensor, AttentionMap]


# --- how they are called


def words(module: Any, given: Given) -> Answered:
    return module(given.keys, Words(given.keys, given.present, None))


def cells(module: Any, given: Given) -> Answered:
    return module(given.keys, given.queries[:, 0], given.cells)


def present_cells(module: Any, given: Given) -> Answered:
    """A cell of zeros is one that was removed."""
    there = given.keys * given.present[..., None].to(given.keys.dtype)
    return module(there, given.queries[:, 0], given.cells)


def compatible(module: Any, given: Given) -> Answered:
    return attend(given.keys, given.queries[:, 0], given.cells, module)


def _dotted(query: Tensor, key: Tensor, given: Given, allowed: Tensor) -> AttentionMap:
    scores = (query @ key.mT) * query.shape[-1] ** -0.5
    asking = given.asking if scores.shape[-2] > 1 else POINT
    return AttentionMap.from_scores(scores[:, None], given.words, asking, allowed)


def in_heads(module: Any, given: Given) -> Answered:
    query, (key, value) = module.asked(given.queries), module.read(given.keys)
    output = module(query, key, value, given.present[:, None, None])
    return output, _dotted(query, key, given, given.present[:, None])


def causal(module: Any, given: Given) -> Answered:
    query, (key, value) = module.asked(given.keys), module.read(given.keys)
    count = given.keys.shape[1]
    before = torch.ones(count, count, dtype=torch.bool, device=given.keys.device).tril()
    allowed = before.expand(len(given.keys), -1, -1)
    return module(query, key, value, causal=True), _dotted(query, key, given, allowed)


def _of_call(source: Any, given: Given) -> AttentionMap:
    weights = source.log_weights()[:, None]
    mask = given.present[:, None]
    return AttentionMap(weights, given.words, given.asking, mask, form=Form.LOG)


def to_itself(module: Any, given: Given) -> Answered:
    output, source, *_ = module(given.keys, None, given.present[:, None, None])
    return output, _of_call(source, given)


def encoded(module: Any, given: Given) -> Answered:
    output, calls = module(given.keys, given.present)
    return output, _of_call(calls[-1].source, given)


# --- what does not apply

WHOLE = "every cell of a picture is there: it takes no mask"
NO_MASK = dict.fromkeys(
    (
        "hidden_keys_get_no_weight",
        "hidden_keys_are_not_read",
        "padding_changes_nothing",
        "nothing_to_see_gives_nothing",
    ),
    WHOLE,
)


@dataclass(frozen=True)
class Face:
    """A module as it is made, how it is called, and the checks that it is exempt from."""

    make: Callable[[], nn.Module]
    attend: Callable[[Any, Given], Answered]
    sizes: Sizes
    exempt: Mapping[str, str] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()


SELF = Sizes(queries=None)
AUTOCAST = "scores are taken outside autocast, which torch does not have for the meta device"
DEVICE = {"device_can_be_changed": AUTOCAST}
HARD = {
    "map_can_be_supervised": "a choice has no gradient: what was kept learns, and not where it is",
    "can_be_exported": "how many cells are kept depends on numbers, and a graph has one size",
}
PAIRS = {
    **HARD,
    "device_can_be_changed": "how many cells are kept is asked of the device, and meta has none",
}
UNHEARD = "the query cannot change the map, which is an identity of the paper's form"
UNASKED = "an even map asks nothing and learns nothing"
CAUSAL = "words look back at all words before them; there is no padding to hide"
LOOKS_BACK = {
    **dict.fromkeys(("hidden_keys_get_no_weight", "nothing_to_see_gives_nothing"), CAUSAL),
    "keys_may_come_in_any_order": "the order of words is what it goes by",
}
FACES: dict[str, Face] = {
    "WordAttention": Face(lambda: WordAttention(8, 6, 2), words, Sizes(0, 8, 1)),
    "SoftAttention": Face(lambda: SoftAttention(8, 8, 6), cells, ONE, NO_MASK),
    "SoftAttention by a sum": Face(
        lambda: SoftAttention(8, 8, 6, 1, torch.add), cells, ONE, NO_MASK
    ),
    "Hop": Face(lambda: Hop(8, 6, 0.1), cells, ONE, NO_MASK),
    "HardAttention": Face(
        lambda: HardAttention(8, 8, 8, selection=lambda s: keep_top(s, 3), aggregate=Mean(8)),
        present_cells,
        ONE,
        HARD,
    ),
    "HardAttention above uniform": Face(
        lambda: HardAttention(8, 8, selection=keep_above_uniform), present_cells, ONE, HARD
    ),
    "HardAttention in pairs": Face(
        lambda: HardAttention(8, 8, 8, 1, keep_above_uniform, Pairwise(8, 8)),
        present_cells,
        ONE,
        PAIRS,
    ),
    "Uniform": Face(
        Uniform,
        compatible,
        ONE,
        {**NO_MASK, "gradient_reaches_every_input": UNASKED, "map_can_be_supervised": UNASKED},
    ),
    "Dot": Face(Dot, compatible, ONE, {**NO_MASK, **DEVICE}),
    "Parametrised": Face(
        lambda: Parametrised(8),
        compatible,
        ONE,
        {**NO_MASK, **DEVICE, "gradient_reaches_every_input": UNHEARD},
    ),
    "Additive": Face(lambda: Additive(8), compatible, ONE, {**NO_MASK, **DEVICE}),
    "MultiHeadAttention": Face(lambda: MultiHeadAttention(8, 2, 0.1), in_heads, Sizes()),
    "CrossAttention": Face(lambda: CrossAttention(8, 2, 0.1), in_heads, Sizes()),
    "CausalAttention": Face(lambda: CausalAttention(8, 2, 0.1), causal, SELF, LOOKS_BACK),
    "SelfAttention": Face(lambda: SelfAttention(8, 2, 0.1), to_itself, SELF),
    "Layer": Face(lambda: Layer(8, 2, 16, 0.1, 1e-5), to_itself, SELF),
    "Encoder": Face(lambda: Encoder(2, 8, 2, 16, 0.1, 1e-5), encoded, SELF),
}


# --- all of them

# Words in the source of a class that attends, or that hands on what others attended to.
SIGNS = re.compile(r"AttentionMap|scaled_dot_product_attention|softmax\(|weigh\(|from_scores\(")
# Classes with such a word that are no attention of their own.
APART = {
    "Blind": "looks at nothing, and says so by having no map",
    "MeanPool": "looks at everything alike, and says so by having no map",
    "AttentionClassifier": "several levels at once; asked within VGGAttention and ResNetAttention",
    "Reader": "its attention is a WordAttention; asked within ShowAskAttend and StackedAttention",
}


@dataclass(frozen=True)
class Found:
    """A class in the source of the library, and whether it is a whole model."""

    place: str
    name: str
    model: bool


def attending() -> Iterator[Found]:
    """Every class of the models that has to do with attention when it is called.

    Found by reading the source: importing all of it would take longer than all checks.
    """
    root = Path(overt.__file__).parent / "models"
    for path in sorted(root.rglob("*.py")):
        source = path.read_text()
        for node in ast.parse(source).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            called = methods & {"forward", "encode", "decide"}
            text = ast.get_source_segment(source, node) or ""
            if called and SIGNS.search(text) and "Protocol" not in text.partition(":")[0]:
                model = bool(methods & {"encode", "decide"})
                yield Found(path.relative_to(root).as_posix(), node.name, model)
