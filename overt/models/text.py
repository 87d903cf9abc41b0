"""Attention over words: structured self-attention, and a text classifier built on it.

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
from overt.models.network import Network
from overt.models.output import Output
from overt.models.weighing import weigh


@dataclass(frozen=True, eq=False)
class Words:
    """A text as the embeddings of its words; padding stands after them."""

    values: Float[Tensor, "b n d"]
    present: Bool[Tensor, "b n"]
    geometry: TextGeometry | None

    def masked(
        self, mask: Mapping[str, Tensor] | None, blank: Float[Tensor, " d"]
    ) -> Float[Tensor, "b n d"]:
        """The embeddings, with `blank` in the place of words whose entry in the "text" mask is 0.

        Padding is left alone: it is no word, and nothing may be read from it.
        """
        if mask is None or "text" not in mask:
            return self.values
        kept = torch.where(self.present, mask["text"], 1).to(self.values.dtype)[..., None]
        return self.values * kept + blank * (1 - kept)

    def pooled(self) -> Float[Tensor, "b d"]:
        """The mean of the words there are: what the text is, whatever is attended to."""
        there = self.present[..., None].to(self.values.dtype)
        return (self.values * there).sum(dim=1) / there.sum(dim=1).clamp_min(1)


class WordAttention(nn.Module):
    """`softmax(W2 tanh(W1 H))` over the words that are there: one distribution a hop (eq. 4-6)."""

    def __init__(self, width: int, hidden: int, hops: int = 1) -> None:
        super().__init__()
        self.inner = nn.Linear(width, hidden, bias=False)
        self.outer = nn.Linear(hidden, hops, bias=False)

    def forward(
        self, states: Float[Tensor, "b n d"], text: Words
    ) -> tuple[Float[Tensor, "b h d"], AttentionMap]:
        """The summary of every hop, and the map behind it; hops stand on the head axis."""
        keys = words(states.shape[1], geometry=text.geometry)
        return weigh(self.outer(torch.tanh(self.inner(states))), states, keys, text.present)


def embed_words(embed: nn.Embedding, batch: Batch) -> Words:
    """The words of a batch of texts."""
    if batch.tokens is None or batch.token_mask is None:
        raise ValueError("a text classifier needs a batch with tokens")
    return Words(embed(batch.tokens), batch.token_mask, batch.text)


def read_words(
    lstm: nn.LSTM, embedded: Float[Tensor, "b n d"], present: Bool[Tensor, "b n"]
) -> tuple[Float[Tensor, "b n s"], Float[Tensor, "b c"]]:
    """The states of an LSTM at every word, and its cells after the last; padding never enters it.

    A text without words has cells of zero.
    """
    lengths = present.sum(dim=1)
    if embedded.is_cuda and torch.cuda.is_current_stream_capturing():
        return read_in_step(lstm, embedded, present)  # no length can be asked for now
    packed = nn.utils.rnn.pack_padded_sequence(
        embedded, lengths.clamp_min(1).cpu(), batch_first=True, enforce_sorted=False
    )
    found, (_, cells) = lstm(packed)
    states, _ = nn.utils.rnn.pad_packed_sequence(
        found, batch_first=True, total_length=embedded.shape[1]
    )
    cells = rearrange(cells, "s b c -> b (s c)")
    return states, torch.where(lengths[:, None] > 0, cells, 0)


def read_in_step(
    lstm: nn.LSTM, embedded: Float[Tensor, "b n d"], present: Bool[Tensor, "b n"]
) -> tuple[Float[Tensor, "b n s"], Float[Tensor, "b c"]]:
    """The same as `read_words` in as many steps as there are places, whatever the lengths.

    A step leaves the texts that are over as they are. Slower where each operation is sent off by
    itself; it is how a recorded step reads. For LSTMs of one layer, in either direction or both.
    """
    if lstm.num_layers != 1 or lstm.proj_size:
        raise ValueError("an LSTM of several layers, or with projections, cannot be recorded")
    sides = [_one_way(lstm, embedded, present, "", range(embedded.shape[1]))]
    if lstm.bidirectional:
        back = range(embedded.shape[1] - 1, -1, -1)
        sides.append(_one_way(lstm, embedded, present, "_reverse", back))
    states, cells = (torch.cat(parts, dim=-1) for parts in zip(*sides, strict=True))
    return states, cells


def _one_way(
    lstm: nn.LSTM,
    embedded: Float[Tensor, "b n d"],
    present: Bool[Tensor, "b n"],
    side: str,
    order: Iterable[int],
) -> tuple[Float[Tensor, "b n s"], Float[Tensor, "b c"]]:
    """The states in one direction, zero where there is no word, and the last cells."""
    onward = getattr(lstm, f"weight_hh_l0{side}")
    own, former = (getattr(lstm, f"bias_{part}_l0{side}", None) for part in ("ih", "hh"))
    gates = nn.functional.linear(embedded, getattr(lstm, f"weight_ih_l0{side}"), own)
    state = cell = gates.new_zeros(len(embedded), lstm.hidden_size)
    states: dict[int, Tensor] = {}
    for place in order:
        there = present[:, place, None]
        both = gates[:, place] + nn.functional.linear(state, onward, former)
        takes, keeps, new, shows = both.chunk(4, dim=-1)
        moved = keeps.sigmoid() * cell + takes.sigmoid() * new.tanh()
        cell = torch.where(there, moved, cell)
        state = torch.where(there, shows.sigmoid() * moved.tanh(), state)
        states[place] = torch.where(there, state, 0)
    return torch.stack([states[place] for place in sorted(states)], dim=1), cell


def redundancy(attention: AttentionMap) -> Float[Tensor, " b"]:
    """How much the hops repeat each other: `||A A^T - I||_F^2` of every sample (eq. 8)."""
    hops = rearrange(attention.weights, "b 1 h 1 n -> b h n")
    same = einsum(hops, hops, "b h n, b g n -> b h g")
    alone = torch.eye(hops.shape[1], device=hops.device, dtype=hops.dtype)
    return (same - alone).square().sum(dim=(1, 2))


class SelfAttentive(Network[Words]):
    """A bidirectional LSTM whose states are summarised by structured self-attention.

    Padding never enters the LSTM, and no attention falls on it, so a text is read the same in any
    batch. `decision` makes the layers behind the summaries, whose width it is told. The extra
    `redundancy` is the penalty of eq. 8, one number a sample.
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

    def encode(self, batch: Batch) -> Words:
        """The embeddings of the words."""
        return embed_words(self.embed, batch)

    def decide(self, features: Words, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Classes from the summaries of all hops."""
        embedded = self.drop(features.masked(mask, self.blank))
        states, _ = read_words(self.read, embedded, features.present)
        summary, attention = self.attend(states, features)
        prediction = self.decision(self.drop(summary.flatten(1)))
        return Output(prediction, (attention,), {"redundancy": redundancy(attention)})

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return dict(self.made_with)


class TextClassifier(SelfAttentive):
    """Structured self-attention at a size for small sets of texts."""

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


class StructuredClassifier(SelfAttentive):
    """The text classifier of Lin et al. as "Self Supervision for Attention Networks" uses it.

    Words of 300 numbers, a bidirectional LSTM of 256 a direction, 30 hops of attention with 350
    hidden numbers (eq. 4-6), all summaries side by side, 2000 numbers, classes. There is nothing
    between the last two layers, as in the code published with the second paper; `TextClassifier`
    has a ReLU there, as the first one does, and is a twentieth of the size.

    Departures from that code: padding is neither read nor attended to (it fills 190 of 200 places
    there); a masked word becomes a vector of its own and not an unknown word; `dropout`, on words
    and summaries, is 0 unless asked for.
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
