"""Greedy decoding, sampling and beam search, with the attention of every token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from overt.attention import AttentionMap, words
from overt.data.batch import Batch
from overt.data.vocabulary import BEGIN, END, MASK, PAD, UNKNOWN
from overt.nn.output import Decoder

RankTexts = Callable[[Float[Tensor, "b w"], Int[Tensor, "b w"]], Float[Tensor, "b w"]]

SYNC_EVERY = 4  # tokens between checks whether all texts have ended, which synchronize the GPU


@dataclass(frozen=True)
class DecodingRules:
    """Length limits and forbidden tokens of generated texts.

    Args:
        max_length: maximum number of tokens, including the end token; longer texts are cut.
        min_length: minimum number of tokens, including the end token.
        forbidden: tokens that are never generated.
        begin: token that starts a text.
        end: token that ends a text.
        padding: token after the end.

    Raises:
        ValueError: unless 1 <= min_length <= max_length.

    Example:
        >>> from overt.testing import Copier, toy_batch
        >>> toy_batch(2).tokens[:, :3]
        tensor([[6, 1, 6],
                [2, 6, 1]])
        >>> rules = DecodingRules(max_length=3, forbidden=(), end=9)
        >>> greedy(Copier(), toy_batch(2), rules).tokens
        tensor([[6, 1, 6],
                [2, 6, 1]])
    """

    max_length: int = 20
    min_length: int = 1
    forbidden: tuple[int, ...] = (PAD, UNKNOWN, MASK, BEGIN)
    begin: int = BEGIN
    end: int = END
    padding: int = PAD

    def __post_init__(self) -> None:
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(
                f"expected 1 <= min_length <= max_length, got min_length={self.min_length} and "
                f"max_length={self.max_length}"
            )


@dataclass(frozen=True, eq=False)
class GeneratedTexts:
    """Generated texts with log-probabilities and attention.

    Args:
        tokens: tokens including the end, padded.
        mask: real tokens.
        log_probabilities: of each token; 0 after the end.
        attention: row n is the attention of token n; rows after the end are hidden and zero.

    Example:
        >>> from overt.testing import Copier, toy_batch
        >>> rules = DecodingRules(max_length=4, forbidden=(), end=0)
        >>> texts = greedy(Copier(), toy_batch(2), rules)
        >>> len(texts), texts.tokens.shape, texts.total.shape
        (2, torch.Size([2, 4]), torch.Size([2]))
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
        """Return the tokens of every text without padding and end."""
        rows = zip(self.tokens.tolist(), self.mask.tolist(), strict=True)
        return [[t for t, there in zip(*row, strict=True) if there and t != end] for row in rows]


def greedy(
    model: Decoder, batch: Batch, rules: DecodingRules | None = None, features: Any = None
) -> GeneratedTexts:
    """Generate the most likely token at each step.

    Args:
        model: a decoder.
        batch: the inputs.
        rules: length limits and forbidden tokens.
        features: encoded features of the batch, if available.

    Returns:
        One text per sample.

    Example:
        >>> from overt.testing import Copier, toy_batch
        >>> rules = DecodingRules(max_length=4, forbidden=(), end=0)
        >>> greedy(Copier(), toy_batch(1), rules).tokens  # copies the words of the sample
        tensor([[6, 1, 6, 3]])
    """
    return _decode_steps(
        model, batch, rules or DecodingRules(), features, 1, lambda log_p: log_p.argmax(-1)
    )


def sample(
    model: Decoder,
    batch: Batch,
    draws: int = 1,
    temperature: float = 1.0,
    rules: DecodingRules | None = None,
    features: Any = None,
    generator: torch.Generator | None = None,
) -> GeneratedTexts:
    """Sample `draws` texts per sample; rows 0 to draws - 1 belong to the first sample.

    Log-probabilities are those of the model under the rules, whatever the temperature.

    Args:
        model: a decoder.
        batch: the inputs.
        draws: texts per sample.
        temperature: divides the log-probabilities before sampling.
        rules: length limits and forbidden tokens.
        features: encoded features of the batch, if available.
        generator: random generator.

    Returns:
        `draws` texts per sample.

    Raises:
        ValueError: `draws` is below 1, or `temperature` is not positive.

    Example:
        >>> from overt.testing import Copier, toy_batch
        >>> rules = DecodingRules(max_length=4, forbidden=(), end=0)
        >>> len(sample(Copier(), toy_batch(2), draws=3, rules=rules))
        6
    """
    if draws < 1 or temperature <= 0:
        raise ValueError(f"draws and temperature must be above 0, got {draws} and {temperature}")

    def draw(log_p: Float[Tensor, "b v"]) -> Int[Tensor, " b"]:
        # the temperature changes what is drawn, not the log-probabilities that are returned
        return draw_tokens((log_p / temperature).softmax(dim=-1), generator)

    return _decode_steps(model, batch, rules or DecodingRules(), features, draws, draw)


