"""Transformer captioner: an encoder over regions or cells, a decoder over words.

The plain Transformer of Fei, "Attention-Aligned Transformer for Image Captioning", AAAI 2022,
sections 2 and 5.1: six layers, width 512, eight heads, post-norm. Cross-attention is read and
edited from outside: `overt.watch`, `overt.nn.Aligner`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from overt.attention import GLOBAL_QUERY, AttentionMap, Layout, regions, words
from overt.data.batch import Batch
from overt.geometry import RegionGeometry
from overt.nn.cnn import ImageFeatures
from overt.nn.network import SavableModule
from overt.nn.output import Output
from overt.nn.vqa.image_encoders import ImageEncoder, image_encoder_from_config

Heads = Float[Tensor, "_ h _ d"]  # queries, keys or values of any number of positions
KeysValues = tuple[tuple[Heads, Heads], ...]  # keys and values of each layer

CACHED_POSITIONS = 512  # precomputed position embeddings; those of longer texts are computed


@dataclass(frozen=True)
class CaptionerSizes:
    """Layer sizes of a `Captioner`; the paper's by default.

    Args:
        vocabulary: number of tokens.
        width: features of a state.
        layers: number of decoder layers.
        heads: number of attention heads.
        inner: units of the feed-forward layers.
        dropout: dropout of attention and residuals.
        encoder: number of encoder layers, `layers` by default. With 0 regions do not exchange
            information, so a word about a region must attend to that region.

    Raises:
        ValueError: `width` is not divisible by `heads`.

    Example:
        >>> sizes = CaptionerSizes(vocabulary=10_000)
        >>> sizes.layers, sizes.width // sizes.heads
        (6, 64)
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
            raise ValueError(f"width={self.width} is not divisible by heads={self.heads}")


class CachedRegionEncoder(nn.Module):
    """Precomputed region features: the rows of `batch.features`.

    `batch.region_mask` marks the regions that exist.

    Args:
        width: features of a region.

    Example:
        >>> batch = Batch(ids=("a",), features=torch.rand(1, 5, 16))
        >>> CachedRegionEncoder(width=16)(batch).layout.find("regions").shape
        (5,)
    """

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.width = width

    def forward(self, batch: Batch) -> ImageFeatures:
        """Return the features of the batch."""
        if batch.features is None or batch.features.shape[-1] != self.width:
            found = None if batch.features is None else batch.features.shape[-1]
            raise ValueError(
                f"expected batch.features with {self.width} features per region, got "
                f"{'none' if found is None else found}"
            )
        geometry = None if batch.boxes is None else RegionGeometry(batch.boxes)
        return ImageFeatures(batch.features, regions(batch.features.shape[1], geometry=geometry))

    def config(self) -> dict[str, Any]:
        """Return the size of the features."""
        return {"kind": "regions", "width": self.width}


# --- inputs and outputs of the decoder


@dataclass(frozen=True, eq=False)
class Memory:
    """Encoded image: one state per region, and which regions exist."""

    states: Float[Tensor, "b k w"]
    present: Bool[Tensor, "b k"] | None
    layout: Layout

    def __len__(self) -> int:
        return len(self.states)

    def select(self, rows: Int[Tensor, " n"]) -> "Memory":
        """Return the given images in their order; they may repeat, once per caption."""
        present = None if self.present is None else self.present[rows]
        return Memory(self.states.index_select(0, rows), present, self.layout.select(rows))

    def without(self, mask: Mapping[str, Tensor] | None) -> "Memory":
        """Return the memory without the regions masked by span name (1 keeps, 0 hides)."""
        name = self.layout.spans[0].name
        if mask is None or name not in mask:
            return self
        kept = mask[name].to(self.states.device) > 0
        return replace(self, present=kept if self.present is None else kept & self.present)


@dataclass(frozen=True, eq=False)
class CaptionOutput:
    """Logits of the word after each given word, and the attention behind them.

    An image may have several captions, which are adjacent. Queries and keys of each layer are kept
    instead of weights, so kernels stay fused and `attention` is computed on demand. It is the
    model's own attention; under an edit, read the trace of `watch` instead.
    """

    logits: Float[Tensor, "r n v"]
    queries: tuple[Heads, ...]
    keys: tuple[Heads, ...]
    memory: Memory
    place: Layout

    @property
    def attention(self) -> AttentionMap:
        """Attention of each word of each caption to the regions: (r, l, h, words, regions)."""
        memory, keys = self.memory, self.keys
        if len(self.logits) != len(memory):
            images = torch.arange(len(memory), device=self.logits.device)
            of = images.repeat_interleave(len(self.logits) // len(memory))
            memory, keys = memory.select(of), tuple(one[of] for one in keys)
        pairs = zip(self.queries, keys, strict=True)
        # the fused kernel returns no weights: they are computed again from queries and keys
        scores = [q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) for q, k in pairs]
        present = memory.present
        hidden = None if present is None else rearrange(present, "b k -> b 1 k")
        return AttentionMap.from_scores(
            torch.stack(scores, dim=1), memory.layout, self.place, hidden
        )


