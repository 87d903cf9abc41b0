"""The attention of "Learn To Pay Attention" on a backbone that somebody else has trained.

`attach(backbone, classes=10)` reads the cells of some of its modules from outside, scores them
against the whole image and classifies from the weighted sums alone
(`overt.models.paying.attention`). The backbone is not changed: there is no hook on it between two
passes, and `detach` gives it back.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from overt.attention import grid
from overt.capture.positions.embedded import photos_of
from overt.capture.positions.grids import Size, fitted
from overt.capture.resting import still
from overt.data.batch import Batch
from overt.geometry import PixelGeometry
from overt.models import pretrained
from overt.models.attaching.backbones import (
    PROCESSOR,
    Numbers,
    describe,
    normalised,
    numbers_of,
    processor_settings,
    read_processor,
    rebuild,
    run_backbone,
    usual_size,
)
from overt.models.attaching.levels import (
    Features,
    Level,
    Order,
    Run,
    find_levels,
    named_levels,
    number_format,
    returning,
)
from overt.models.cnn import Cells
from overt.models.output import Output
from overt.models.paying.attention import (
    DECISIONS,
    SCORES,
    AttentionClassifier,
    Decision,
    Levels,
    Score,
    additive,
    concat,
)
from overt.models.paying.vgg import images_of, name_in


class Whole(nn.Module):
    """The query g of a pretrained backbone: its class token, or the mean of its last cells.

    A layer norm, as these have any size, and the linear layer that the paper has too.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, last: Features) -> Float[Tensor, "i d"]:
        """One vector an image."""
        whole = last.cells.mean(dim=(-2, -1)) if last.token is None else last.token
        return self.linear(self.norm(whole))


class Attached(nn.Module):
    """A backbone that classifies by what it attends to at its levels; `attach` makes one.

    Two departures from the paper, for backbones that were not trained with this head. The cells of
    a level pass a batch norm first: some channels of a ViT are far larger than the others, and a
    score would see nothing else. And the query is made of the class token,
    or of the mean of the last cells, not by more convolutions.
    """

    def __init__(
        self,
        backbone: nn.Module,
        levels: tuple[Level, ...],
        classes: int,
        score: Score = additive,
        decision: Decision = concat,
        dropout: float = 0.1,
        run: Run = run_backbone,
        processor: Any = None,
    ) -> None:
        super().__init__()
        if not levels:
            raise ValueError("attention needs a level at least to stand at")
        if classes < 1:
            raise ValueError(f"{classes} classes leave nothing to answer; give one at least")
        self.backbone, self.levels = backbone, levels
        self.classes, self.dropout = classes, dropout
        self.score, self.decide_by, self.run = score, decision, run
        self.processor = processor
        self.numbers: Numbers | None = numbers_of(backbone, processor)
        self.frozen = False
        self.found = {name: value.requires_grad for name, value in backbone.named_parameters()}
        self.modes = {name: module.training for name, module in backbone.named_modules()}
        widths = [level.width for level in levels]
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths)
        self.classify = AttentionClassifier(classes, widths, widths[-1], score, decision, dropout)
        self.query = Whole(widths[-1]) if self.classify.asks else None

    # --- from images to classes

    def encode(self, batch: Any) -> Levels:
        """The cells of every level, and the query.

        A batch is a `Batch` with images, or a mapping with "pixel_values" as a processor gives it.
        The photos of these, or their sizes, may stand under "images": with the processor they give
        each cell its pixels.
        """
        images, image_of, geometry = self._given(batch)
        canvas: Size = (images.shape[-2], images.shape[-1])
        kind = number_format(self.norms)  # a backbone may be in sixteen bits
        found = [one.to(kind) for one in self.look_through(images)]
        query = None
        if self.query is not None:
            query = self.query(found[-1])
            query = query if image_of is None else query[image_of]
        cells = []
        for level, norm, one in zip(self.levels, self.norms, found, strict=True):
            values = rearrange(norm(one.cells.flatten(2)), "i d k -> i k d")
            here = fitted(geometry, canvas, level.covered(one.grid, canvas))
            layout = grid(*one.grid, geometry=here)
            cells.append(Cells(values if image_of is None else values[image_of], layout))
        return Levels(tuple(cells), query)

    def decide(self, features: Levels, mask: Mapping[str, Tensor] | None = None) -> Output:
        """Classes, and one map a level, in the order of the levels.

        A mask over the grid of one level acts on all: what it removes is removed at every scale.
        """
        return self.classify(features, mask)

    def forward(self, batch: Any = None, /, **inputs: Any) -> Output:
        """Classes of a batch of images, or of the keywords of one."""
        return self.decide(self.encode(inputs if batch is None else batch))

    def descriptor(self, features: Levels) -> Float[Tensor, "b s"]:
        """What the classifier decides from."""
        summaries, _ = self.classify.look(features)
        return torch.cat(summaries, dim=1)

    def look_through(self, images: Shaped[Tensor, "i 3 y x"]) -> list[Features]:
        """What the backbone has at each level, before any norm."""
        pixels = normalised(images, number_format(self.backbone), self.numbers)
        canvas: Size = (images.shape[-2], images.shape[-1])
        paths = [level.path for level in self.levels]
        with self._as_asked(), returning(self.backbone, list(dict.fromkeys(paths))) as kept:
            self.run(self.backbone, pixels)
        return [
            level.read(kept[path], canvas) for level, path in zip(self.levels, paths, strict=True)
        ]

    def _given(
        self, batch: Any
    ) -> tuple[Shaped[Tensor, "i 3 y x"], Int[Tensor, " b"] | None, PixelGeometry | None]:
        """Images, whose they are, and where their pixels come from, a row a sample."""
        if isinstance(batch, Batch):
            return images_of(batch), batch.image_of, batch.sample_geometry
        if not isinstance(batch, Mapping) or "pixel_values" not in batch:
            raise ValueError(
                "an attached model takes a Batch with images, or a mapping with pixel_values"
            )
        photos = batch.get("images")
        geometry = None if photos is None else photos_of(self.processor, photos).alone()
        return batch["pixel_values"], None, geometry

    @contextmanager
    def _as_asked(self) -> Iterator[None]:
        """A frozen backbone runs in eval mode: no dropout, and the statistics of norms stay."""
        if not self.frozen:
            yield
            return
        with still(self.backbone):
            yield

    # --- the backbone: trained, frozen, given back

    def freeze(self) -> "Attached":
        """Train the attention alone: the backbone keeps its weights and its statistics."""
        self.frozen = True
        self.backbone.requires_grad_(False)
        return self

    def thaw(self) -> "Attached":
        """Train the backbone too, but for what needed no gradient when it was attached."""
        self.frozen = False
        for name, value in self.backbone.named_parameters():
            value.requires_grad_(self.found.get(name, True))
        return self

    def detach(self) -> nn.Module:
        """The backbone as it was found: what needs a gradient, and the mode of every module.

        Weights that were trained stay as they are now.
        """
        self.thaw()
        for name, module in self.backbone.named_modules():
            module.training = self.modes.get(name, module.training)
        return self.backbone

    # --- on disk

    def config(self) -> dict[str, Any]:
        """The values this model was made with."""
        return {
            "kind": KIND,
            "backbone": describe(self.backbone),
            "levels": [
                {**vars(level), "order": level.order.value, "stride": level.stride}
                for level in self.levels
            ],
            "classes": self.classes,
            "score": name_in(SCORES, self.score, "score"),
            "decision": name_in(DECISIONS, self.decide_by, "decision"),
            "dropout": self.dropout,
            "numbers": self.numbers,
            "frozen": self.frozen,
        }

    def save_pretrained(self, folder: Path | str) -> None:
        """Write config.json, the weights of backbone and attention, and the processor's settings.

        Weights are saved by their names, so a module of your own needs to be given to
        `from_pretrained` again, and so does a function that runs it.
        """
        settings = processor_settings(self.processor)
        beside = {} if settings is None else {PROCESSOR: settings}
        pretrained.save(self, folder, beside)

    @classmethod
    def from_pretrained(
        cls, folder: Path | str, backbone: nn.Module | None = None, run: Run = run_backbone
    ) -> "Attached":
        """Read a model written by `save_pretrained`, onto a `backbone` of your own where given."""

        def build(config: Mapping[str, Any]) -> "Attached":
            made = cls(
                rebuild(config["backbone"]) if backbone is None else backbone,
                tuple(_level(one) for one in config["levels"]),
                config["classes"],
                SCORES[config["score"]],
                DECISIONS[config["decision"]],
                config["dropout"],
                run,
                read_processor(Path(folder)),
            )
            if config["numbers"] is not None:
                mean, spread = config["numbers"]
                made.numbers = tuple(mean), tuple(spread)
            return made.freeze() if config["frozen"] else made

        return pretrained.load(build, folder)


