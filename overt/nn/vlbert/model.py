"""VL-BERT and the tasks of grounded fine-tuning.

Su et al., "VL-BERT", ICLR 2020, https://arxiv.org/abs/1908.08530; the tasks are those of Samaran et
al., "Attending Self-Attention", 2021, section 2.2.
"""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.attention import AttentionMap, Layout, Span
from overt.capture.trace import AttentionTrace
from overt.data.batch import Batch
from overt.data.vocabulary import BEGIN, END
from overt.errors import UserError
from overt.geometry import RegionGeometry
from overt.nn.network import Network
from overt.nn.output import Output
from overt.nn.vlbert.encoder import BertEncoder, layer_weights, read_bert
from overt.nn.vlbert.phrases import PhraseSpans, pair_features, pool_phrases
from overt.nn.vlbert.regions import RegionEncoder, region_encoder_from_config
from overt.nn.wrappers.key_masking import key_weights

ABSENT_LOGIT = -1e4  # logit of an absent region
INIT_STD, BASE_WIDTH = (
    0.02,
    768,
)  # the deviation of BERT's first weights, and the width that it is for
TEXT_SEGMENTS, IMAGE_SEGMENT = 2, 2  # segments of the two captions, and the segment of regions


@dataclass(frozen=True)
class VLBertSizes:
    """Layer sizes of a `VLBert`, and its special tokens.

    Args:
        vocabulary: number of tokens.
        width: features of a state.
        layers: number of layers.
        heads: number of attention heads.
        inner: units of the feed-forward layers.
        positions: maximum length, with two extra positions for regions and the end.
        dropout: dropout probability.
        gain: initial scale of the region features: 0 as in VL-BERT's code, so that a pretrained
            encoder first sees words alone; 1 for training from scratch. The scale of the
            whole-image features, which are added to every word, always starts at 0.
        epsilon: epsilon of the layer norms.
        begin: id of the class token.
        end: id of the separator token.

    Example:
        >>> sizes = VLBertSizes(vocabulary=30_522)
        >>> sizes.layers, sizes.width // sizes.heads
        (12, 64)
    """

    vocabulary: int
    width: int = 768
    layers: int = 12
    heads: int = 12
    inner: int = 3072
    positions: int = 512
    dropout: float = 0.1
    gain: float = 0.0
    epsilon: float = 1e-12
    begin: int = BEGIN
    end: int = END


@dataclass(frozen=True, eq=False)
class VLBertFeatures:
    """Captions and regions as one sequence of embeddings.

    Args:
        embedded: embeddings.
        present: positions that exist.
        words: text positions that are words, not special tokens or padding.
        regions: regions that exist.
        layout: spans "class", "text", "image" (the whole-image box), "regions", and "boxes", the
            last two together; the end token is in no span.
    """

    embedded: Float[Tensor, "b k d"]
    present: Bool[Tensor, "b k"]
    words: Bool[Tensor, "b n"]
    regions: Bool[Tensor, "b m"]
    layout: Layout

    def pooled(self) -> Float[Tensor, "b d"]:
        """Return the mean over all embeddings, independent of attention."""
        there = self.present[..., None].to(self.embedded.dtype)
        return (self.embedded * there).sum(dim=1) / there.sum(dim=1).clamp_min(1)


@dataclass(frozen=True, eq=False)
class VLBertOutput(Output):
    """Output with the final states and the attention trace.

    `trace` gives any block of the weights of every layer and head, before dropout, with a gradient,
    computed on demand. `attention` has the maps from the class token to words and to regions in the
    last layer.
    """

    states: Tensor | None = None
    trace: AttentionTrace | None = None
    features: VLBertFeatures | None = None

    def text(self) -> Float[Tensor, "b n d"]:
        """Return the final states of the text, including special tokens and padding."""
        return self._of("text")

    def regions(self) -> Float[Tensor, "b m d"]:
        """Return the final states of the regions."""
        return self._of("regions")

    def _of(self, name: str) -> Tensor:
        assert self.states is not None and self.features is not None
        return self.states[:, self.features.layout.find(name).index]


# --- heads


@runtime_checkable
class VLBertHead(Protocol):
    """Protocol of a head on the final states: one logit per class or region."""

    def __call__(
        self, states: Float[Tensor, "b k d"], features: VLBertFeatures
    ) -> Float[Tensor, "b c"]: ...

    def config(self) -> dict[str, Any]:
        """Return plain values from which `head_from_config` builds the same module."""
        ...