def sample_with_greedy(
    model: Decoder,
    batch: Batch,
    draws: int = 5,
    rules: DecodingRules | None = None,
    features: Any = None,
    generator: torch.Generator | None = None,
) -> tuple[GeneratedTexts, GeneratedTexts]:
    """Sample `draws` texts per sample and generate the greedy one in the same batch.

    The greedy text is the baseline of self-critical training (Rennie et al. 2017); a separate pass
    would take nearly as long as all samples.

    Args:
        model: A decoder.
        batch: The inputs.
        draws: Texts per sample.
        rules: Length limits and forbidden tokens.
        features: Encoded features of the batch, if available.
        generator: Random generator.

    Returns:
        The samples, and the greedy texts.

    Raises:
        ValueError: `draws` is below 1.

    Example:
        >>> from overt.testing import Copier, toy_batch
        >>> rules = DecodingRules(max_length=4, forbidden=(), end=0)
        >>> samples, baseline = sample_with_greedy(Copier(), toy_batch(2), draws=3, rules=rules)
        >>> len(samples), len(baseline)
        (6, 2)
    """
    if draws < 1:
        raise ValueError(f"draws must be 1 or more, got {draws}")
    each = draws + 1

    def choose(log_p: Float[Tensor, "b v"]) -> Int[Tensor, " b"]:
        # row 0 of each sample is the greedy text, rows 1 to `draws` are samples
        chosen = draw_tokens(log_p.exp(), generator)
        chosen[::each] = log_p[::each].argmax(dim=-1)
        return chosen

    texts = _decode_steps(model, batch, rules or DecodingRules(), features, each, choose)
    rows = torch.arange(len(texts), device=texts.tokens.device).unflatten(0, (-1, each))
    return _select_rows(texts, rows[:, 1:].flatten()), _select_rows(texts, rows[:, 0])


def draw_tokens(
    probabilities: Float[Tensor, "b v"], generator: torch.Generator | None = None
) -> Int[Tensor, " b"]:
    """Draw one token per row, distributed as in `torch.multinomial`, without synchronizing the GPU.

    Exponential waiting times with the probabilities as rates: each token comes first as often as
    its probability.

    Args:
        probabilities: The distribution of each row.
        generator: Random generator.

    Returns:
        One token per row.

    Example:
        >>> draw_tokens(torch.tensor([[0.0, 1.0, 0.0]]))
        tensor([1])
    """
    # the minimum of Exp(1) / p_i falls on i with probability p_i; multinomial would synchronize
    waits = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / waits).argmax(dim=-1)


def beam_search(
    model: Decoder,
    batch: Batch,
    width: int = 5,
    rules: DecodingRules | None = None,
    features: Any = None,
    rank: RankTexts | None = None,
) -> GeneratedTexts:
    """Return the best text per sample of a beam search.

    Args:
        model: a decoder.
        batch: the inputs.
        width: number of beams.
        rules: length limits and forbidden tokens.
        features: encoded features of the batch, if available.
        rank: final order of the beams; see `beam_search_all`.

    Returns:
        One text per sample.

    Example:
        >>> from overt.testing import Copier, toy_batch
        >>> rules = DecodingRules(max_length=4, forbidden=(), end=0)
        >>> beam_search(Copier(), toy_batch(1), width=2, rules=rules).tokens
        tensor([[6, 1, 6, 3]])
    """
    texts = beam_search_all(model, batch, width, rules, features, rank)
    first = torch.arange(0, len(texts), width, device=texts.tokens.device)
    return _select_rows(texts, first)


