"""Grounded supervision: the step that teaches, what words should look at, and what is kept."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt import supervise
from overt.data.batch import Batch
from overt.data.scenes.pairs import PhraseLinks
from overt.models.vlbert.model import Understood, VLBert
from overt.models.vlbert.phrases import Phrases, grounded_phrases, pool, words_after
from overt.recipes.vgp.held import HeldTexts
from overt.recipes.vgp.recipe import Against, Keep, Supervise, Target, Way
from overt.supervise import Loss, Taught, grounding, heads, keeping
from overt.train import Losses, Progress

SEED = 5  # of placebos: the same for every run, so that runs differ in nothing else
SAMPLES = 64  # from which it is told which weights matter

Links = Callable[[Sequence[str]], PhraseLinks]


# --- what words should look at


def aimed(texts: HeldTexts, target: Target) -> HeldTexts:
    """The texts with the truth for a target, or with what stands in for it at the same price.

    A placebo has a target for the same tokens and over the same regions.
    """
    match target:
        case Target.TRUTH:
            return texts
        case Target.SHUFFLED:
            return replace(texts, wanted=shuffled(texts.wanted, texts.there, SEED))
        case Target.RANDOM:
            return replace(texts, wanted=drawn(texts.wanted, texts.there, SEED))
        case Target.UNIFORM:
            return replace(texts, wanted=even(texts.wanted, texts.there))


def shuffled(
    wanted: Float[Tensor, "n w m"], there: Bool[Tensor, "n m"], seed: int
) -> Float[Tensor, "n w m"]:
    """The regions of each image change places, for all of its words alike.

    Words of one phrase still look at the same regions, and as many of them; which, says nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(there.shape, generator=generator, dtype=torch.float64)
    order = order.to(there.device).masked_fill(~there, torch.inf).argsort(dim=1)
    own = (~there).to(torch.uint8).argsort(dim=1, stable=True)  # places of those that are there
    source = torch.empty_like(order).scatter(1, own, order)
    return wanted.gather(2, source[:, None].expand_as(wanted))


def drawn(
    wanted: Float[Tensor, "n w m"], there: Bool[Tensor, "n m"], seed: int
) -> Float[Tensor, "n w m"]:
    """A map for each word with a target, drawn evenly from all maps over the regions there are."""
    generator = torch.Generator().manual_seed(seed)
    amounts = torch.empty(wanted.shape).exponential_(generator=generator).to(wanted.device)
    return _instead(amounts, wanted, there)


def even(wanted: Float[Tensor, "n w m"], there: Bool[Tensor, "n m"]) -> Float[Tensor, "n w m"]:
    """All regions alike, for each word with a target."""
    return _instead(torch.ones_like(wanted), wanted, there)


def _instead(amounts: Tensor, wanted: Tensor, there: Tensor) -> Tensor:
    found = amounts * there[:, None]
    shares = found / found.sum(dim=-1, keepdim=True).clamp_min(1e-12)
    return torch.where((wanted > 0).any(dim=-1, keepdim=True), shares, 0)


# --- the step


