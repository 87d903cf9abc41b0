"""Reading a question: an LSTM, and attention over its words where it is wanted."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap
from overt.data.batch import Batch
from overt.models.text import WordAttention, Words, embed_words, read_words


class Reader(nn.Module):
    """Words, dropout, tanh, an LSTM: the question is the LSTM's cells after the last word.

    With `hops` of structured self-attention over the states (Lin et al.), the mean of their
    summaries is added. "Self Supervision for Attention Networks" adds such attention to the model
    of Kazemi and Elqursh and does not say how the two are joined. Without hops (0) this is the
    question of "Show, Ask, Attend, and Answer".
    """

    def __init__(
        self, vocabulary: int, word: int, size: int, hops: int = 1, dropout: float = 0.5
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, word, padding_idx=0)
        self.blank = nn.Parameter(torch.zeros(word))
        self.drop = nn.Dropout(dropout)
        self.read = nn.LSTM(word, size, batch_first=True)
        self.weigh = WordAttention(size, size, hops) if hops else None

    def words(self, batch: Batch) -> Words:
        """The embeddings of the words."""
        return embed_words(self.embed, batch)

    def forward(
        self, words: Words, mask: Mapping[str, Tensor] | None = None
    ) -> tuple[Float[Tensor, "b e"], tuple[AttentionMap, ...]]:
        """The question, and the map over its words where there is one."""
        embedded = torch.tanh(self.drop(words.masked(mask, self.blank)))
        states, cells = read_words(self.read, embedded, words.present)
        if self.weigh is None:
            return cells, ()
        summary, attention = self.weigh(states, words)
        return cells + summary.mean(dim=1), (attention,)
