"""A Transformer that describes images: an encoder over regions or cells, a decoder over words.

The plain Transformer of Fei, "Attention-Aligned Transformer for Image Captioning", AAAI 2022,
sections 2 and 5.1: six layers, width 512, eight heads, a norm after every sum. What words look at
is read and changed from outside: `overt.watch`, `overt.supervise.Aligner`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from overt.attention import POINT, AttentionMap, Layout, regions, words
from overt.data.batch import Batch
from overt.geometry import RegionGeometry
from overt.models.answering.eyes import Eye, eye_from
from overt.models.cnn import Cells
from overt.models.network import Kept
from overt.models.output import Output

Heads = Float[Tensor, "_ h _ d"]  # queries, keys or values of any number of positions
Read = tuple[tuple[Heads, Heads], ...]  # keys and values of images, a layer each

PLACES = 512  # positions whose sines are kept: those of longer texts are computed


@dataclass(frozen=True)
class CaptionSizes:
    """The sizes of the network; the paper's by default. `inner` is that of feed-forward layers.

    `encoder` is how many layers of it regions tell each other in, by default as many as words have.
    With 0 a word that speaks of a region has to look at that region: no other one knows of it.
    """

    vocabulary: int
    width: int = 512
    layers: int = 6
    heads: int = 8
    inner: int = 2048
    dropout: float = 0.1
    encoder: int | None = None

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} does not divide into {self.heads} heads")


class CachedRegions(nn.Module):
    """Features of regions computed before, `width` numbers each, some absent in some images.

    A region is a row of `batch.features`; `batch.region_mask` says which are there.
    """

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.width = width

    def forward(self, batch: Batch) -> Cells:
        """The features as they are."""
        if batch.features is None or batch.features.shape[-1] != self.width:
            found = None if batch.features is None else batch.features.shape[-1]
            raise ValueError(
                f"this model looks at regions of {self.width} numbers; the batch has "
                f"{'none' if found is None else f'{found} numbers a region'}"
            )
        geometry = None if batch.boxes is None else RegionGeometry(batch.boxes)
        return Cells(batch.features, regions(batch.features.shape[1], geometry=geometry))

    def config(self) -> dict[str, Any]:
        """The size of the features."""
        return {"kind": "regions", "width": self.width}


# --- what the decoder works on


@dataclass(frozen=True, eq=False)
class Memory:
    """An image as the decoder sees it: a state a region, and which regions are there."""

    states: Float[Tensor, "b k w"]
    present: Bool[Tensor, "b k"] | None
    layout: Layout

    def __len__(self) -> int:
        return len(self.states)

    def select(self, rows: Int[Tensor, " n"]) -> "Memory":
        """The images named, in their order; one may be named several times, a caption each."""
        present = None if self.present is None else self.present[rows]
        return Memory(self.states.index_select(0, rows), present, self.layout.select(rows))

    def without(self, mask: Mapping[str, Tensor] | None) -> "Memory":
        """The memory without what a mask by span name removes: 1 keeps a region, 0 hides it."""
        name = self.layout.spans[0].name
        if mask is None or name not in mask:
            return self
        kept = mask[name].to(self.states.device) > 0
        return replace(self, present=kept if self.present is None else kept & self.present)


@dataclass(frozen=True, eq=False)
class Told:
    """Logits of the word after each one given, and the attention behind them when it is asked for.

    A memory may have several captions, which stand together. Queries and keys are kept a layer, not
    weights: the kernels stay fused, and `attention` is computed when somebody reads it. It is what
    the model would do by itself; under an edit ask the watcher.
    """

    logits: Float[Tensor, "r n v"]
    queries: tuple[Heads, ...]
    keys: tuple[Heads, ...]
    memory: Memory
    place: Layout

    @property
    def attention(self) -> AttentionMap:
        """Where each word of each caption was looked for: (r, l, h, words, regions)."""
        memory, keys = self.memory, self.keys
        if len(self.logits) != len(memory):
            images = torch.arange(len(memory), device=self.logits.device)
            of = images.repeat_interleave(len(self.logits) // len(memory))
            memory, keys = memory.select(of), tuple(one[of] for one in keys)
        pairs = zip(self.queries, keys, strict=True)
        scores = [q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) for q, k in pairs]
        present = memory.present
        hidden = None if present is None else rearrange(present, "b k -> b 1 k")
        return AttentionMap.from_scores(
            torch.stack(scores, dim=1), memory.layout, self.place, hidden
        )


@dataclass(frozen=True, eq=False)
class Written:
    """How far a captioner has come with each sample: keys and values of all layers so far.

    `seen` are those of the image, which beams of one image share the sense of, not the memory;
    `past` those of the words; `sample` says whose image a row looks at.
    """

    memory: Memory
    seen: tuple[tuple[Heads, Heads], ...]
    past: tuple[tuple[Heads, Heads], ...]
    sample: Int[Tensor, " b"]
    length: int = 0

    def reorder(self, rows: Int[Tensor, " n"]) -> "Written":
        """The samples named, in their order; images are only moved where they are others."""
        past = tuple((key[rows], value[rows]) for key, value in self.past)
        sample = self.sample[rows]
        if _same(sample, self.sample):  # beams of one image change places
            return replace(self, past=past)
        return Written(
            self.memory.select(rows),
            tuple((key[rows], value[rows]) for key, value in self.seen),
            past,
            sample,
            self.length,
        )


def _same(ours: Int[Tensor, " n"], theirs: Int[Tensor, " m"]) -> bool:
    """Whether rows look at the images they looked at; where that is not known, they may not.

    What is spread out cannot be the same, and no card waits; one that records cannot be asked.
    """
    recording = ours.is_cuda and torch.cuda.is_current_stream_capturing()
    return len(ours) == len(theirs) and not recording and torch.equal(ours, theirs)


# --- layers


class MultiHeadAttention(nn.Module):
    """Scaled dot-product attention in heads (eq. 1), on the fused kernel."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        for layer in (self.query, self.key, self.value, self.out):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def asked(self, states: Float[Tensor, "b n w"]) -> Heads:
        """The queries of states."""
        return rearrange(self.query(states), "b n (h d) -> b h n d", h=self.heads)

    def read(self, states: Float[Tensor, "b n w"]) -> tuple[Heads, Heads]:
        """The keys and values of states."""
        key, value = (
            rearrange(layer(states), "b n (h d) -> b h n d", h=self.heads)
            for layer in (self.key, self.value)
        )
        return key, value

    def forward(
        self,
        query: Heads,
        key: Heads,
        value: Heads,
        allowed: Bool[Tensor, "b 1 #q k"] | None = None,
        causal: bool = False,
    ) -> Float[Tensor, "b q w"]:
        """What the queries find."""
        found = nn.functional.scaled_dot_product_attention(
            *(query, key, value, allowed),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        return self.out(rearrange(found, "b h q d -> b q (h d)"))


class CrossAttention(MultiHeadAttention):
    """From words to regions.

    Captions of one image may stand together: they ask it as one text would, and its keys and values
    are neither computed nor copied for each of them.
    """

    def forward(
        self,
        query: Float[Tensor, "r h n d"],
        key: Float[Tensor, "b h k d"],
        value: Float[Tensor, "b h k d"],
        allowed: Bool[Tensor, "b 1 1 k"] | None = None,
        causal: bool = False,
    ) -> Float[Tensor, "r n w"]:
        """What the words find."""
        each = len(query) // max(1, len(key))
        if each <= 1:
            return super().forward(query, key, value, allowed, causal)
        asked = rearrange(query, "(b e) h n d -> b h (e n) d", e=each)
        found = super().forward(asked, key, value, allowed, causal)
        return rearrange(found, "b (e n) w -> (b e) n w", e=each)


class CausalAttention(MultiHeadAttention):
    """From words to the words before them and to themselves."""

    is_causal = True


class EncoderLayer(nn.Module):
    """Regions look at regions, then each thinks by itself."""

    def __init__(self, sizes: CaptionSizes) -> None:
        super().__init__()
        self.own = MultiHeadAttention(sizes.width, sizes.heads, sizes.dropout)
        self.think = _feed_forward(sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.width) for _ in range(2))
        self.drop = nn.Dropout(sizes.dropout)

    def forward(
        self, states: Float[Tensor, "b k w"], allowed: Bool[Tensor, "b 1 1 k"] | None
    ) -> Float[Tensor, "b k w"]:
        """The states after the layer."""
        found = self.own(self.own.asked(states), *self.own.read(states), allowed)
        states = self.norms[0](states + self.drop(found))
        return self.norms[1](states + self.drop(self.think(states)))


