"""Writing with a decoder: greedily, by chance, or with beams; attention comes along."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap, words
from overt.data.batch import Batch
from overt.data.vocabulary import BEGIN, END, MASK, PAD, UNKNOWN
from overt.models.output import Decoder

Rank = Callable[[Float[Tensor, "b w"], Int[Tensor, "b w"]], Float[Tensor, "b w"]]

ASKED = 4  # tokens after which a card is asked whether all texts have ended: it waits for that


@dataclass(frozen=True)
class Rules:
    """How long texts may be, in tokens with the end among them, and what is never written.

    A text that has reached `longest` without its end stops there.
    """

    longest: int = 20
    shortest: int = 1
    never: tuple[int, ...] = (PAD, UNKNOWN, MASK, BEGIN)
    begin: int = BEGIN
    end: int = END
    padding: int = PAD

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"texts of {self.shortest} to {self.longest} tokens cannot be written; "
                "1 <= shortest <= longest"
            )


@dataclass(frozen=True, eq=False)
class Texts:
    """What was written: tokens with the end, padded; the log-probability of each; where it looked.

    Row n of `attention` is the attention behind token n; after the end rows are hidden and zero.
    """

    tokens: Int[Tensor, "b n"]
    mask: Bool[Tensor, "b n"]
    log_probabilities: Float[Tensor, "b n"]
    attention: tuple[AttentionMap, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def total(self) -> Float[Tensor, " b"]:
        """The log-probability of every text."""
        return self.log_probabilities.sum(dim=-1)

    def ids(self, end: int = END) -> list[list[int]]:
        """The tokens of every text without padding and end: what a reader decodes."""
        rows = zip(self.tokens.tolist(), self.mask.tolist(), strict=True)
        return [[t for t, there in zip(*row, strict=True) if there and t != end] for row in rows]


def greedy(model: Decoder, batch: Batch, rules: Rules | None = None, features: Any = None) -> Texts:
    """The likeliest token at each step. `features` are those of the batch if they are known."""
    return _one_by_one(model, batch, rules or Rules(), features, 1, lambda log_p: log_p.argmax(-1))


def sample(
    model: Decoder,
    batch: Batch,
    draws: int = 1,
    temperature: float = 1.0,
    rules: Rules | None = None,
    features: Any = None,
    generator: torch.Generator | None = None,
) -> Texts:
    """`draws` texts a sample, by chance: rows 0 to draws - 1 are those of the first sample.

    Log-probabilities are those of the model under the rules, whatever the temperature.
    """
    if draws < 1 or temperature <= 0:
        raise ValueError(f"{draws} draws at temperature {temperature}: both must be above 0")

    def draw(log_p: Float[Tensor, "b v"]) -> Int[Tensor, " b"]:
        return drawn((log_p / temperature).softmax(dim=-1), generator)

    return _one_by_one(model, batch, rules or Rules(), features, draws, draw)


def sample_beside_greedy(
    model: Decoder,
    batch: Batch,
    draws: int = 5,
    rules: Rules | None = None,
    features: Any = None,
    generator: torch.Generator | None = None,
) -> tuple[Texts, Texts]:
    """`draws` texts a sample by chance, and the greedy one, written side by side in one go.

    The greedy text is the baseline of self-critical training (Rennie et al. 2017); written apart,
    it would take nearly as long as all the others.
    """
    if draws < 1:
        raise ValueError(f"{draws} draws; there must be one or more")
    each = draws + 1

    def choose(log_p: Float[Tensor, "b v"]) -> Int[Tensor, " b"]:
        chosen = drawn(log_p.exp(), generator)
        chosen[::each] = log_p[::each].argmax(dim=-1)
        return chosen

    found = _one_by_one(model, batch, rules or Rules(), features, each, choose)
    rows = torch.arange(len(found), device=found.tokens.device).unflatten(0, (-1, each))
    return _selected(found, rows[:, 1:].flatten()), _selected(found, rows[:, 0])


def drawn(
    shares: Float[Tensor, "b v"], generator: torch.Generator | None = None
) -> Int[Tensor, " b"]:
    """One token a row by chance: what `torch.multinomial` draws, without asking a card anything.

    Waiting times with the shares as rates are a race that each token wins as often as its share.
    """
    waits = torch.empty_like(shares).exponential_(generator=generator)
    return (shares / waits).argmax(dim=-1)


def beam(
    model: Decoder,
    batch: Batch,
    width: int = 5,
    rules: Rules | None = None,
    features: Any = None,
    rank: Rank | None = None,
) -> Texts:
    """The best text a sample of `width` that are followed at once."""
    found = beams(model, batch, width, rules, features, rank)
    first = torch.arange(0, len(found), width, device=found.tokens.device)
    return _selected(found, first)


def beams(
    model: Decoder,
    batch: Batch,
    width: int = 5,
    rules: Rules | None = None,
    features: Any = None,
    rank: Rank | None = None,
) -> Texts:
    """`width` texts a sample, the best first; rows 0 to width - 1 are those of the first sample.

    A text that has ended stays among the followed as long as no `width` others are likelier.
    `rank(total, length)` orders them in the end; by default the log-probability does, `a_word`
    divides it by the length.
    """
    if width < 1:
        raise ValueError(f"{width} beams; there must be one or more")
    rules, rank = rules or Rules(), rank or whole
    count = len(batch)
    state, tokens = _begin(model, batch, rules, features, width)
    device = tokens.device
    total = torch.full((count, width), -torch.inf, device=device)
    total[:, 0].fill_(0)  # all beams are the same text as yet: follow one of them
    done = torch.zeros(count, width, dtype=torch.bool, device=device)
    first = torch.arange(0, count * width, width, device=device)[:, None]
    allowed, steps = _Allowed(rules), list[_Step]()
    for n in range(rules.longest):
        output, state = model.step(state, tokens)
        log_p = allowed(output.prediction, n).unflatten(0, (count, width))
        silent = torch.full_like(log_p, -torch.inf)
        silent[..., rules.padding].fill_(0)
        log_p = torch.where(done[..., None], silent, log_p)
        size = log_p.shape[-1]
        total, chosen = (total[..., None] + log_p).flatten(1).topk(width, dim=-1)
        parent, token = chosen // size, chosen % size
        gained = log_p.flatten(1).gather(1, chosen)
        there = ~done.gather(1, parent)
        rows = (first + parent).flatten()
        steps.append(
            _Step(token.flatten(), there.flatten(), gained.flatten(), output.attention, rows)
        )
        done = ~there | (token == rules.end)
        tokens = torch.where(there, token, rules.end).flatten()
        if _ended(done):
            break
        state = state.reorder(rows)
    lengths = (
        torch.stack([one.there for one in _traced(steps)]).sum(dim=0).unflatten(0, (-1, width))
    )
    order = rank(total, lengths).argsort(dim=-1, descending=True, stable=True)
    return _texts(steps, rules, (first + order).flatten())


def whole(total: Float[Tensor, "b w"], length: Int[Tensor, "b w"]) -> Float[Tensor, "b w"]:
    """Texts by their log-probability."""
    return total


def a_word(total: Float[Tensor, "b w"], length: Int[Tensor, "b w"]) -> Float[Tensor, "b w"]:
    """Texts by their mean log-probability a token, so that long ones do not lose by length."""
    return total / length.clamp_min(1)


# --- steps


@dataclass(frozen=True, eq=False)
class _Step:
    """One token a row, whether it belongs to a text, and the row of the step before it goes on.

    Attention stands in the order of the step's own inputs: before rows were taken.
    """

    token: Tensor
    there: Tensor
    gained: Tensor
    attention: tuple[AttentionMap, ...]
    rows: Tensor | None = None


def _begin(
    model: Decoder, batch: Batch, rules: Rules, features: Any, each: int
) -> tuple[Any, Int[Tensor, " n"]]:
    """The state before the first token, `each` rows a sample, and the token that begins."""
    features = model.encode(batch) if features is None else features
    state: Any = model.start(features)
    given = (batch.images, batch.features, batch.tokens)
    device = next((one.device for one in given if one is not None), torch.device("cpu"))
    count = len(batch) * each
    if each > 1:
        state = state.reorder(torch.arange(len(batch), device=device).repeat_interleave(each))
    return state, torch.full((count,), rules.begin, device=device)


class _Allowed:
    """Log-probabilities of the next token under the rules, which share out what they forbid.

    What is forbidden is written down once, where the logits are: nothing is sent to a card.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules, self.forbidden = rules, torch.zeros(0, 0, dtype=torch.bool)

    def __call__(self, logits: Float[Tensor, "b v"], written: int) -> Float[Tensor, "b v"]:
        size, end = logits.shape[-1], self.rules.end
        if not written:
            forbidden = torch.zeros(2, size, dtype=torch.bool, device=logits.device)
            for token in self.rules.never:
                if token < size and token != end:
                    forbidden[:, token].fill_(True)  # an assignment would be a copy to the card
            forbidden[1, end].fill_(True)
            self.forbidden = forbidden
        early = written + 1 < self.rules.shortest
        return logits.float().masked_fill(self.forbidden[int(early)], -torch.inf).log_softmax(-1)