class ClassificationHead(nn.Module):
    """Classifier on the class token, for matching captions (eq. 1) or answers.

    Args:
        width: features of a state.
        classes: number of classes.
        dropout: dropout before the classifier.

    Example:
        >>> from overt.nn import PrecomputedRegionEncoder
        >>> from overt.testing import toy_batch
        >>> boxes = torch.tensor([[0.0, 0.0, 16.0, 16.0], [16.0, 16.0, 32.0, 32.0]]).expand(3, 2, 4)
        >>> batch = replace(toy_batch(3), boxes=boxes, features=torch.rand(3, 2, 4))
        >>> sizes = VLBertSizes(vocabulary=10, width=8, layers=1, heads=2, inner=16)
        >>> head = ClassificationHead(8, classes=5)
        >>> model = VLBert(sizes, PrecomputedRegionEncoder(4), head).eval()
        >>> model(batch).prediction.shape
        torch.Size([3, 5])
    """

    def __init__(self, width: int, classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.made_with = {"width": width, "classes": classes, "dropout": dropout}
        self.pool = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)
        # the pooler may come from a pretrained encoder; the classifier is always new
        self.decision = _xavier(nn.Linear(width, classes))

    def forward(
        self, states: Float[Tensor, "b k d"], features: VLBertFeatures
    ) -> Float[Tensor, "b c"]:
        """Return one logit per class."""
        return self.decision(self.drop(torch.tanh(self.pool(states[:, 0]))))

    def config(self) -> dict[str, Any]:
        """Return the sizes."""
        return {"kind": "classify", **self.made_with}