@dataclass(frozen=True, eq=False)
class CaptionerState:
    """Decoding state: cached keys and values of all layers.

    Args:
        memory: the encoded images.
        seen: keys and values of the images. Beams of one image share the content, not the memory.
        past: keys and values of the words so far.
        sample: image of each row.
        length: number of words so far.
    """

    memory: Memory
    seen: tuple[tuple[Heads, Heads], ...]
    past: tuple[tuple[Heads, Heads], ...]
    sample: Int[Tensor, " b"]
    length: int = 0

    def reorder(self, rows: Int[Tensor, " n"]) -> "CaptionerState":
        """Return the state of the given rows; image keys are copied only if images change."""
        # the past belongs to a text and is always reordered; `seen` belongs to the image
        past = tuple((key[rows], value[rows]) for key, value in self.past)
        sample = self.sample[rows]
        if _same_images(sample, self.sample):  # beams of one image are reordered
            return replace(self, past=past)
        return CaptionerState(
            self.memory.select(rows),
            tuple((key[rows], value[rows]) for key, value in self.seen),
            past,
            sample,
            self.length,
        )


def _same_images(first: Int[Tensor, " n"], second: Int[Tensor, " m"]) -> bool:
    """Return whether rows have the same images; False where checking is not possible.

    Different lengths need no check, so the GPU is not synchronized. During CUDA graph capture no
    value can be read.
    """
    capturing = first.is_cuda and torch.cuda.is_current_stream_capturing()
    return len(first) == len(second) and not capturing and torch.equal(first, second)


# --- layers


class MultiHeadAttention(nn.Module):
    """Multi-head scaled dot-product attention (eq. 1) with the fused kernel."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        for layer in (self.query, self.key, self.value, self.out):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def project_query(self, states: Float[Tensor, "b n w"]) -> Heads:
        """Project states to queries."""
        return rearrange(self.query(states), "b n (h d) -> b h n d", h=self.heads)

    def project_key_value(self, states: Float[Tensor, "b n w"]) -> tuple[Heads, Heads]:
        """Project states to keys and values."""
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
        """Return the attention output of the queries."""
        output = nn.functional.scaled_dot_product_attention(
            *(query, key, value, allowed),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
        )
        return self.out(rearrange(output, "b h q d -> b q (h d)"))


class CrossAttention(MultiHeadAttention):
    """Attention from words to regions.

    Adjacent captions of one image are treated as one text, so keys and values of the image are
    neither recomputed nor copied per caption.
    """

    def forward(
        self,
        query: Float[Tensor, "r h n d"],
        key: Float[Tensor, "b h k d"],
        value: Float[Tensor, "b h k d"],
        allowed: Bool[Tensor, "b 1 1 k"] | None = None,
        causal: bool = False,
    ) -> Float[Tensor, "r n w"]:
        """Return the attention output of the words."""
        each = len(query) // max(1, len(key))
        if each <= 1:
            return super().forward(query, key, value, allowed, causal)
        # captions of an image do not see each other in cross-attention, so they can share the query
        # axis
        joined = rearrange(query, "(b e) h n d -> b h (e n) d", e=each)
        output = super().forward(joined, key, value, allowed, causal)
        return rearrange(output, "b (e n) w -> (b e) n w", e=each)


class CausalAttention(MultiHeadAttention):
    """Attention from words to themselves and earlier words."""

    is_causal = True


class EncoderLayer(nn.Module):
    """Self-attention between regions and a feed-forward network."""

    def __init__(self, sizes: CaptionerSizes) -> None:
        super().__init__()
        self.own = MultiHeadAttention(sizes.width, sizes.heads, sizes.dropout)
        self.think = _feed_forward(sizes)
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.width) for _ in range(2))
        self.drop = nn.Dropout(sizes.dropout)

    def forward(
        self, states: Float[Tensor, "b k w"], allowed: Bool[Tensor, "b 1 1 k"] | None
    ) -> Float[Tensor, "b k w"]:
        """Return the states after the layer."""
        found = self.own(
            self.own.project_query(states), *self.own.project_key_value(states), allowed
        )
        # post-norm: the norm follows the residual sum (section 5.1)
        states = self.norms[0](states + self.drop(found))
        return self.norms[1](states + self.drop(self.think(states)))


class DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention to the image, and a feed-forward network."""

    def __init__(self, sizes: CaptionerSizes) -> None:
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
        """Return the states, the queries to the image, and the keys and values of all words.

        With a past there is one new word, which attends to everything.
        """
        new = self.own.project_key_value(states)
        # teacher forcing has no past and needs the causal mask; a single new word may see
        # everything
        key, value = new if past is None else (_append(past[0], new[0]), _append(past[1], new[1]))
        found = self.own(self.own.project_query(states), key, value, causal=past is None)
        states = self.norms[0](states + self.drop(found))
        query = self.cross.project_query(states)
        states = self.norms[1](states + self.drop(self.cross(query, *seen, allowed)))
        return self.norms[2](states + self.drop(self.think(states))), query, (key, value)


