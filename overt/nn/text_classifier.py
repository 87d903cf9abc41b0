"""Attention over words: structured self-attention and text classifiers built on it.

Lin, Feng, Nogueira dos Santos, Yu, Xiang, Zhou and Bengio, "A Structured Self-attentive Sentence
Embedding", ICLR 2017, https://arxiv.org/abs/1703.03130.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.attention import AttentionMap, words
from overt.data.batch import Batch
from overt.geometry import TextGeometry
from overt.nn.attention_pool import attention_pool
from overt.nn.network import Network
from overt.nn.output import Output


@dataclass(frozen=True, eq=False)
class WordFeatures:
    """Word embeddings of each text; padding is at the end."""

    values: Float[Tensor, "b n d"]
    present: Bool[Tensor, "b n"]
    geometry: TextGeometry | None

    def masked(
        self, mask: Mapping[str, Tensor] | None, blank: Float[Tensor, " d"]
    ) -> Float[Tensor, "b n d"]:
        """Return the embeddings, with `blank` for words whose entry in the "text" mask is 0.

        Padding is not blanked.
        """
        if mask is None or "text" not in mask:
            return self.values
        # padding counts as kept: blanking it would make the result depend on the length of the
        # batch
        kept = torch.where(self.present, mask["text"], 1).to(self.values.dtype)[..., None]
        # linear in the mask, so that it can be soft
        return self.values * kept + blank * (1 - kept)

    def pooled(self) -> Float[Tensor, "b d"]:
        """Return the mean over the words, independent of attention."""
        there = self.present[..., None].to(self.values.dtype)
        return (self.values * there).sum(dim=1) / there.sum(dim=1).clamp_min(1)


class WordAttention(nn.Module):
    """Structured self-attention `softmax(W2 tanh(W1 H))`: one distribution per hop (eq. 4-6).

    Args:
        width: features of a word state.
        hidden: rows of W1.
        hops: number of distributions.
    """

    def __init__(self, width: int, hidden: int, hops: int = 1) -> None:
        super().__init__()
        self.inner = nn.Linear(width, hidden, bias=False)
        self.outer = nn.Linear(hidden, hops, bias=False)

    def forward(
        self, states: Float[Tensor, "b n d"], text: WordFeatures
    ) -> tuple[Float[Tensor, "b h d"], AttentionMap]:
        """Return the summary of each hop and the attention map; hops are on the head axis."""
        keys = words(states.shape[1], geometry=text.geometry)
        return attention_pool(
            self.outer(torch.tanh(self.inner(states))), states, keys, text.present
        )


def embed_words(embed: nn.Embedding, batch: Batch) -> WordFeatures:
    """Embed the tokens of a batch."""
    if batch.tokens is None or batch.token_mask is None:
        raise ValueError("batch.tokens is None: a text classifier needs a batch with tokens")
    return WordFeatures(embed(batch.tokens), batch.token_mask, batch.text)


def run_lstm(
    lstm: nn.LSTM, embedded: Float[Tensor, "b n d"], present: Bool[Tensor, "b n"]
) -> tuple[Float[Tensor, "b n s"], Float[Tensor, "b c"]]:
    """Run an LSTM over the words and return the states of all words and the final cells.

    Padding is not read. A text without words has cells of zero.
    """
    lengths = present.sum(dim=1)
    if embedded.is_cuda and torch.cuda.is_current_stream_capturing():
        return run_lstm_unpacked(lstm, embedded, present)  # lengths would synchronize the GPU
    # packing needs lengths on the host and refuses 0: an empty text reads one padding token, and
    # its cells are set to zero below
    packed = nn.utils.rnn.pack_padded_sequence(
        embedded, lengths.clamp_min(1).cpu(), batch_first=True, enforce_sorted=False
    )
    # total_length below: the longest text of the batch may be shorter than the padded axis
    outputs, (_, cells) = lstm(packed)
    states, _ = nn.utils.rnn.pad_packed_sequence(
        outputs, batch_first=True, total_length=embedded.shape[1]
    )
    # directions come first in nn.LSTM: (direction, batch, feature)
    cells = rearrange(cells, "s b c -> b (s c)")
    return states, torch.where(lengths[:, None] > 0, cells, 0)


def run_lstm_unpacked(
    lstm: nn.LSTM, embedded: Float[Tensor, "b n d"], present: Bool[Tensor, "b n"]
) -> tuple[Float[Tensor, "b n s"], Float[Tensor, "b c"]]:
    """Compute `run_lstm` in a fixed number of steps, whatever the lengths.

    Texts that have ended keep their state. Slower in eager mode, but it can be captured in a CUDA
    graph. For LSTMs of one layer, uni- or bidirectional.
    """
    if lstm.num_layers != 1 or lstm.proj_size:
        raise ValueError(
            f"an LSTM with {lstm.num_layers} layers and proj_size={lstm.proj_size} cannot run in a "
            "CUDA graph: use one layer without projections"
        )
    # the backward direction starts at the end of the axis: padding keeps its initial state of zero
    sides = [_run_direction(lstm, embedded, present, "", range(embedded.shape[1]))]
    if lstm.bidirectional:
        back = range(embedded.shape[1] - 1, -1, -1)
        sides.append(_run_direction(lstm, embedded, present, "_reverse", back))
    states, cells = (torch.cat(parts, dim=-1) for parts in zip(*sides, strict=True))
    return states, cells


def _run_direction(
    lstm: nn.LSTM,
    embedded: Float[Tensor, "b n d"],
    present: Bool[Tensor, "b n"],
    side: str,
    order: Iterable[int],
) -> tuple[Float[Tensor, "b n s"], Float[Tensor, "b c"]]:
    """Return the states in one direction (zero at padding) and the final cells."""
    recurrent = getattr(lstm, f"weight_hh_l0{side}")
    bias_ih, bias_hh = (getattr(lstm, f"bias_{part}_l0{side}", None) for part in ("ih", "hh"))
    # the input projection of all words at once: only the recurrent product needs the loop
    gates = nn.functional.linear(embedded, getattr(lstm, f"weight_ih_l0{side}"), bias_ih)
    state = cell = gates.new_zeros(len(embedded), lstm.hidden_size)
    states: dict[int, Tensor] = {}
    for place in order:
        there = present[:, place, None]
        both = gates[:, place] + nn.functional.linear(state, recurrent, bias_hh)
        input_gate, forget_gate, new, output_gate = both.chunk(4, dim=-1)  # the order of nn.LSTM
        moved = forget_gate.sigmoid() * cell + input_gate.sigmoid() * new.tanh()
        cell = torch.where(there, moved, cell)
        state = torch.where(there, output_gate.sigmoid() * moved.tanh(), state)
        states[place] = torch.where(there, state, 0)
    return torch.stack([states[place] for place in sorted(states)], dim=1), cell


def redundancy_penalty(attention: AttentionMap) -> Float[Tensor, " b"]:
    """Compute `||A A^T - I||_F^2` of each sample: how much the hops overlap (eq. 8)."""
    hops = rearrange(attention.weights, "b 1 h 1 n -> b h n")
    # squared norm as in eq. 8; some public code takes the norm itself
    same = einsum(hops, hops, "b h n, b g n -> b h g")
    alone = torch.eye(hops.shape[1], device=hops.device, dtype=hops.dtype)
    return (same - alone).square().sum(dim=(1, 2))


class SelfAttentiveClassifier(Network[WordFeatures]):
    """Bidirectional LSTM with structured self-attention over its states.

    Padding is neither read nor attended to, so the result does not depend on the rest of the batch.
    `decision` builds the layers after the summaries from their width. The extra `redundancy` is the
    penalty of eq. 8 per sample.
    """

    made_with: dict[str, Any]

    def __init__(
        self,
        vocabulary: int,
        word: int,
        state: int,
        hidden: int,
        hops: int,
        dropout: float,
        decision: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, word, padding_idx=0)
        self.blank = nn.Parameter(torch.zeros(word))
        self.read = nn.LSTM(word, state, batch_first=True, bidirectional=True)
        self.attend = WordAttention(2 * state, hidden, hops)
        self.drop = nn.Dropout(dropout)
        self.decision = decision(2 * state * hops)

    def encode(self, batch: Batch) -> WordFeatures:
        """Embed the words."""
        return embed_words(self.embed, batch)

    def decide(self, features: WordFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Classify the summaries of all hops."""
        embedded = self.drop(features.masked(mask, self.blank))
        # --- read, attend, classify
        states, _ = run_lstm(self.read, embedded, features.present)
        summary, attention = self.attend(states, features)
        prediction = self.decision(self.drop(summary.flatten(1)))
        return Output(prediction, (attention,), {"redundancy": redundancy_penalty(attention)})

    def config(self) -> dict[str, Any]:
        """Return the constructor values."""
        return dict(self.made_with)


