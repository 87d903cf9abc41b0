"""Toy models with known outputs, to test metrics, losses and decoders."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from jaxtyping import Int
from torch import Tensor, nn

from overt.attention import AttentionMap, grid, words
from overt.data.batch import Batch
from overt.geometry import PixelGeometry, TextGeometry
from overt.nn.cnn import ImageFeatures
from overt.nn.output import Output
from overt.nn.text_classifier import WordFeatures


def toy_batch(samples: int = 4, seed: int = 0) -> Batch:
    """Return random images of 32 x 32 and questions of unequal length.

    The last two samples share an image.

    Args:
        samples: The number of samples.
        seed: The random seed.

    Returns:
        The batch.

    Example:
        >>> toy_batch(3).ids
        ('toy-0', 'toy-1', 'toy-2')
    """
    generator = torch.Generator().manual_seed(seed)
    count = max(1, samples - 1)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    longest = 6
    lengths = [longest - at % 3 for at in range(samples)]
    tokens = torch.randint(1, 10, (samples, longest), generator=generator)
    present = torch.arange(longest) < torch.tensor(lengths)[:, None]
    starts = 2 * torch.arange(longest)
    spans = torch.stack([starts, starts + 1], dim=-1).expand(samples, -1, -1)
    return Batch(
        ids=tuple(f"toy-{at}" for at in range(samples)),
        images=images,
        # one image less than samples: the last two share theirs
        image_of=torch.arange(samples).clamp_max(count - 1),
        geometry=PixelGeometry.identity(count, (32, 32)),
        tokens=torch.where(present, tokens, 0),
        token_mask=present,
        text=TextGeometry(
            tuple(" ".join("abcdef"[:length]) for length in lengths),
            torch.where(present[..., None], spans, -1),
        ),
        labels=torch.randint(0, 2, (samples,), generator=generator),
    )


class PlantedCell(nn.Module):
    """Predict from one cell of the image only.

    The value v of a cell is its mean brightness, from -1 to 1. The logits are (-gain v, gain v) of
    the planted cell, so removing it leaves two equal logits, and other cells change nothing. All
    attention is on the cell `shows`.

    Args:
        shape: Rows and columns of the cells.
        cell: The planted cell.
        shows: The attended cell: the planted one, or another for unfaithful attention.
        gain: The scale of the logits.

    Example:
        >>> batch, model = toy_batch(2), PlantedCell((4, 4), cell=5, shows=7)
        >>> model(batch).attention_to("image").weights.argmax(dim=-1).flatten()
        tensor([7, 7])
        >>> model.truth(batch).weights.argmax(dim=-1).flatten()
        tensor([5, 5])
    """

    def __init__(
        self,
        shape: tuple[int, int] = (4, 4),
        cell: int = 5,
        shows: int | None = None,
        gain: float = 4.0,
    ) -> None:
        super().__init__()
        self.shape, self.cell = shape, cell
        self.shows = cell if shows is None else shows
        self.gain = nn.Parameter(torch.tensor(gain))

    def encode(self, batch: Batch) -> ImageFeatures:
        """Return the brightness of every cell."""
        if batch.images is None:
            raise ValueError("PlantedCell needs a batch with images")
        pixels = batch.images.to(self.gain.dtype)
        if not batch.images.is_floating_point():
            # 0 to 255 becomes -1 to 1, so that a removed cell (0) is neither dark nor bright
            pixels = pixels / 127.5 - 1
        means = nn.functional.adaptive_avg_pool2d(pixels.mean(dim=1, keepdim=True), self.shape)
        values = rearrange(means, "i 1 y x -> i (y x) 1")[batch.image_index]
        return ImageFeatures(values, grid(*self.shape, geometry=batch.sample_geometry))

    def decide(self, features: ImageFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Predict whether the planted cell is bright."""
        value = self.gain * features.masked(mask)[:, self.cell, 0]
        return Output(torch.stack([-value, value], dim=-1), (self._looks(features, self.shows),))

    def forward(self, batch: Batch) -> Output:
        """Predict whether the planted cell of each image is bright."""
        return self.decide(self.encode(batch))

    def truth(self, batch: Batch) -> AttentionMap:
        """Return a map with all attention on the planted cell."""
        return self._looks(self.encode(batch), self.cell)

    def _looks(self, features: ImageFeatures, cell: int) -> AttentionMap:
        weights = torch.zeros_like(features.values[..., 0])
        weights[:, cell] = 1
        return AttentionMap.from_cells(weights, features.layout).normalize()


