"""Attending Self-Attention: the supervised step, its targets, and regularization."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from overt.data.batch import Batch
from overt.data.scenes.caption_pairs import PhraseLinks
from overt.losses import (
    Loss,
    SupervisedModel,
    classification,
    cross_entropy,
    forgetting,
    grounding,
    head_selection,
)
from overt.nn.vlbert.model import VLBert, VLBertOutput
from overt.nn.vlbert.phrases import PhraseSpans, following_tokens, grounded_phrases, pool_phrases
from overt.papers.vgp.config import (
    INDIRECT,
    VgpForgetting,
    VgpMatcher,
    VgpMethod,
    VgpRegionLoss,
    VgpRegularizer,
    VgpSupervise,
    VgpTarget,
)
from overt.papers.vgp.in_memory import TextsInMemory
from overt.train import Losses, Progress

SEED = 5  # of placebos: the same for every run, so that runs only differ in training
FISHER_SAMPLES = 64  # to estimate the Fisher information from

FindLinks = Callable[[Sequence[str]], PhraseLinks]


# --- targets


def with_targets(texts: TextsInMemory, target: VgpTarget) -> TextsInMemory:
    """Return the texts with the ground truth as the target, or a placebo of the same cost.

    A placebo has a target for the same tokens and over the same regions.
    """
    match target:
        case VgpTarget.TRUTH:
            return texts
        case VgpTarget.SHUFFLED:
            return replace(texts, wanted=shuffle_regions(texts.wanted, texts.there, SEED))
        case VgpTarget.RANDOM:
            return replace(texts, wanted=random_targets(texts.wanted, texts.there, SEED))
        case VgpTarget.UNIFORM:
            return replace(texts, wanted=uniform_targets(texts.wanted, texts.there))


def shuffle_regions(
    wanted: Float[Tensor, "n w m"], there: Bool[Tensor, "n m"], seed: int
) -> Float[Tensor, "n w m"]:
    """Permute the regions of each image, the same way for all of its words.

    Words of one phrase still share their regions, and their number, but not which ones.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(there.shape, generator=generator, dtype=torch.float64)
    # Regions that are absent are sorted to the end of both orders, so the others change places
    # among themselves.
    order = order.to(there.device).masked_fill(~there, torch.inf).argsort(dim=1)
    own = (
        (~there).to(torch.uint8).argsort(dim=1, stable=True)
    )  # positions of the regions that are present
    source = torch.empty_like(order).scatter(1, own, order)
    return wanted.gather(2, source[:, None].expand_as(wanted))


def random_targets(
    wanted: Float[Tensor, "n w m"], there: Bool[Tensor, "n m"], seed: int
) -> Float[Tensor, "n w m"]:
    """Draw a map for each word with a target, uniformly from all maps over the regions present."""
    generator = torch.Generator().manual_seed(seed)
    # Exponential draws, divided by their sum, are uniform over all distributions.
    amounts = torch.empty(wanted.shape).exponential_(generator=generator).to(wanted.device)
    return _replace_targets(amounts, wanted, there)


def uniform_targets(
    wanted: Float[Tensor, "n w m"], there: Bool[Tensor, "n m"]
) -> Float[Tensor, "n w m"]:
    """Return the uniform map over regions for each word with a target."""
    return _replace_targets(torch.ones_like(wanted), wanted, there)


def _replace_targets(amounts: Tensor, wanted: Tensor, there: Tensor) -> Tensor:
    found = amounts * there[:, None]
    shares = found / found.sum(dim=-1, keepdim=True).clamp_min(1e-12)
    return torch.where((wanted > 0).any(dim=-1, keepdim=True), shares, 0)


# --- step