@dataclass(frozen=True, eq=False)
class Lesson:
    """One step: which captions are right, how phrases are related, and where words look (eq. 9).

    `which` heads are supervised, where not all. What the step needs besides the network are the
    teachers of a `Taught`: a matcher, gates, the network as it was, or its anchor.
    """

    plan: Supervise
    links: Links
    against: Against
    which: Bool[Tensor, "l h"] | None = None

    def __call__(self, net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        """The losses of the network, each with its own count."""
        assert isinstance(net, Taught) and batch.labels is not None
        model = cast(VLBert, net.model)
        output = model(batch)
        losses = {"identify": supervise.classification(output.prediction, batch.labels)}
        links = self.links(batch.ids)
        if len(links.relation):
            first, second = (Phrases(links.sample, span) for span in (links.first, links.second))
            logits = model.relate(output, first, second)
            losses["relate"] = supervise.classification(logits, links.relation)
        looked = self.looked(net, output, batch)
        losses |= {name: self.plan.weight * one for name, one in looked.items()}
        if self.against.keep is not Keep.NOTHING:
            losses["keep"] = self.against.weight * self.kept(net, output, batch)
        return {"model": losses}

    def looked(self, net: Taught, output: Understood, batch: Batch) -> dict[str, Loss]:
        """How far attention is from its target, or final states from telling it."""
        assert output.seen is not None and output.features is not None
        assert batch.target is not None
        words = output.features.words
        block: grounding.Block = output.seen.log_block
        compare: grounding.Compare = supervise.cross_entropy
        match self.plan.way:
            case Way.NONE | Way.ORIGINAL:
                return {}
            case Way.INDIRECT | Way.SLIP:
                slip = self.plan.way is Way.SLIP
                return {"match": matched(cast(grounding.Match, net.matcher), output, batch, slip)}
            case Way.SEMI_DIRECT:
                block = grounding.rolled(output.seen.map())
            case Way.CHOSEN:
                assert self.which is not None
                compare = heads.on_heads(self.which)
            case Way.ANY:
                compare = heads.any_head(self.plan.temperature)
            case Way.LEARNED:
                compare = cast(grounding.Compare, net.gates)
            case Way.DIRECT:
                pass
        return grounding.direct(block, batch.target, compare, compare, words)

    def kept(self, net: Taught, output: Understood, batch: Batch) -> Loss:
        """How far the network has gone from what it was."""
        if self.against.keep is Keep.EWC:
            return cast(keeping.Anchor, net.anchor)(net.model)
        with torch.no_grad():
            before = cast(Resting, net.before)(batch)
        assert output.states is not None and output.features is not None
        assert before.states is not None
        return keeping.same_states(output.states, before.states, output.features.present)


def matched(match: grounding.Match, output: Understood, batch: Batch, slip: bool) -> Loss:
    """Whether final states tell which regions a phrase means (eq. 5).

    With the `slip` of the published code the states are those of the words after the phrase.
    """
    assert batch.target is not None and batch.region_mask is not None
    phrases, wanted = grounded_phrases(batch.target)
    text = output.text()
    read = words_after(phrases, text.shape[1]) if slip else phrases
    there = batch.region_mask[phrases.sample]
    return grounding.indirect(
        match, pool(text, read), output.regions()[phrases.sample], wanted, there
    )


# --- teachers


def teachers_of(
    net: VLBert, plan: Supervise, against: Against, batches: Callable[[], list[Batch]]
) -> dict[str, nn.Module]:
    """What a way of supervision needs beside the network; `batches` are those to learn it from."""
    found: dict[str, nn.Module] = {}
    sizes = net.sizes
    if plan.way in (Way.INDIRECT, Way.SLIP):
        found["matcher"] = grounding.Matcher(sizes.width)
    if plan.way is Way.LEARNED:
        found["gates"] = heads.Gates(sizes.layers, sizes.heads, plan.temperature)
    if against.keep is Keep.DISTIL:
        before = copy.deepcopy(net).eval().requires_grad_(False)
        found["before"] = Resting(before)
    if against.keep is Keep.EWC:
        found["anchor"] = keeping.Anchor(net, importance(net, batches()))
    return found


class Resting(nn.Module):
    """A network that stays as it is and never drops anything, whatever it is part of."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def train(self, mode: bool = True) -> "Resting":
        """Stay at rest."""
        return super().train(False)

    def forward(self, batch: Batch) -> Understood:
        """What the network makes of a batch."""
        return cast(Understood, self.net(batch))


def importance(net: VLBert, batches: list[Batch]) -> dict[str, Tensor]:
    """How much each weight matters for what the network says of captions, by its own belief."""
    training = net.training
    net.eval()
    generator = torch.Generator(device=net.word.weight.device).manual_seed(SEED)

    def score(model: nn.Module, batch: Batch) -> Tensor:
        return keeping.drawn(model(batch).prediction, generator)

    try:
        with torch.enable_grad():
            return keeping.fisher(net, batches, score)
    finally:
        net.train(training)