def beam_search_all(
    model: Decoder,
    batch: Batch,
    width: int = 5,
    rules: DecodingRules | None = None,
    features: Any = None,
    rank: RankTexts | None = None,
) -> GeneratedTexts:
    """Return all `width` beams per sample, best first; rows 0 to width - 1 are the first sample.

    A finished text stays in the beam while fewer than `width` others are more likely.

    Args:
        model: a decoder.
        batch: the inputs.
        width: number of beams.
        rules: length limits and forbidden tokens.
        features: encoded features of the batch, if available.
        rank: `rank(total, length)` orders the beams at the end: `rank_by_total` (default) or
            `rank_by_mean`.

    Returns:
        `width` texts per sample.

    Raises:
        ValueError: `width` is below 1.

    Example:
        >>> from overt.testing import Copier, toy_batch
        >>> rules = DecodingRules(max_length=4, forbidden=(), end=0)
        >>> beam_search_all(Copier(), toy_batch(2), width=3, rules=rules).tokens.shape
        torch.Size([6, 4])
    """
    if width < 1:
        raise ValueError(f"width must be 1 or more, got {width}")
    rules, rank = rules or DecodingRules(), rank or rank_by_total
    count = len(batch)
    state, tokens = _begin(model, batch, rules, features, width)
    device = tokens.device
    # --- start: one beam per sample counts, the others have log-probability -inf
    total = torch.full((count, width), -torch.inf, device=device)
    total[:, 0].fill_(0)  # all beams are still the same text: expand one of them
    done = torch.zeros(count, width, dtype=torch.bool, device=device)
    first = torch.arange(0, count * width, width, device=device)[:, None]
    allowed, steps = _ConstrainedLogProbs(rules), list[_DecodingStep]()
    for n in range(rules.max_length):
        # --- extend every beam by every token, and keep the best `width`
        output, state = model.step(state, tokens)
        log_p = allowed(output.prediction, n).unflatten(0, (count, width))
        # a finished text has one continuation, padding, at no cost
        padded = torch.full_like(log_p, -torch.inf)
        padded[..., rules.padding].fill_(0)
        log_p = torch.where(done[..., None], padded, log_p)
        size = log_p.shape[-1]
        # over all beams and tokens at once: a beam may have several successors, or none
        total, chosen = (total[..., None] + log_p).flatten(1).topk(width, dim=-1)
        parent, token = chosen // size, chosen % size
        gained = log_p.flatten(1).gather(1, chosen)
        # whether this token belongs to a text: false for the padding after its end
        there = ~done.gather(1, parent)
        rows = (first + parent).flatten()
        steps.append(
            _DecodingStep(
                token.flatten(), there.flatten(), gained.flatten(), output.attention, rows
            )
        )
        # --- finished texts stay in the beam, and are fed the end token whose output is ignored
        done = ~there | (token == rules.end)
        tokens = torch.where(there, token, rules.end).flatten()
        if _all_beams_ended(done):
            break
        state = state.reorder(rows)
    lengths = (
        torch.stack([one.there for one in _backtrack(steps)]).sum(dim=0).unflatten(0, (-1, width))
    )
    # topk has sorted by total, so the stable sort keeps that order among equal ranks
    order = rank(total, lengths).argsort(dim=-1, descending=True, stable=True)
    return _collect_texts(steps, rules, (first + order).flatten())


def rank_by_total(total: Float[Tensor, "b w"], length: Int[Tensor, "b w"]) -> Float[Tensor, "b w"]:
    """Rank texts by their log-probability.

    Args:
        total: The log-probability of each beam.
        length: Its number of tokens.

    Returns:
        The score of each beam.

    Example:
        >>> rank_by_total(torch.tensor([[-2.0, -3.0]]), torch.tensor([[1, 3]])).argmax(dim=-1)
        tensor([0])
    """
    return total


def rank_by_mean(total: Float[Tensor, "b w"], length: Int[Tensor, "b w"]) -> Float[Tensor, "b w"]:
    """Rank texts by their mean log-probability per token, without a penalty on length.

    Args:
        total: The log-probability of each beam.
        length: Its number of tokens.

    Returns:
        The score of each beam.

    Example:
        >>> rank_by_mean(torch.tensor([[-2.0, -3.0]]), torch.tensor([[1, 3]])).argmax(dim=-1)
        tensor([1])
    """
    return total / length.clamp_min(1)


# --- steps


@dataclass(frozen=True, eq=False)
class _DecodingStep:
    """One token per row, whether it belongs to a text, and the parent row in the previous step.

    Attention is in the order of the step's inputs, before rows are reordered.
    """

    token: Tensor
    there: Tensor
    gained: Tensor
    attention: tuple[AttentionMap, ...]
    rows: Tensor | None = None


def _begin(
    model: Decoder, batch: Batch, rules: DecodingRules, features: Any, each: int
) -> tuple[Any, Int[Tensor, " n"]]:
    """Return the state before the first token, with `each` rows per sample, and the begin token."""
    features = model.encode(batch) if features is None else features
    state: Any = model.start(features)
    inputs = (batch.images, batch.features, batch.tokens)
    device = next((one.device for one in inputs if one is not None), torch.device("cpu"))
    count = len(batch) * each
    if each > 1:
        # copied after `start`: the image is encoded and projected once, not `each` times
        state = state.reorder(torch.arange(len(batch), device=device).repeat_interleave(each))
    return state, torch.full((count,), rules.begin, device=device)


