"""Models that answer by a planted rule of a few cells, so that the truthful map is known.

An image has 4 x 4 cells. The evidence of a sample is -1 or 1; other cells are noise that no rule
reads, except for random labels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.geometry import PixelGeometry
from overt.nn.cnn import ImageFeatures
from overt.nn.output import Output
from overt.testing.toys import PlantedCell, toy_batch

SIDE, FIRST, SECOND, FAR = 4, 5, 10, 3  # cells of evidence, and one that the model ignores
CELLS = SIDE * SIDE
NOISE = 0.05  # share of random weight in every map, which breaks ties
Values = Float[Tensor, "b k"]
Rule = Callable[[Values], Float[Tensor, " b"]]


@dataclass(frozen=True, eq=False)
class PlantedRule:
    """A rule from the values of cells to a score, and what is true about it.

    Args:
        name: The name of the rule.
        rule: Returns the score of each sample; a removed cell has the value 0.
        truth: Returns how much each cell decides.
        annotated: The cells that a person would mark.
        evidence: The cells that hold the evidence of the sample.
        strength: The size of the value of a cell that no rule reads, relative to the evidence.
        rivals: Maps that are wrong by construction, as cells with equal weight.

    Example:
        >>> one = planted_rules(0)[0]
        >>> one.name, one.rule(torch.eye(16)[[5]]).tolist()
        ('one cell', [1.0])
    """

    name: str
    rule: Rule
    truth: Callable[[Values], Values]
    annotated: tuple[int, ...]
    evidence: tuple[int, ...]
    strength: float = 1.0
    rivals: Mapping[str, tuple[int, ...]] | None = None


def planted_rules(seed: int) -> tuple[PlantedRule, ...]:
    """Return the six rules; the weights of random labels depend on the seed.

    Args:
        seed: Seed of the weights of "random labels".

    Returns:
        "one cell"; "or", where each of two cells suffices; "and", where both are needed;
        "shortcut", where people mark another cell with the same value; "distractor", where an
        ignored cell is much stronger; "random labels", where all cells count by random weights.

    Example:
        >>> [rule.name for rule in planted_rules(0)]
        ['one cell', 'or', 'and', 'shortcut', 'distractor', 'random labels']
    """
    both = (FIRST, SECOND)
    weights = torch.randn(CELLS, generator=torch.Generator().manual_seed(seed))
    return (
        PlantedRule("one cell", lambda x: x[:, FIRST], _even(FIRST), (FIRST,), (FIRST,)),
        PlantedRule(
            "or", _either, _even(*both), both, both, rivals={"one of two": (FIRST,)}
        ),
        PlantedRule("and", _both, _even(*both), both, both, rivals={"one of two": (FIRST,)}),
        PlantedRule(
            "shortcut", lambda x: x[:, FIRST], _even(FIRST), (SECOND,), both,
            rivals={"annotated": (SECOND,), "both": both},
        ),
        PlantedRule(
            "distractor", lambda x: x[:, FIRST], _even(FIRST), (FIRST,), (FIRST,), 3.0,
            rivals={"strong cell": (FAR,)},
        ),
        PlantedRule(
            "random labels", lambda x: x @ weights.to(x), lambda x: (x * weights).abs(),
            (FIRST,), (FIRST,), rivals={"annotated": (FIRST,)},
        ),
    )  # fmt: skip


class RuleModel(nn.Module):
    """A model of batches that answers by a planted rule.

    Args:
        rule: The rule.
        shown: The map that it returns as its attention.
        gain: The scale of the logits.

    Example:
        >>> rule = planted_rules(0)[0]
        >>> batch, maps = planted_samples(rule, 2, 0)
        >>> RuleModel(rule, maps["truthful"])(batch).prediction.shape
        torch.Size([2, 2])
    """

    def __init__(self, rule: PlantedRule, shown: AttentionMap, gain: float = 3.0) -> None:
        super().__init__()
        self.rule, self.shown = rule, shown
        self.cells = PlantedCell((SIDE, SIDE))
        self.gain = nn.Parameter(torch.tensor(gain))

    def encode(self, batch: Batch) -> ImageFeatures:
        """Return the value of every cell."""
        return self.cells.encode(batch)

    def decide(self, features: ImageFeatures, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Answer by the rule."""
        score = self.gain * self.rule.rule(features.masked(mask)[..., 0])
        rows = torch.arange(len(score)) % len(self.shown)
        return Output(torch.stack([-score, score], dim=-1), (self.shown.select(rows),))

    def forward(self, batch: Batch) -> Output:
        """Answer by the rule."""
        return self.decide(self.encode(batch))