class TextClassifier(SelfAttentiveClassifier):
    """Structured self-attention, sized for small text datasets.

    Args:
        vocabulary: number of tokens; token 0 is padding.
        classes: number of classes.
        width: factor on all layer widths.
        hops: number of attention distributions.
        dropout: dropout on words and summaries.

    Example:
        >>> from overt.testing import toy_batch
        >>> model = TextClassifier(vocabulary=10, classes=2, width=0.1, hops=4).eval()
        >>> output = model(toy_batch(3))  # three texts of at most six words
        >>> output.prediction.shape, output.attention_to("text").weights.shape
        (torch.Size([3, 2]), torch.Size([3, 1, 4, 1, 6]))
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        width: float = 1.0,
        hops: int = 4,
        dropout: float = 0.3,
    ) -> None:
        state, word = max(4, round(128 * width)), max(4, round(300 * width))
        super().__init__(
            vocabulary,
            word,
            state,
            state,
            hops,
            dropout,
            lambda wide: nn.Sequential(
                nn.Linear(wide, 2 * state), nn.ReLU(), nn.Linear(2 * state, classes)
            ),
        )
        self.made_with = {
            "vocabulary": vocabulary,
            "classes": classes,
            "width": width,
            "hops": hops,
            "dropout": dropout,
        }


class StructuredClassifier(SelfAttentiveClassifier):
    """Text classifier of Lin et al. as used by "Self Supervision for Attention Networks".

    300-dimensional words, a bidirectional LSTM with 256 units per direction, 30 hops of attention
    with 350 hidden units (eq. 4-6), their concatenated summaries, a layer of 2000 units, and the
    classes. There is no activation between the last two layers, as in the published code of the
    second paper; `TextClassifier` has a ReLU there, as in the first paper, and is a twentieth of
    the size.

    Departures from that code: padding is neither read nor attended to (it fills 190 of 200
    positions there); a masked word becomes a learned vector instead of the unknown word; `dropout`,
    on words and summaries, is 0 by default.

    Args:
        vocabulary: number of tokens; token 0 is padding.
        classes: number of classes.
        word: features of a word embedding.
        state: LSTM units per direction.
        hidden: hidden units of the attention.
        hops: number of attention distributions.
        joint: units of the layer before the classes.
        dropout: dropout on words and summaries.

    Example:
        >>> from overt.testing import toy_batch
        >>> sizes = {"word": 8, "state": 4, "hidden": 6, "hops": 3, "joint": 16}
        >>> model = StructuredClassifier(vocabulary=10, classes=2, **sizes).eval()
        >>> output = model(toy_batch(2))
        >>> output.attention_to("text").weights.shape, output.extras["redundancy"].shape
        (torch.Size([2, 1, 3, 1, 6]), torch.Size([2]))
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        word: int = 300,
        state: int = 256,
        hidden: int = 350,
        hops: int = 30,
        joint: int = 2000,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(
            vocabulary,
            word,
            state,
            hidden,
            hops,
            dropout,
            lambda wide: nn.Sequential(nn.Linear(wide, joint), nn.Linear(joint, classes)),
        )
        self.made_with = {
            "vocabulary": vocabulary,
            "classes": classes,
            "word": word,
            "state": state,
            "hidden": hidden,
            "hops": hops,
            "joint": joint,
            "dropout": dropout,
        }