class DecoderLayer(nn.Module):
    """Words look back, then at the image, then each thinks by itself."""

    def __init__(self, sizes: CaptionSizes) -> None:
        super().__init__()
        self.own = CausalAttention(sizes.width, sizes.heads, sizes.dropout)
        self.cross = CrossAttention(sizes.width, sizes.heads, sizes.dropout)
        self.think = _feed_forward(sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.width) for _ in range(3))
        self.drop = nn.Dropout(sizes.dropout)

    def forward(
        self,
        states: Float[Tensor, "r n w"],
        past: tuple[Heads, Heads] | None,
        seen: tuple[Heads, Heads],
        allowed: Bool[Tensor, "b 1 1 k"] | None,
    ) -> tuple[Float[Tensor, "r n w"], Heads, tuple[Heads, Heads]]:
        """The states after the layer, the queries to the image, and keys and values of all words.

        With a past there is one new word, which may look at everything.
        """
        new = self.own.read(states)
        key, value = new if past is None else (_after(past[0], new[0]), _after(past[1], new[1]))
        found = self.own(self.own.asked(states), key, value, causal=past is None)
        states = self.norms[0](states + self.drop(found))
        query = self.cross.asked(states)
        states = self.norms[1](states + self.drop(self.cross(query, *seen, allowed)))
        return self.norms[2](states + self.drop(self.think(states))), query, (key, value)