KIND = "attached"  # what config.json says, so that a folder is known by it


def attach(
    backbone: nn.Module,
    classes: int,
    levels: Sequence[str | Level] | None = None,
    score: Score = additive,
    decision: Decision = concat,
    dropout: float = 0.1,
    run: Run = run_backbone,
    processor: Any = None,
    size: Size | None = None,
) -> Attached:
    """Attention on a backbone that is trained already, in one line.

    `levels` are the paths of modules in it, the first level first; a `Level` says what cannot be
    recognised. Without them the last three resolutions are taken, or three blocks of a ViT. The
    backbone runs once on blank images of `size`, or of the size it was made for, to see what its
    modules return. `run(backbone, pixels)` runs it where it wants more than pixels. A `processor`
    says how it wants bytes, and with photos where their pixels are.

    All weights are trained; `attach(...).freeze()` trains the attention alone.
    """
    if not isinstance(backbone, nn.Module):
        raise TypeError(
            f"attach takes a torch.nn.Module, and this is of type {type(backbone).__name__}"
        )
    if isinstance(levels, str):
        raise TypeError(f"levels is a list, also of one: levels=[{levels!r}]")
    canvas = usual_size(backbone) if size is None else size
    if levels is None:
        chosen = find_levels(backbone, run, canvas)
    else:
        chosen = named_levels(backbone, run, canvas, levels)
    made = Attached(backbone, chosen, classes, score, decision, dropout, run, processor)
    first = next(backbone.parameters(), None)
    return made if first is None else made.to(first.device)


def _level(config: Mapping[str, Any]) -> Level:
    stride = config["stride"]
    return Level(
        **{
            **config,
            "order": Order(config["order"]),
            "stride": None if stride is None else (int(stride[0]), int(stride[1])),
        }
    )
