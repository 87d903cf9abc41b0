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
from overt.capture.seen import Seen
from overt.data.batch import Batch
from overt.data.vocabulary import BEGIN, END
from overt.errors import BadInput
from overt.geometry import RegionGeometry
from overt.models.adopting.hiding import kept_keys
from overt.models.network import Network
from overt.models.output import Output
from overt.models.vlbert.encoder import Encoder, layer_weights, read_bert
from overt.models.vlbert.phrases import Phrases, compare, pool
from overt.models.vlbert.regions import RegionEye, region_eye_from

ABSENT = -1e4  # the logit of a region that is not there
SMALL, BASE = 0.02, 768  # the deviation of BERT's first weights, and the width that it is for
TEXTS, PICTURE = 2, 2  # segments of the two captions, and the segment of regions


@dataclass(frozen=True)
class VLSizes:
    """The widths of the network, and the marks around its captions.

    `gain` is where the scale of the features of regions starts: 0 as in VL-BERT's code, so that a
    pretrained encoder first sees words alone; 1 for a network that learns from nothing. That of the
    whole image, which every word carries, starts at 0 always.
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
class Joined:
    """Captions and regions as one sequence: what stands where, what is there, what are words.

    `layout` has "class", "text", "image" (the whole-image box), "regions", and "boxes", the last
    two together; the end mark stands in no span.
    """

    embedded: Float[Tensor, "b k d"]
    present: Bool[Tensor, "b k"]
    words: Bool[Tensor, "b n"]
    regions: Bool[Tensor, "b m"]
    layout: Layout

    def pooled(self) -> Float[Tensor, "b d"]:
        """The mean of all embeddings: what the input is, whatever is attended to."""
        there = self.present[..., None].to(self.embedded.dtype)
        return (self.embedded * there).sum(dim=1) / there.sum(dim=1).clamp_min(1)


@dataclass(frozen=True, eq=False)
class Understood(Output):
    """An output with the final states and all that was seen on the way to them.

    `seen` gives any block of the weights of every layer and head, before dropout, with a gradient;
    nothing of it is computed until it is asked for. `attention` holds what the class token takes
    from the words and from the regions in the last layer.
    """

    states: Tensor | None = None
    seen: Seen | None = None
    features: Joined | None = None

    def text(self) -> Float[Tensor, "b n d"]:
        """The final states of the text, marks and padding included."""
        return self._of("text")

    def regions(self) -> Float[Tensor, "b m d"]:
        """The final states of the regions."""
        return self._of("regions")

    def _of(self, name: str) -> Tensor:
        assert self.states is not None and self.features is not None
        return self.states[:, self.features.layout.find(name).index]


# --- what is asked


@runtime_checkable
class Answer(Protocol):
    """What is made of the final states: one logit a class or a region."""

    def __call__(
        self, states: Float[Tensor, "b k d"], features: Joined
    ) -> Float[Tensor, "b c"]: ...

    def config(self) -> dict[str, Any]:
        """Plain values from which `answer_from` builds the same module."""
        ...


class Classify(nn.Module):
    """Classes from the class token: which caption is right (eq. 1), or the answer to a question."""

    def __init__(self, width: int, classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.made_with = {"width": width, "classes": classes, "dropout": dropout}
        self.pool = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)
        self.decision = _xavier(nn.Linear(width, classes))

    def forward(self, states: Float[Tensor, "b k d"], features: Joined) -> Float[Tensor, "b c"]:
        """A logit a class."""
        return self.decision(self.drop(torch.tanh(self.pool(states[:, 0]))))

    def config(self) -> dict[str, Any]:
        """Its sizes."""
        return {"kind": "classify", **self.made_with}


class Point(nn.Module):
    """The region that is meant: a logit for each from its own state; absent ones cannot win."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.decision = _xavier(nn.Linear(width, 1))

    def forward(self, states: Float[Tensor, "b k d"], features: Joined) -> Float[Tensor, "b c"]:
        """A logit a region."""
        logits = self.decision(states[:, features.layout.find("regions").index])[..., 0]
        return logits.masked_fill(~features.regions, ABSENT)

    def config(self) -> dict[str, Any]:
        """Its size."""
        return {"kind": "point", "width": self.width}


def answer_from(config: Mapping[str, Any]) -> Answer:
    """The answer that a saved model was made with."""
    sizes = {name: value for name, value in config.items() if name != "kind"}
    match config.get("kind"):
        case "classify":
            return Classify(**sizes)
        case "point":
            return Point(**sizes)
        case other:
            raise BadInput(f"an answer of kind {other!r} is not one of classify, point")