class MaskTokenHead(nn.Module):
    """Classifier on the last token of the text, a mask token after a question, as in VL-BERT.

    A network that was pretrained on masked words reads the answer where it predicts a word.

    Args:
        width: features of a state.
        classes: number of classes.
        dropout: dropout before the classifier.

    Example:
        >>> from overt.nn import PrecomputedRegionEncoder
        >>> from overt.testing import toy_batch
        >>> boxes = torch.tensor([[0.0, 0.0, 16.0, 16.0], [16.0, 16.0, 32.0, 32.0]]).expand(3, 2, 4)
        >>> batch = replace(toy_batch(3), boxes=boxes, features=torch.rand(3, 2, 4))
        >>> sizes = VLBertSizes(vocabulary=10, width=8, layers=1, heads=2, inner=16)
        >>> model = VLBert(sizes, PrecomputedRegionEncoder(4), MaskTokenHead(8, classes=5)).eval()
        >>> model(batch).prediction.shape
        torch.Size([3, 5])
    """

    def __init__(self, width: int, classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.made_with = {"width": width, "classes": classes, "dropout": dropout}
        self.drop = nn.Dropout(dropout)
        self.decision = _xavier(nn.Linear(width, classes))

    def forward(
        self, states: Float[Tensor, "b k d"], features: VLBertFeatures
    ) -> Float[Tensor, "b c"]:
        """Return one logit per class."""
        # special tokens are not words, but the mask token is: it is the last one
        places = torch.arange(features.words.shape[1], device=states.device)
        last = (places * features.words).amax(dim=1)
        return self.decision(self.drop(states[torch.arange(len(states), device=last.device), last]))

    def config(self) -> dict[str, Any]:
        """Return the sizes."""
        return {"kind": "mask", **self.made_with}


class RegionHead(nn.Module):
    """Score of each region from its own state, to choose one; absent regions cannot win.

    Args:
        width: features of a state.

    Example:
        >>> from overt.nn import PrecomputedRegionEncoder
        >>> from overt.testing import toy_batch
        >>> boxes = torch.tensor([[0.0, 0.0, 16.0, 16.0], [16.0, 16.0, 32.0, 32.0]]).expand(3, 2, 4)
        >>> batch = replace(toy_batch(3), boxes=boxes, features=torch.rand(3, 2, 4))
        >>> sizes = VLBertSizes(vocabulary=10, width=8, layers=1, heads=2, inner=16)
        >>> model = VLBert(sizes, PrecomputedRegionEncoder(4), RegionHead(8)).eval()
        >>> model(batch).prediction.shape  # one logit per region
        torch.Size([3, 2])
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.decision = _xavier(nn.Linear(width, 1))

    def forward(
        self, states: Float[Tensor, "b k d"], features: VLBertFeatures
    ) -> Float[Tensor, "b c"]:
        """Return one logit per region."""
        logits = self.decision(states[:, features.layout.find("regions").index])[..., 0]
        # finite instead of -inf: a sample without regions must not give NaN in the softmax
        return logits.masked_fill(~features.regions, ABSENT_LOGIT)

    def config(self) -> dict[str, Any]:
        """Return the size."""
        return {"kind": "point", "width": self.width}


def head_from_config(config: Mapping[str, Any]) -> VLBertHead:
    """Build the head of a saved model."""
    sizes = {name: value for name, value in config.items() if name != "kind"}
    match config.get("kind"):
        case "classify":
            return ClassificationHead(**sizes)
        case "point":
            return RegionHead(**sizes)
        case "mask":
            return MaskTokenHead(**sizes)
        case other:
            raise UserError(f"unknown head {other!r}: expected classify, mask or point")


# --- the model


class VLBert(Network[VLBertFeatures]):
    """One Transformer over `[CLS] c1 [SEP] c2 [SEP] image r1 ... rm [END]`.

    `batch.tokens` already have special tokens, for one or two captions. A text token is the sum of
    its word, the whole-image features, its position and its segment. A region is the sum of a
    learned token, its features, the position after the text (shared by all regions) and the third
    segment. The end token has the position after that.

    Departures from VL-BERT: text and regions are at the same positions in every sample, with
    padding in between instead of packing. Position embeddings follow each sample's own length, so
    only the order of keys differs. A mask hides keys from every query of every layer. A mask over
    regions removes neither the whole-image features of the words nor the whole-image box; mask
    "image" for the latter.

    Args:
        sizes: layer sizes.
        region_encoder: encodes the regions.
        head: predicts classes or regions.
        relations: number of classes of phrase relations (see `relate`); 0 for none.

    Example:
        >>> from overt.nn import PrecomputedRegionEncoder
        >>> from overt.testing import toy_batch
        >>> boxes = torch.tensor([[0.0, 0.0, 16.0, 16.0], [16.0, 16.0, 32.0, 32.0]]).expand(3, 2, 4)
        >>> batch = replace(toy_batch(3), boxes=boxes, features=torch.rand(3, 2, 4))
        >>> sizes = VLBertSizes(vocabulary=10, width=8, layers=2, heads=2, inner=16)
        >>> head = ClassificationHead(8, classes=5)
        >>> model = VLBert(sizes, PrecomputedRegionEncoder(4), head).eval()
        >>> model(batch).trace.block("text", "regions").weights.shape  # 2 layers, 2 heads, 6 tokens
        torch.Size([3, 2, 2, 6, 2])
    """

    def __init__(
        self,
        sizes: VLBertSizes,
        region_encoder: RegionEncoder,
        head: VLBertHead,
        relations: int = 0,
    ) -> None:
        super().__init__()
        self.sizes, self.relations = sizes, relations
        width = sizes.width
        self.eye = region_encoder  # "eye", "look" and "answer" are names of saved weights
        self.word = nn.Embedding(sizes.vocabulary, width)
        # regions and the end have no words: their token embeddings are learned
        self.mark = nn.Embedding(2, width)  # of a region, of the end
        self.place = nn.Embedding(sizes.positions, width)
        self.segment = nn.Embedding(TEXT_SEGMENTS + 1, width)
        self.look = nn.Linear(region_encoder.width, width)
        # separate norms for the whole image added to words and for regions, as in VL-BERT
        self.look_text = nn.LayerNorm(width, sizes.epsilon)
        self.look_region = nn.LayerNorm(width, sizes.epsilon)
        self.norm = nn.LayerNorm(width, sizes.epsilon)
        self.drop = nn.Dropout(sizes.dropout)
        self.encoder = BertEncoder(
            sizes.layers, width, sizes.heads, sizes.inner, sizes.dropout, sizes.epsilon
        )
        for table in (self.word, self.mark, self.place, self.segment):
            table.apply(partial(_init_normal, deviation=INIT_STD))
        for part in (self.look, self.encoder):
            part.apply(partial(_init_normal, deviation=INIT_STD * (BASE_WIDTH / width) ** 0.5))
        nn.init.zeros_(self.look_text.weight)  # features of size 1 would drown words of size .02
        nn.init.constant_(self.look_region.weight, sizes.gain)
        self.answer = head
        self.relates = _xavier(nn.Linear(4 * width, relations)) if relations else None

    def encode(self, batch: Batch) -> VLBertFeatures:
        """Return the sequence of embeddings before the first layer."""
        if batch.tokens is None or batch.token_mask is None:
            raise ValueError("batch.tokens is None: VL-BERT needs a batch with tokens")
        tokens, there = batch.tokens, batch.token_mask
        # --- lengths
        found = self.eye(batch)
        (b, n), m = tokens.shape, found.present.shape[1]
        lengths = there.sum(dim=1, keepdim=True)
        if n + 2 > self.sizes.positions and int(lengths.max()) + 2 > self.sizes.positions:
            raise ValueError(
                f"a text has {int(lengths.max())} tokens, the model has {self.sizes.positions} "
                "positions, two of them for regions and the end"
            )
        # --- token and visual embeddings: row 0 of `seen` is the whole image, the rest are regions
        seen = self.look(torch.cat([found.whole[:, None], found.values], dim=1))
        text = self.word(tokens) + self.look_text(seen[:, :1])
        boxes = self.mark.weight[0] + self.look_region(seen)
        end = self.mark.weight[1].expand(b, 1, -1)
        # --- positions: words count up, all regions share the position after the text, then the end
        marks = (tokens == self.sizes.begin) | (tokens == self.sizes.end)
        places = torch.cat(
            [(there.cumsum(dim=1) - 1).clamp_min(0), lengths.expand(b, m + 1), lengths + 1], dim=1
        )
        # --- segments: the separator itself belongs to the caption that it ends
        ends = (tokens == self.sizes.end) & there
        segments = (ends.cumsum(dim=1) - ends.long()).clamp(
            0, TEXT_SEGMENTS - 1
        )  # number of separators before
        segments = nn.functional.pad(segments, (0, m + 2), value=IMAGE_SEGMENT)
        joined = torch.cat([text, boxes, end], dim=1)
        # --- sequence: text, whole image, regions, end
        always = there.new_ones(b, 1)
        return VLBertFeatures(
            self.norm(joined + self.place(places) + self.segment(segments)),
            torch.cat([there, always, found.present, always], dim=1),
            there & ~marks,
            found.present,
            _layout(batch, n, m),
        )

    def decide(
        self, features: VLBertFeatures, mask: Mapping[str, Tensor] | None = None
    ) -> VLBertOutput:
        """Return the prediction with the trace of all layers."""
        kept = key_weights(features.layout, mask) if mask else None
        states, calls = self.encoder(self.drop(features.embedded), features.present, kept)
        trace = AttentionTrace(calls, features.layout)
        last = AttentionTrace(calls[-1:], features.layout)
        # renormalised over the words and over the regions, so that each map sums to one
        words = last.log_block("class", "text")
        maps = (_mask_words(words, features.words), last.log_block("class", "regions"))
        prediction = self.answer(states, features)
        return VLBertOutput(prediction, maps, states=states, trace=trace, features=features)

    def forward(self, batch: Batch) -> VLBertOutput:
        """Return the output for a batch: `decide(encode(batch))`."""
        return self.decide(self.encode(batch))

    def relate(
        self, output: VLBertOutput, first: PhraseSpans, second: PhraseSpans
    ) -> Float[Tensor, "p c"]:
        """Classify the relation of pairs of phrases from their final states (eq. 4)."""
        if self.relates is None:
            raise ValueError("this model has no relation classifier: use VLBert(relations=...)")
        text = output.text()
        return self.relates(pair_features(pool_phrases(text, first), pool_phrases(text, second)))

    def config(self) -> dict[str, Any]:
        """Return the constructor values."""
        return {
            "sizes": asdict(self.sizes),
            "eye": self.eye.config(),
            "answer": self.answer.config(),
            "relations": self.relations,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "VLBert":
        """Build the model that `config` describes, with fresh weights."""
        return cls(
            VLBertSizes(**config["sizes"]),
            region_encoder_from_config(config["eye"]),
            head_from_config(config["answer"]),
            config["relations"],
        )

    @classmethod
    def from_encoder(
        cls,
        folder: Path | str,
        region_encoder: RegionEncoder,
        head: VLBertHead,
        begin: int,
        end: int,
        relations: int = 0,
        gain: float = 0.0,
        dropout: float = 0.1,
    ) -> "VLBert":
        """Build a model from a pretrained BERT-like encoder, such as MiniLM.

        Words, positions, layers and, for `ClassificationHead`, the pooler come from the folder;
        everything about regions is new. The third segment starts as the mean of the encoder's
        segments.

        Args:
            folder: a Hugging Face model folder.
            region_encoder: encodes the regions.
            head: predicts classes or regions.
            begin: id of the encoder's class token.
            end: id of its separator token.
            relations: number of classes of phrase relations; 0 for none.
            gain: initial scale of the region features.
            dropout: dropout probability.

        Raises:
            UserError: the folder is not a BERT-like encoder.
        """
        about, weights = read_bert(folder)
        sizes = VLBertSizes(
            *(about["vocab_size"], about["hidden_size"], about["num_hidden_layers"]),
            *(about["num_attention_heads"], about["intermediate_size"]),
            about["max_position_embeddings"],
            dropout=dropout,
            gain=gain,
            epsilon=float(about.get("layer_norm_eps", 1e-12)),
            begin=begin,
            end=end,
        )
        net = cls(sizes, region_encoder, head, relations)
        net.encoder.load_state_dict(layer_weights(weights, sizes.layers))
        try:
            with torch.no_grad():
                net.word.weight.copy_(weights["embeddings.word_embeddings.weight"])
                net.place.weight.copy_(weights["embeddings.position_embeddings.weight"])
                segments = weights["embeddings.token_type_embeddings.weight"]
                net.segment.weight[:TEXT_SEGMENTS] = segments
                # BERT has segments for two texts only; the mean keeps the scale of the sum
                net.segment.weight[TEXT_SEGMENTS:] = segments.mean(dim=0)
                for kind in ("weight", "bias"):
                    getattr(net.norm, kind).copy_(weights[f"embeddings.LayerNorm.{kind}"])
                    pooled = weights.get(f"pooler.dense.{kind}")
                    if isinstance(head, ClassificationHead) and pooled is not None:
                        getattr(head.pool, kind).copy_(pooled)
        except (KeyError, RuntimeError) as error:
            raise UserError(f"{folder} is not a BERT-like encoder: {error}") from error
        return net


def with_head(net: VLBert, head: VLBertHead, relations: int = 0) -> VLBert:
    """Return a copy of a trained network with another head, for a downstream task."""
    copied = VLBert(net.sizes, copy.deepcopy(net.eye), head, relations)
    # the new head keeps its fresh weights, everything else is copied
    own = copied.state_dict()
    trunk = {
        name: value
        for name, value in net.state_dict().items()
        if not name.startswith(("answer.", "relates."))
    }
    copied.load_state_dict({**own, **trunk})
    return copied.to(net.word.weight)


def _layout(batch: Batch, n: int, m: int) -> Layout:
    # spans overlap on purpose: "boxes" is the whole-image box together with the regions
    geometry = None if batch.boxes is None else RegionGeometry(batch.boxes)
    return Layout(
        (
            Span("class", (1,), slice(0, 1)),
            Span("text", (n,), slice(0, n), batch.text),
            Span("image", (1,), slice(n, n + 1)),
            Span("regions", (m,), slice(n + 1, n + 1 + m), geometry),
            Span("boxes", (m + 1,), slice(n, n + 1 + m)),
        ),
        n + m + 2,
    )


def _mask_words(attention: AttentionMap, words: Bool[Tensor, "b n"]) -> AttentionMap:
    """Return the map over words only, without special tokens."""
    return replace(attention, mask=attention.visible & words[:, None]).normalize()


def _init_normal(module: nn.Module, deviation: float) -> None:
    """Initialise weights as in BERT.

    A narrower network sums fewer products. With the same weights its scores would be near zero and
    attention would train slowly, so its weights start larger.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=deviation)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def _xavier(layer: nn.Linear) -> nn.Linear:
    """Initialise a new top layer; the paper's code does this for one of them only."""
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