def planted_samples(
    rule: PlantedRule, count: int, seed: int
) -> tuple[Batch, dict[str, AttentionMap]]:
    """Draw samples of a rule, with the truthful map first and then maps that are wrong.

    Wrong are: "half", truthful for every second sample; "values", the size of each cell's value;
    "even"; "noise"; and those of the rule.

    Args:
        rule: The rule.
        count: The number of samples.
        seed: Seed of the samples and maps.

    Returns:
        The samples, with the annotated cells as target, and the maps.

    Example:
        >>> _, maps = planted_samples(planted_rules(0)[1], 4, 0)
        >>> list(maps)
        ['truthful', 'half', 'values', 'even', 'noise', 'one of two']
    """
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, (count, 1), generator=generator) * 2.0 - 1
    values = rule.strength * torch.randn(count, CELLS, generator=generator).clamp(-1.5, 1.5)
    values[:, list(rule.evidence)] = sign
    images = values.reshape(count, 1, SIDE, SIDE).expand(-1, 3, -1, -1)
    images = images.repeat_interleave(2, 2).repeat_interleave(2, 3)
    keys = grid(SIDE, SIDE, geometry=PixelGeometry.identity(count, (2 * SIDE, 2 * SIDE)))
    marked = torch.zeros(count, CELLS)
    marked[:, list(rule.annotated)] = 1
    batch = replace(
        toy_batch(count), tokens=None, token_mask=None, text=None, images=images, image_of=None,
        geometry=PixelGeometry.identity(count, (2 * SIDE, 2 * SIDE)),
        labels=(rule.rule(values) > 0).long(), target=AttentionMap.from_coverage(marked, keys),
    )  # fmt: skip
    truth = rule.truth(values)
    random = torch.rand(count, CELLS, generator=generator)
    even = (torch.arange(count) % 2 == 0)[:, None]
    cells = {
        "truthful": truth,
        "half": torch.where(even, truth / truth.sum(dim=1, keepdim=True), random / CELLS),
        "values": values.abs(),
        "even": torch.ones(count, CELLS),
        "noise": random,
    }
    for name, chosen in (rule.rivals or {}).items():
        cells[name] = torch.zeros(count, CELLS)
        cells[name][:, list(chosen)] = 1
    maps = {}
    for name, one in cells.items():
        shares = one / one.sum(dim=1, keepdim=True)
        noise = torch.rand(count, CELLS, generator=generator)
        mixed = (1 - NOISE) * shares + NOISE * noise / noise.sum(dim=1, keepdim=True)
        maps[name] = AttentionMap.from_cells(mixed, keys).normalize()
    return batch, maps


def _even(*cells: int) -> Callable[[Values], Values]:
    """Return a function that gives these cells equal weight."""

    def truth(values: Values) -> Values:
        found = torch.zeros_like(values)
        found[:, list(cells)] = 1 / len(cells)
        return found

    return truth


def _either(values: Values) -> Float[Tensor, " b"]:
    """Return the evidence if at least one cell has it."""
    return (values[:, FIRST] + values[:, SECOND]).clamp(-1, 1)


def _both(values: Values) -> Float[Tensor, " b"]:
    """Return the evidence if both cells have it: the smaller value, with its sign."""
    first, second = values[:, FIRST], values[:, SECOND]
    total = first + second
    return 0.5 * (total.abs() - (first - second).abs()) * total.sign()
