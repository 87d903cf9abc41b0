"""LSTM question encoder with optional attention over its words."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap
from overt.data.batch import Batch
from overt.nn.text_classifier import WordAttention, WordFeatures, embed_words, run_lstm


class AttentiveQuestionEncoder(nn.Module):
    """Embedding, dropout, tanh and an LSTM: the question is the final cell state.

    With `hops` of structured self-attention over the states (Lin et al.), the mean of their
    summaries is added. "Self Supervision for Attention Networks" adds such attention to the model
    of Kazemi and Elqursh and does not say how the two are joined. With 0 hops this is the question
    encoder of "Show, Ask, Attend, and Answer".
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

    def words(self, batch: Batch) -> WordFeatures:
        """Embed the words."""
        return embed_words(self.embed, batch)

    def forward(
        self, words: WordFeatures, mask: Mapping[str, Tensor] | None = None
    ) -> tuple[Float[Tensor, "b e"], tuple[AttentionMap, ...]]:
        """Return the question, and the map over its words if there is one."""
        # masks come before dropout: a removed word is the learned blank, whatever its embedding
        embedded = torch.tanh(self.drop(words.masked(mask, self.blank)))
        states, cells = run_lstm(self.read, embedded, words.present)
        if self.weigh is None:
            return cells, ()
        summary, attention = self.weigh(states, words)
        # the mean over hops keeps the size of the question vector
        return cells + summary.mean(dim=1), (attention,)