def _one_by_one(
    model: Decoder,
    batch: Batch,
    rules: Rules,
    features: Any,
    each: int,
    choose: Callable[[Float[Tensor, "b v"]], Int[Tensor, " b"]],
) -> Texts:
    state, tokens = _begin(model, batch, rules, features, each)
    there = torch.ones_like(tokens, dtype=torch.bool)
    allowed, steps = _Allowed(rules), list[_Step]()
    for n in range(rules.longest):
        output, state = model.step(state, tokens)
        log_p = allowed(output.prediction, n)
        tokens = choose(log_p)
        gained = log_p.gather(1, tokens[:, None])[:, 0]
        steps.append(_Step(tokens, there, gained, output.attention))
        there = there & (tokens != rules.end)
        if _over(there, n + 1):
            steps = steps[: _needed(steps)]
            break
    return _texts(steps, rules)


def _over(there: Bool[Tensor, " b"], written: int) -> bool:
    """Whether all texts have ended; a card is asked now and then, and never while it records."""
    if there.is_cuda and (written % ASKED or torch.cuda.is_current_stream_capturing()):
        return False
    return not bool(there.any())


def _ended(done: Bool[Tensor, "b w"]) -> bool:
    """Whether all beams have ended; a card that records is not asked."""
    recording = done.is_cuda and torch.cuda.is_current_stream_capturing()
    return not recording and bool(done.all())