def _feed_forward(sizes: CaptionSizes) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(sizes.width, sizes.inner),
        nn.ReLU(),
        nn.Dropout(sizes.dropout),
        nn.Linear(sizes.inner, sizes.width),
    )


def _after(old: Heads, new: Heads) -> Heads:
    return torch.cat([old, new], dim=2)


def waves(
    count: int, width: int, start: int = 0, device: torch.device | str = "cpu"
) -> Float[Tensor, "n d"]:
    """Sines and cosines of places `start` and on, as in "Attention is all you need" (3.5)."""
    place = torch.arange(start, start + count, device=device)[:, None]
    pace = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000) / width))
    found = torch.zeros(count, width, device=device)
    found[:, 0::2] = torch.sin(place * pace)
    found[:, 1::2] = torch.cos(place * pace[: width // 2])
    return found


# --- the model


class Captioner(Kept):
    """Describes images, word after word; a `Decoder`, with a cache of keys and values.

    `eye` gives regions or cells: `CachedRegions` has features of regions, `CachedEye` those of a
    grid, `TrainedEye` is for pixels. Cells of a grid get sines of their place added; regions do
    not, as in the paper. `write` takes whole captions at once, `step` one word; both give the same.
    A mask hides regions from words; what regions have told each other in the encoder stays.
    """

    places: Tensor

    def __init__(self, sizes: CaptionSizes, eye: Eye) -> None:
        super().__init__()
        self.sizes, self.eye = sizes, eye
        self.of_region = nn.Sequential(
            nn.Linear(eye.width, sizes.width),
            nn.ReLU(),
            nn.Dropout(sizes.dropout),
            nn.LayerNorm(sizes.width),
        )
        depth = sizes.layers if sizes.encoder is None else sizes.encoder
        self.encoder = nn.ModuleList(EncoderLayer(sizes) for _ in range(depth))
        self.register_buffer("places", waves(PLACES, sizes.width), persistent=False)
        self.word = nn.Embedding(sizes.vocabulary, sizes.width)
        nn.init.normal_(self.word.weight, std=sizes.width**-0.5)
        self.drop = nn.Dropout(sizes.dropout)
        self.decoder = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.layers))
        self.next = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def encode(self, batch: Batch) -> Memory:
        """The image of each sample after the encoder."""
        cells = self.eye(batch)
        span = cells.layout.spans[0]
        present = batch.region_mask if span.name == "regions" else None
        states = self.of_region(cells.values)
        if len(span.shape) == 2:
            states = states + self._places(len(span)).to(states)
        allowed = _to_keys(present)
        for layer in self.encoder:
            states = layer(states, allowed)
        return Memory(states, present, cells.layout)

    def start(self, features: Memory, mask: Mapping[str, Tensor] | None = None) -> Written:
        """The state before the first word, with keys and values of the image for all layers."""
        memory = features.without(mask)
        sample = torch.arange(len(memory), device=memory.states.device)
        return Written(memory, self.read(memory), (), sample)

    def step(self, state: Written, tokens: Int[Tensor, " b"]) -> tuple[Output, Written]:
        """Logits of the next word, where it is looked for, and the new state."""
        states, queries, past = self._decode(
            tokens[:, None], state.memory, state.seen, state.past, state.length
        )
        keys = tuple(key for key, _ in state.seen)
        told = Told(self.next(states), queries, keys, state.memory, POINT)
        after = replace(state, past=past, length=state.length + 1)
        return Output(told.logits[:, 0], (told.attention,)), after

    def write(
        self,
        features: Memory,
        tokens: Int[Tensor, "r n"],
        mask: Mapping[str, Tensor] | None = None,
        read: Read | None = None,
    ) -> Told:
        """Logits after every word of captions that are given, all at once.

        Captions are padded at their end: no word sees what comes after it, so padding needs no
        mask, and what is told about it means nothing. An image may have several captions, as many
        as every other, which stand together. `read` is what `read` gives of these features, where
        captions are written more than once.
        """
        each = max(1, len(tokens) // max(1, len(features)))
        if len(tokens) != each * len(features):
            raise ValueError(
                f"{len(tokens)} captions of {len(features)} images: give each as many as the "
                "others, and one at least"
            )
        memory = features.without(mask)
        seen = self.read(memory) if read is None else read
        states, queries, _ = self._decode(tokens, memory, seen, (), 0)
        keys = tuple(key for key, _ in seen)
        return Told(self.next(states), queries, keys, memory, words(tokens.shape[1]))

    def forward(self, batch: Batch) -> Told:
        """Logits after every word of the batch's captions but the last."""
        if batch.tokens is None:
            raise ValueError("a captioner is trained on a batch with tokens: captions")
        return self.write(self.encode(batch), batch.tokens[:, :-1])

    def read(self, memory: Memory) -> Read:
        """The keys and values of the images, for all layers: the same for all of their words."""
        layers = (cast(DecoderLayer, layer) for layer in self.decoder)
        return tuple(layer.cross.read(memory.states) for layer in layers)

    def _decode(
        self,
        tokens: Int[Tensor, "r n"],
        memory: Memory,
        seen: Read,
        past: Sequence[tuple[Heads, Heads]],
        start: int,
    ) -> tuple[Float[Tensor, "r n w"], tuple[Heads, ...], tuple[tuple[Heads, Heads], ...]]:
        width = self.sizes.width
        places = self._places(tokens.shape[1], start).to(memory.states)
        states = self.drop(self.word(tokens) * math.sqrt(width) + places)
        allowed = _to_keys(memory.present)
        queries, kept = [], []
        for at, layer in enumerate(self.decoder):
            before = past[at] if past else None
            states, query, new = layer(states, before, seen[at], allowed)
            queries.append(query)
            kept.append(new)
        return states, tuple(queries), tuple(kept)

    def _places(self, count: int, start: int = 0) -> Float[Tensor, "n d"]:
        if start + count <= PLACES:  # a dozen small kernels for each word, if they were made anew
            return self.places[start : start + count]
        return waves(count, self.sizes.width, start, self.places.device)

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return {"sizes": asdict(self.sizes), "eye": self.eye.config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Captioner":
        """The captioner that `config` describes, with fresh weights."""
        eye = config["eye"]
        seen = CachedRegions(eye["width"]) if eye.get("kind") == "regions" else eye_from(eye)
        return cls(CaptionSizes(**config["sizes"]), seen)


def _to_keys(present: Bool[Tensor, "b k"] | None) -> Bool[Tensor, "b 1 1 k"] | None:
    return None if present is None else rearrange(present, "b k -> b 1 1 k")