def _feed_forward(sizes: CaptionerSizes) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(sizes.width, sizes.inner),
        nn.ReLU(),
        nn.Dropout(sizes.dropout),
        nn.Linear(sizes.inner, sizes.width),
    )


def _append(old: Heads, new: Heads) -> Heads:
    return torch.cat([old, new], dim=2)


def sinusoidal_positions(
    count: int, width: int, start: int = 0, device: torch.device | str = "cpu"
) -> Float[Tensor, "n d"]:
    """Compute sinusoidal position embeddings from `start` on ("Attention is all you need", 3.5)."""
    place = torch.arange(start, start + count, device=device)[:, None]
    # 10000^(-2i / width), in log space
    pace = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000) / width))
    found = torch.zeros(count, width, device=device)
    found[:, 0::2] = torch.sin(place * pace)
    # an odd width has one sine more than cosines
    found[:, 1::2] = torch.cos(place * pace[: width // 2])
    return found


# --- the model


class Captioner(SavableModule):
    """Transformer captioner, a `Decoder` with a key-value cache.

    Cells of a grid get sinusoidal position embeddings; regions do not, as in the paper.
    `decode_captions` takes whole captions and `step` one word; both give the same logits. A mask
    hides regions from words, but not what the encoder has already mixed into other regions.

    Args:
        sizes: layer sizes.
        image_encoder: encodes regions or cells: `CachedRegionEncoder`, `CachedImageEncoder` for
            grid features, or `CNNEncoder` for pixels.

    Example:
        >>> from overt.testing import toy_batch
        >>> sizes = CaptionerSizes(vocabulary=10, width=8, layers=2, heads=2, inner=16)
        >>> model = Captioner(sizes, CachedRegionEncoder(width=4)).eval()
        >>> batch = replace(toy_batch(3), features=torch.rand(3, 5, 4))  # captions of 6 words
        >>> output = model(batch)
        >>> output.logits.shape, output.attention.weights.shape
        (torch.Size([3, 5, 10]), torch.Size([3, 2, 2, 5, 5]))
    """

    places: Tensor

    def __init__(self, sizes: CaptionerSizes, image_encoder: ImageEncoder) -> None:
        super().__init__()
        self.sizes, self.eye = sizes, image_encoder  # "eye" is a name of saved weights
        self.of_region = nn.Sequential(
            nn.Linear(image_encoder.width, sizes.width),
            nn.ReLU(),
            nn.Dropout(sizes.dropout),
            nn.LayerNorm(sizes.width),
        )
        depth = sizes.layers if sizes.encoder is None else sizes.encoder
        self.encoder = nn.ModuleList(EncoderLayer(sizes) for _ in range(depth))
        # not saved: the embeddings follow from the sizes
        self.register_buffer(
            "places", sinusoidal_positions(CACHED_POSITIONS, sizes.width), persistent=False
        )
        self.word = nn.Embedding(sizes.vocabulary, sizes.width)
        nn.init.normal_(self.word.weight, std=sizes.width**-0.5)
        self.drop = nn.Dropout(sizes.dropout)
        self.decoder = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.layers))
        self.next = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def encode(self, batch: Batch) -> Memory:
        """Encode the image of each sample."""
        cells = self.eye(batch)
        span = cells.layout.spans[0]
        # cells of a grid all exist; `region_mask` is about regions
        present = batch.region_mask if span.name == "regions" else None
        states = self.of_region(cells.values)
        # a grid has an order of rows and columns, detected regions have none
        if len(span.shape) == 2:
            states = states + self._places(len(span)).to(states)
        allowed = _key_mask(present)
        for layer in self.encoder:
            states = layer(states, allowed)
        return Memory(states, present, cells.layout)

    def start(self, features: Memory, mask: Mapping[str, Tensor] | None = None) -> CaptionerState:
        """Return the state before the first word, with the keys and values of the image."""
        # the mask is applied after the encoder: it hides regions from the words only
        memory = features.without(mask)
        sample = torch.arange(len(memory), device=memory.states.device)
        return CaptionerState(memory, self.project_memory(memory), (), sample)

    def step(
        self, state: CaptionerState, tokens: Int[Tensor, " b"]
    ) -> tuple[Output, CaptionerState]:
        """Return the logits of the next word with their attention, and the new state."""
        states, queries, past = self._decode(
            tokens[:, None], state.memory, state.seen, state.past, state.length
        )
        keys = tuple(key for key, _ in state.seen)
        output = CaptionOutput(self.next(states), queries, keys, state.memory, GLOBAL_QUERY)
        after = replace(state, past=past, length=state.length + 1)
        # one query per text: drop the axis of words from the logits
        return Output(output.logits[:, 0], (output.attention,)), after

    def decode_captions(
        self,
        features: Memory,
        tokens: Int[Tensor, "r n"],
        mask: Mapping[str, Tensor] | None = None,
        projected: KeysValues | None = None,
    ) -> CaptionOutput:
        """Compute the logits after every word of given captions at once (teacher forcing).

        Captions are padded at the end. Words do not see later positions, so padding needs no mask,
        and its logits are meaningless.

        Args:
            features: the encoded images.
            tokens: captions; every image has the same number, adjacent.
            mask: hides regions, by span name.
            projected: `project_memory(features)`, to reuse it in several calls.

        Raises:
            ValueError: the number of captions is not a multiple of the number of images.
        """
        each = max(1, len(tokens) // max(1, len(features)))
        if len(tokens) != each * len(features):
            raise ValueError(
                f"got {len(tokens)} captions for {len(features)} images: every image needs the "
                "same number, at least one"
            )
        memory = features.without(mask)
        seen = self.project_memory(memory) if projected is None else projected
        states, queries, _ = self._decode(tokens, memory, seen, (), 0)
        keys = tuple(key for key, _ in seen)
        return CaptionOutput(self.next(states), queries, keys, memory, words(tokens.shape[1]))

    def forward(self, batch: Batch) -> CaptionOutput:
        """Compute the logits after every word of the batch's captions except the last."""
        if batch.tokens is None:
            raise ValueError("batch.tokens is None: a captioner needs a batch with captions")
        return self.decode_captions(self.encode(batch), batch.tokens[:, :-1])

    def project_memory(self, memory: Memory) -> KeysValues:
        """Project the images to the keys and values of all decoder layers."""
        layers = (cast(DecoderLayer, layer) for layer in self.decoder)
        return tuple(layer.cross.project_key_value(memory.states) for layer in layers)

    def _decode(
        self,
        tokens: Int[Tensor, "r n"],
        memory: Memory,
        seen: KeysValues,
        past: Sequence[tuple[Heads, Heads]],
        start: int,
    ) -> tuple[Float[Tensor, "r n w"], tuple[Heads, ...], tuple[tuple[Heads, Heads], ...]]:
        width = self.sizes.width
        places = self._places(tokens.shape[1], start).to(memory.states)
        # embeddings start with deviation width^-0.5: the factor makes it 1, near that of sines
        states = self.drop(self.word(tokens) * math.sqrt(width) + places)
        allowed = _key_mask(memory.present)
        queries, kept = [], []
        for at, layer in enumerate(self.decoder):
            before = past[at] if past else None
            states, query, new = layer(states, before, seen[at], allowed)
            queries.append(query)
            kept.append(new)
        return states, tuple(queries), tuple(kept)

    def _places(self, count: int, start: int = 0) -> Float[Tensor, "n d"]:
        if start + count <= CACHED_POSITIONS:  # saves a dozen small kernels per word
            return self.places[start : start + count]
        return sinusoidal_positions(count, self.sizes.width, start, self.places.device)

    def config(self) -> dict[str, Any]:
        """Return the constructor values."""
        return {"sizes": asdict(self.sizes), "eye": self.eye.config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Captioner":
        """Build the captioner that `config` describes, with fresh weights."""
        eye = config["eye"]
        seen = (
            CachedRegionEncoder(eye["width"])
            if eye.get("kind") == "regions"
            else image_encoder_from_config(eye)
        )
        return cls(CaptionerSizes(**config["sizes"]), seen)


def _key_mask(present: Bool[Tensor, "b k"] | None) -> Bool[Tensor, "b 1 1 k"] | None:
    return None if present is None else rearrange(present, "b k -> b 1 1 k")