# --- the model


class VLBert(Network[Joined]):
    """One Transformer over `[CLS] c1 [SEP] c2 [SEP] image r1 ... rm [END]`.

    `batch.tokens` have their marks already, for one caption or two. A text token is the sum of its
    word, the whole image's features, its position and its segment; a region that of a mark, its
    features, the position after the text, which all regions share, and the third segment; the end
    mark has the position after that. `answer` says what is predicted. `relate` tells how two
    phrases are related, for `relations` classes.

    Departures from VL-BERT: text and regions stand at the same places in every sample, with padding
    between, and not packed; every sample has its own positions, so nothing but the order of keys
    differs. A mask hides keys from every query of every layer; that words carry the features of the
    whole image, and that there is a box of all of it, no mask of regions takes away: mask "image"
    too for the second.
    """

    def __init__(self, sizes: VLSizes, eye: RegionEye, answer: Answer, relations: int = 0) -> None:
        super().__init__()
        self.sizes, self.relations = sizes, relations
        width = sizes.width
        self.eye = eye
        self.word = nn.Embedding(sizes.vocabulary, width)
        self.mark = nn.Embedding(2, width)  # of a region, of the end
        self.place = nn.Embedding(sizes.positions, width)
        self.segment = nn.Embedding(TEXTS + 1, width)
        self.look = nn.Linear(eye.width, width)
        self.look_text = nn.LayerNorm(width, sizes.epsilon)
        self.look_region = nn.LayerNorm(width, sizes.epsilon)
        self.norm = nn.LayerNorm(width, sizes.epsilon)
        self.drop = nn.Dropout(sizes.dropout)
        self.encoder = Encoder(
            sizes.layers, width, sizes.heads, sizes.inner, sizes.dropout, sizes.epsilon
        )
        for table in (self.word, self.mark, self.place, self.segment):
            table.apply(partial(_small, deviation=SMALL))
        for part in (self.look, self.encoder):
            part.apply(partial(_small, deviation=SMALL * (BASE / width) ** 0.5))
        nn.init.zeros_(self.look_text.weight)  # features of size 1 would drown words of size .02
        nn.init.constant_(self.look_region.weight, sizes.gain)
        self.answer = answer
        self.relates = _xavier(nn.Linear(4 * width, relations)) if relations else None

    def encode(self, batch: Batch) -> Joined:
        """The sequence of embeddings, before the first layer."""
        if batch.tokens is None or batch.token_mask is None:
            raise ValueError("VL-BERT needs a batch with tokens")
        tokens, there = batch.tokens, batch.token_mask
        found = self.eye(batch)
        (b, n), m = tokens.shape, found.present.shape[1]
        lengths = there.sum(dim=1, keepdim=True)
        if n + 2 > self.sizes.positions and int(lengths.max()) + 2 > self.sizes.positions:
            raise ValueError(
                f"a text of {int(lengths.max())} tokens is too long for {self.sizes.positions} "
                "positions: regions and the end need two more"
            )
        seen = self.look(torch.cat([found.whole[:, None], found.values], dim=1))
        text = self.word(tokens) + self.look_text(seen[:, :1])
        boxes = self.mark.weight[0] + self.look_region(seen)
        end = self.mark.weight[1].expand(b, 1, -1)
        marks = (tokens == self.sizes.begin) | (tokens == self.sizes.end)
        places = torch.cat(
            [(there.cumsum(dim=1) - 1).clamp_min(0), lengths.expand(b, m + 1), lengths + 1], dim=1
        )
        ends = (tokens == self.sizes.end) & there
        segments = (ends.cumsum(dim=1) - ends.long()).clamp(0, TEXTS - 1)  # how many ended before
        segments = nn.functional.pad(segments, (0, m + 2), value=PICTURE)
        joined = torch.cat([text, boxes, end], dim=1)
        always = there.new_ones(b, 1)
        return Joined(
            self.norm(joined + self.place(places) + self.segment(segments)),
            torch.cat([there, always, found.present, always], dim=1),
            there & ~marks,
            found.present,
            _layout(batch, n, m),
        )

    def decide(self, features: Joined, mask: Mapping[str, Tensor] | None = None) -> Understood:
        """The prediction, with everything the layers have seen."""
        kept = kept_keys(features.layout, mask) if mask else None
        states, calls = self.encoder(self.drop(features.embedded), features.present, kept)
        seen = Seen(calls, features.layout)
        last = Seen(calls[-1:], features.layout)
        words = last.log_block("class", "text")
        maps = (_only(words, features.words), last.log_block("class", "regions"))
        prediction = self.answer(states, features)
        return Understood(prediction, maps, states=states, seen=seen, features=features)

    def forward(self, batch: Batch) -> Understood:
        """The output for a batch: `decide(encode(batch))`."""
        return self.decide(self.encode(batch))

    def relate(self, output: Understood, first: Phrases, second: Phrases) -> Float[Tensor, "p c"]:
        """How pairs of phrases are related, by their final states (eq. 4)."""
        if self.relates is None:
            raise ValueError("this model was made without relations; give VLBert(relations=...)")
        text = output.text()
        return self.relates(compare(pool(text, first), pool(text, second)))

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return {
            "sizes": asdict(self.sizes),
            "eye": self.eye.config(),
            "answer": self.answer.config(),
            "relations": self.relations,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "VLBert":
        """The model that `config` describes, with fresh weights."""
        return cls(
            VLSizes(**config["sizes"]),
            region_eye_from(config["eye"]),
            answer_from(config["answer"]),
            config["relations"],
        )

    @classmethod
    def from_encoder(
        cls,
        folder: Path | str,
        eye: RegionEye,
        answer: Answer,
        begin: int,
        end: int,
        relations: int = 0,
        gain: float = 0.0,
        dropout: float = 0.1,
    ) -> "VLBert":
        """A model that starts from a pretrained encoder of the BERT family, such as MiniLM.

        Words, positions, layers and, for `Classify`, the pooled class token come from the folder;
        what has to do with regions is new. The third segment starts as the mean of the encoder's.
        `begin` and `end` are the ids of its class and separator tokens.
        """
        about, weights = read_bert(folder)
        sizes = VLSizes(
            *(about["vocab_size"], about["hidden_size"], about["num_hidden_layers"]),
            *(about["num_attention_heads"], about["intermediate_size"]),
            about["max_position_embeddings"],
            dropout=dropout,
            gain=gain,
            epsilon=float(about.get("layer_norm_eps", 1e-12)),
            begin=begin,
            end=end,
        )
        net = cls(sizes, eye, answer, relations)
        net.encoder.load_state_dict(layer_weights(weights, sizes.layers))
        try:
            with torch.no_grad():
                net.word.weight.copy_(weights["embeddings.word_embeddings.weight"])
                net.place.weight.copy_(weights["embeddings.position_embeddings.weight"])
                segments = weights["embeddings.token_type_embeddings.weight"]
                net.segment.weight[:TEXTS] = segments
                net.segment.weight[TEXTS:] = segments.mean(dim=0)
                for kind in ("weight", "bias"):
                    getattr(net.norm, kind).copy_(weights[f"embeddings.LayerNorm.{kind}"])
                    pooled = weights.get(f"pooler.dense.{kind}")
                    if isinstance(answer, Classify) and pooled is not None:
                        getattr(answer.pool, kind).copy_(pooled)
        except (KeyError, RuntimeError) as error:
            raise BadInput(f"{folder} is no encoder of the BERT family: {error}") from error
        return net


def answering(net: VLBert, answer: Answer, relations: int = 0) -> VLBert:
    """A copy of a trained network that answers something else: the start of a downstream task."""
    copied = VLBert(net.sizes, copy.deepcopy(net.eye), answer, relations)
    own = copied.state_dict()
    trunk = {
        name: value
        for name, value in net.state_dict().items()
        if not name.startswith(("answer.", "relates."))
    }
    copied.load_state_dict({**own, **trunk})
    return copied.to(net.word.weight)


def _layout(batch: Batch, n: int, m: int) -> Layout:
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


def _only(attention: AttentionMap, words: Bool[Tensor, "b n"]) -> AttentionMap:
    """The map over words alone, marks left out."""
    return replace(attention, mask=attention.visible & words[:, None]).normalize()


def _small(module: nn.Module, deviation: float) -> None:
    """Weights as BERT starts with.

    A narrower network sums fewer products, so that with the same weights its scores would be next
    to nothing and it would learn slowly where to look: its weights start larger.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=deviation)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def _xavier(layer: nn.Linear) -> nn.Linear:
    """A new layer on top; the paper's code does so for one of them and forgets the others."""
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