@dataclass(frozen=True, eq=False)
class VgpStep:
    """A training step: caption identification, phrase relations, and attention of words (eq. 9).

    `which` are the supervised heads, if not all. `dropout` is that of the weights that are
    supervised, which is zero unless the published code is followed. The modules that the step needs
    besides the network belong to the `SupervisedModel`: a matcher, gates, the original network, or
    its anchor.
    """

    plan: VgpSupervise
    links: FindLinks
    against: VgpForgetting
    which: Bool[Tensor, "l h"] | None = None
    dropout: float = 0.0

    def __call__(self, net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        """Return the losses of the network, each with its own count."""
        assert isinstance(net, SupervisedModel) and batch.labels is not None
        model = cast(VLBert, net.model)
        output = model(batch)
        losses = {"identify": classification(output.prediction, batch.labels)}
        links = self.links(batch.ids)
        if len(links.relation):
            first, second = (
                PhraseSpans(links.sample, span) for span in (links.first, links.second)
            )
            logits = model.relate(output, first, second)
            losses["relate"] = classification(logits, links.relation)
        attention = self.attention_losses(net, output, batch)
        losses |= {name: self.plan.weight * one for name, one in attention.items()}
        if self.against.keep is not VgpRegularizer.NOTHING:
            losses["keep"] = self.against.weight * self.regularization(net, output, batch)
        return {"model": losses}

    def attention_losses(
        self, net: SupervisedModel, output: VLBertOutput, batch: Batch
    ) -> dict[str, Loss]:
        """Return the loss of attention, or of final states, against the target."""
        assert output.trace is not None and output.features is not None
        assert batch.target is not None
        words = output.features.words
        # Renormalized over the regions in log space: no small shares are divided.
        block: grounding.Block = output.trace.log_block
        compare: grounding.MapLoss = cross_entropy
        onto_text: grounding.MapLoss | None = None
        if self.dropout:
            block, compare = (
                grounding.drop_blocks(block, self.dropout),
                grounding.floored_cross_entropy,
            )
        if self.plan.region_loss is VgpRegionLoss.BCE:
            onto_text = grounding.bce_on_log_weights
        match self.plan.way:
            case VgpMethod.NONE | VgpMethod.ORIGINAL:
                return {}
            case VgpMethod.INDIRECT | VgpMethod.SLIP:
                slip = self.plan.way is VgpMethod.SLIP
                return {
                    "match": match_loss(cast(grounding.Match, net.matcher), output, batch, slip)
                }
            case VgpMethod.SEMI_DIRECT:
                whole = output.trace.map()
                if self.dropout:
                    whole = grounding.drop_weights(whole, self.dropout)
                block = grounding.rollout_blocks(whole)
            case VgpMethod.CHOSEN:
                assert self.which is not None
                compare = head_selection.on_selected_heads(self.which, compare)
                if onto_text is not None:
                    onto_text = head_selection.on_selected_heads(self.which, onto_text)
            case VgpMethod.ANY:
                compare = head_selection.soft_minimum_over_heads(self.plan.temperature)
            case VgpMethod.LEARNED:
                compare = cast(grounding.MapLoss, net.gates)
            case VgpMethod.DIRECT:
                pass
        return grounding.direct_supervision(
            block, batch.target, compare, onto_text or compare, words
        )

    def regularization(self, net: SupervisedModel, output: VLBertOutput, batch: Batch) -> Loss:
        """Return the distance of the network from its start."""
        if self.against.keep is VgpRegularizer.EWC:
            return cast(forgetting.ElasticWeightConsolidation, net.anchor)(net.model)
        with torch.no_grad():
            before = cast(FrozenTeacher, net.before)(batch)
        assert output.states is not None and output.features is not None
        assert before.states is not None
        return forgetting.feature_distillation(
            output.states, before.states, output.features.present
        )


def match_loss(match: grounding.Match, output: VLBertOutput, batch: Batch, slip: bool) -> Loss:
    """Compute the loss of predicting the regions of a phrase from final states (eq. 5).

    With the `slip` of the published code the states are those of the words after the phrase.
    """
    assert batch.target is not None and batch.region_mask is not None
    phrases, wanted = grounded_phrases(batch.target)
    text = output.text()
    read = following_tokens(phrases, text.shape[1]) if slip else phrases
    there = batch.region_mask[phrases.sample]
    return grounding.indirect_supervision(
        match, pool_phrases(text, read), output.regions()[phrases.sample], wanted, there
    )


# --- modules


MakeScore = Callable[[torch.Generator], forgetting.Score[Batch]]


def prediction_score(generator: torch.Generator) -> forgetting.Score[Batch]:
    """Return the log-likelihood of labels sampled from the predictions."""

    def score(model: nn.Module, batch: Batch) -> Tensor:
        return forgetting.sampled_log_likelihood(model(batch).prediction, generator)

    return score


def supervision_modules(
    net: VLBert,
    plan: VgpSupervise,
    against: VgpForgetting,
    batches: Callable[[], list[Batch]],
    make_score: MakeScore = prediction_score,
) -> dict[str, nn.Module]:
    """Build the modules that a method needs.

    `batches` and `make_score` estimate how important each weight was for the earlier training.
    """
    found: dict[str, nn.Module] = {}
    sizes = net.sizes
    if plan.way in INDIRECT:
        found["matcher"] = build_matcher(plan.matcher, sizes.width)
    if plan.way is VgpMethod.LEARNED:
        found["gates"] = head_selection.HeadGates(sizes.layers, sizes.heads, plan.temperature)
    if against.keep is VgpRegularizer.DISTIL:
        before = copy.deepcopy(net).eval().requires_grad_(False)
        found["before"] = FrozenTeacher(before)
    if against.keep is VgpRegularizer.EWC:
        found["anchor"] = forgetting.ElasticWeightConsolidation(
            net, fisher_importance(net, batches(), make_score)
        )
    return found


def build_matcher(kind: VgpMatcher, width: int) -> nn.Module:
    """Build the classifier of pairs of phrase and region."""
    match kind:
        case VgpMatcher.LINEAR:
            return grounding.PhraseRegionMatcher(width)
        case VgpMatcher.BILINEAR:
            return grounding.BilinearMatcher(width)
        case VgpMatcher.MLP:
            return grounding.MLPMatcher(width)


class FrozenTeacher(nn.Module):
    """A network that always stays in eval mode, whatever it is part of."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def train(self, mode: bool = True) -> "FrozenTeacher":
        """Stay in eval mode."""
        return super().train(False)

    def forward(self, batch: Batch) -> VLBertOutput:
        """Return the output of the network."""
        return cast(VLBertOutput, self.net(batch))


def fisher_importance(
    net: VLBert, batches: list[Batch], make_score: MakeScore = prediction_score
) -> dict[str, Tensor]:
    """Estimate the Fisher information of each weight, with labels sampled from the predictions."""
    training = net.training
    net.eval()
    generator = torch.Generator(device=net.word.weight.device).manual_seed(SEED)

    try:
        with torch.enable_grad():
            return forgetting.fisher_diagonal(net, batches, make_score(generator))
    finally:
        net.train(training)