class _ConstrainedLogProbs:
    """Compute log-probabilities of the next token, renormalised without the forbidden ones.

    The mask of forbidden tokens is built once on the device of the logits, so nothing is copied
    later.
    """

    def __init__(self, rules: DecodingRules) -> None:
        self.rules, self.forbidden = rules, torch.zeros(0, 0, dtype=torch.bool)

    def __call__(self, logits: Float[Tensor, "b v"], written: int) -> Float[Tensor, "b v"]:
        size, end = logits.shape[-1], self.rules.end
        # the size of the vocabulary is known from the first logits
        if not written:
            forbidden = torch.zeros(2, size, dtype=torch.bool, device=logits.device)
            for token in self.rules.forbidden:
                # the end must stay possible, or a text could never finish
                if token < size and token != end:
                    forbidden[:, token].fill_(True)  # an assignment would copy from the host
            forbidden[1, end].fill_(True)
            self.forbidden = forbidden
        # row 1 of the mask also forbids the end
        early = written + 1 < self.rules.min_length
        # masked before the softmax: the probabilities of the allowed tokens sum to one
        return logits.float().masked_fill(self.forbidden[int(early)], -torch.inf).log_softmax(-1)


def _decode_steps(
    model: Decoder,
    batch: Batch,
    rules: DecodingRules,
    features: Any,
    each: int,
    choose: Callable[[Float[Tensor, "b v"]], Int[Tensor, " b"]],
) -> GeneratedTexts:
    state, tokens = _begin(model, batch, rules, features, each)
    there = torch.ones_like(tokens, dtype=torch.bool)
    allowed, steps = _ConstrainedLogProbs(rules), list[_DecodingStep]()
    for n in range(rules.max_length):
        output, state = model.step(state, tokens)
        log_p = allowed(output.prediction, n)
        tokens = choose(log_p)
        gained = log_p.gather(1, tokens[:, None])[:, 0]
        steps.append(_DecodingStep(tokens, there, gained, output.attention))
        there = there & (tokens != rules.end)
        if _all_ended(there, n + 1):
            # steps that only added padding are cut, so results do not depend on SYNC_EVERY
            steps = steps[: _count_used(steps)]
            break
    return _collect_texts(steps, rules)


def _all_ended(there: Bool[Tensor, " b"], written: int) -> bool:
    """Return whether all texts have ended; checked rarely on a GPU, never during capture."""
    if there.is_cuda and (written % SYNC_EVERY or torch.cuda.is_current_stream_capturing()):
        return False
    return not bool(there.any())


def _all_beams_ended(done: Bool[Tensor, "b w"]) -> bool:
    """Return whether all beams have ended; not checked during CUDA graph capture."""
    capturing = done.is_cuda and torch.cuda.is_current_stream_capturing()
    return not capturing and bool(done.all())


def _count_used(steps: Sequence[_DecodingStep]) -> int:
    """Count the steps in which some text continued: the check on a GPU may come later."""
    return int(torch.stack([one.there.any() for one in steps]).sum())


def _backtrack(steps: Sequence[_DecodingStep], rows: Tensor | None = None) -> list[_DecodingStep]:
    """Return the steps that lead to the given rows of the last one, in their order."""
    found = []
    # each step knows the parent of its rows: follow them from the last step to the first
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


def _collect_texts(
    steps: Sequence[_DecodingStep], rules: DecodingRules, rows: Tensor | None = None
) -> GeneratedTexts:
    """Stack the steps along the paths that lead to `rows`."""
    steps = _backtrack(steps, rows)
    there = torch.stack([one.there for one in steps], dim=1)
    tokens = torch.stack([one.token for one in steps], dim=1)
    gained = torch.stack([one.gained for one in steps], dim=1)
    kinds = range(len(steps[0].attention))
    return GeneratedTexts(
        torch.where(there, tokens, rules.padding),
        there,
        # padding adds nothing to the log-probability of a text
        torch.where(there, gained, 0),
        tuple(_stack_queries([_step_attention(one, at) for one in steps], there) for at in kinds),
    )


def _step_attention(step: _DecodingStep, at: int) -> AttentionMap:
    found = step.attention[at]
    return found if step.rows is None else found.select(step.rows)


def _stack_queries(maps: Sequence[AttentionMap], there: Bool[Tensor, "b n"]) -> AttentionMap:
    """Stack maps of one query each; rows without a token are hidden and zero."""
    values = torch.cat([one.weights for one in maps], dim=3)
    visible = torch.cat([one.visible for one in maps], dim=1) & there[..., None]
    values = values.masked_fill(~there[:, None, None, :, None], 0)
    # one query per step: the axis of queries becomes the words of the text
    return AttentionMap(values, maps[-1].keys, words(len(maps)), visible, maps[-1].kind)


def _select_rows(texts: GeneratedTexts, rows: Tensor) -> GeneratedTexts:
    maps = tuple(one.select(rows) for one in texts.attention)
    return GeneratedTexts(texts.tokens[rows], texts.mask[rows], texts.log_probabilities[rows], maps)