def _needed(steps: Sequence[_Step]) -> int:
    """The steps in which some text went on: a card may have been asked later than that."""
    return int(torch.stack([one.there.any() for one in steps]).sum())


def _traced(steps: Sequence[_Step], rows: Tensor | None = None) -> list[_Step]:
    """The steps that lead to the rows named of the last one, each in the order of these rows."""
    found = []
    for one in reversed(steps):
        before = one.rows
        if rows is not None:
            before = rows if before is None else before[rows]
            one = replace(
                one, token=one.token[rows], there=one.there[rows], gained=one.gained[rows]
            )
        found.append(replace(one, rows=before))
        rows = before
    return found[::-1]


def _texts(steps: Sequence[_Step], rules: Rules, rows: Tensor | None = None) -> Texts:
    """The steps side by side, along the paths that lead to `rows`."""
    steps = _traced(steps, rows)
    there = torch.stack([one.there for one in steps], dim=1)
    tokens = torch.stack([one.token for one in steps], dim=1)
    gained = torch.stack([one.gained for one in steps], dim=1)
    kinds = range(len(steps[0].attention))
    return Texts(
        torch.where(there, tokens, rules.padding),
        there,
        torch.where(there, gained, 0),
        tuple(_joined([_taken(one, at) for one in steps], there) for at in kinds),
    )


def _taken(step: _Step, at: int) -> AttentionMap:
    found = step.attention[at]
    return found if step.rows is None else found.select(step.rows)


def _joined(maps: Sequence[AttentionMap], there: Bool[Tensor, "b n"]) -> AttentionMap:
    """Maps of one query each as the rows of one; rows of no token are hidden and zero."""
    values = torch.cat([one.weights for one in maps], dim=3)
    visible = torch.cat([one.visible for one in maps], dim=1) & there[..., None]
    values = values.masked_fill(~there[:, None, None, :, None], 0)
    return AttentionMap(values, maps[-1].keys, words(len(maps)), visible, maps[-1].kind)


def _selected(texts: Texts, rows: Tensor) -> Texts:
    maps = tuple(one.select(rows) for one in texts.attention)
    return Texts(texts.tokens[rows], texts.mask[rows], texts.log_probabilities[rows], maps)