class PlantedWord(nn.Module):
    """Predict whether one word is in the text, and attend to its positions.

    The logits are (0, gain n - gain / 2) for n positions. If the word is absent, attention is
    uniform over the words; a text without words has none.

    Args:
        word: The planted token.
        gain: The scale of the logits.

    Example:
        >>> batch = Batch(
        ...     ids=("a", "b"),
        ...     tokens=torch.tensor([[3, 1, 2], [1, 2, 0]]),
        ...     token_mask=torch.tensor([[True, True, True], [True, True, False]]),
        ... )
        >>> output = PlantedWord(word=3)(batch)
        >>> output.prediction.tolist()
        [[0.0, 2.0], [0.0, -2.0]]
        >>> output.attention_to("text").weights[:, 0, 0, 0]
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000]])
    """

    def __init__(self, word: int = 3, gain: float = 4.0) -> None:
        super().__init__()
        self.word = word
        self.gain = nn.Parameter(torch.tensor(gain))

    def encode(self, batch: Batch) -> WordFeatures:
        """Return which words are the planted one."""
        if batch.tokens is None or batch.token_mask is None:
            raise ValueError("PlantedWord needs a batch with tokens")
        found = (batch.tokens == self.word) & batch.token_mask
        return WordFeatures(found.to(self.gain.dtype)[..., None], batch.token_mask, batch.text)

    def decide(self, features: WordFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Predict whether the word is present."""
        found = features.masked(mask, torch.zeros_like(self.gain)[None])[..., 0]
        score = self.gain * (found.sum(dim=-1) - 0.5)
        even = features.present.to(found.dtype)
        # attention needs a place to go if the word is absent
        places = torch.where((found > 0).any(dim=-1, keepdim=True), found, even)
        keys = words(found.shape[1], geometry=features.geometry)
        attention = AttentionMap.from_cells(places, keys, features.present).normalize()
        return Output(torch.stack([torch.zeros_like(score), score], dim=-1), (attention,))

    def forward(self, batch: Batch) -> Output:
        """Predict whether the word is in each text."""
        return self.decide(self.encode(batch))


@dataclass(frozen=True, eq=False)
class CopierState:
    """The state of a `Copier`.

    Args:
        features: The words of the texts.
        place: The position of the next word.

    Example:
        >>> model, batch = Copier(), toy_batch(2)
        >>> state = model.start(model.encode(batch))
        >>> _, state = model.step(state, batch.tokens[:, 0])
        >>> state.place, state.reorder(torch.tensor([1, 1, 0])).place
        (tensor([1, 1]), tensor([1, 1, 1]))
    """

    features: WordFeatures
    place: Int[Tensor, " b"]

    def reorder(self, rows: Int[Tensor, " n"]) -> "CopierState":
        """Return the state of some samples."""
        words = self.features
        text = None if words.geometry is None else words.geometry[rows]
        kept = replace(words, values=words.values[rows], present=words.present[rows], geometry=text)
        return CopierState(kept, self.place[rows])


class Copier(nn.Module):
    """A decoder that copies its input word by word and attends to the copied word.

    The logits of the next word are `gain` for the word at the current position, else 0. After the
    end of a text it starts again. The input tokens only count steps.

    Args:
        vocabulary: The number of tokens.
        gain: The logit of the next word.

    Example:
        >>> from overt.nn.captioning.decoding import DecodingRules, greedy
        >>> rules = DecodingRules(max_length=4, forbidden=(), end=0)
        >>> toy_batch(1).tokens[:, :4]
        tensor([[6, 1, 6, 3]])
        >>> greedy(Copier(), toy_batch(1), rules).tokens
        tensor([[6, 1, 6, 3]])
    """

    def __init__(self, vocabulary: int = 10, gain: float = 4.0) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.gain = nn.Parameter(torch.tensor(gain))

    def encode(self, batch: Batch) -> WordFeatures:
        """Return the words as one-hot vectors."""
        if batch.tokens is None or batch.token_mask is None:
            raise ValueError("Copier needs a batch with tokens")
        values = nn.functional.one_hot(batch.tokens, self.vocabulary).to(self.gain.dtype)
        return WordFeatures(values, batch.token_mask, batch.text)

    def start(self, features: WordFeatures) -> CopierState:
        """Return the state before the first word."""
        return CopierState(features, torch.zeros(len(features.present), dtype=torch.long))

    def step(self, state: CopierState, tokens: Int[Tensor, " b"]) -> tuple[Output, CopierState]:
        """Return the word at the current position, and the next state."""
        words_, present = state.features.values, state.features.present
        # modulo: after its end a text starts again
        at = nn.functional.one_hot(state.place % present.sum(-1), words_.shape[1])
        keys = words(words_.shape[1], geometry=state.features.geometry)
        looks = AttentionMap.from_cells(at.to(words_.dtype), keys, present).normalize()
        logits = self.gain * torch.einsum("bk,bkv->bv", at.to(words_.dtype), words_)
        return Output(logits, (looks,)), CopierState(state.features, state.place + 1)
