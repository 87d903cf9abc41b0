"""Attention of "Learn To Pay Attention" on a pretrained backbone.

`attach(backbone, classes=10)` reads grid cells from some of its modules with hooks, scores them
against the whole image, and classifies from the weighted sums alone
(`overt.nn.learned_attention.attention`). The backbone is not changed: hooks exist only during a
forward pass, and `detach` returns it.
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
from overt.capture.eval_mode import eval_mode
from overt.capture.layouts.image_tokens import batch_images
from overt.capture.layouts.patch_grids import Size, crop_to_grid
from overt.data.batch import Batch
from overt.geometry import PixelGeometry
from overt.nn import checkpoint
from overt.nn.backbone_attention.backbones import (
    PROCESSOR,
    PixelStats,
    build_model,
    describe_model,
    input_channels,
    input_size,
    normalize_images,
    pixel_stats,
    processor_settings,
    read_processor,
    run_backbone,
)
from overt.nn.backbone_attention.feature_levels import (
    AxisOrder,
    FeatureLevel,
    LevelFeatures,
    RunBackbone,
    capture_outputs,
    find_levels,
    named_levels,
    parameter_dtype,
)
from overt.nn.cnn import ImageFeatures
from overt.nn.learned_attention.attention import (
    CLASSIFIERS,
    SCORES,
    AttentionClassifier,
    MakeClassifier,
    MakeCompatibility,
    MultiLevelFeatures,
    additive_score,
    concat_levels,
    registered_name,
    require_images,
)
from overt.nn.output import Output


class GlobalQuery(nn.Module):
    """Query g of a pretrained backbone: its class token, or the mean of its last cells.

    A layer norm, because these features have any scale, then the linear layer of the paper.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, last: LevelFeatures) -> Float[Tensor, "i d"]:
        """Return one vector per image."""
        # the mean of the last cells is what a CNN classifies from
        whole = last.cells.mean(dim=(-2, -1)) if last.token is None else last.token
        return self.linear(self.norm(whole))


class AttachedAttention(nn.Module):
    """Classifier with attention at several levels of a backbone; made by `attach`.

    Two departures from the paper, for backbones that were not trained with this head. The cells of
    a level pass a batch norm first: some channels of a ViT are much larger than the others and
    would dominate the scores. And the query is made from the class token or the mean of the last
    cells, not by more convolutions. `attach` finds the levels.

    Args:
        backbone: a CNN or ViT.
        levels: modules of the backbone that return grid cells, lowest first.
        classes: number of classes.
        score: makes the compatibility of a level.
        decision: makes the classifier over the levels.
        dropout: dropout before each linear layer.
        run: runs the backbone on pixels.
        processor: image processor, for normalisation and for the pixels of each cell.

    Raises:
        ValueError: `levels` is empty, or `classes` is below 1.

    Example:
        >>> cnn = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1))
        >>> model = attach(cnn, classes=5, levels=["1", "2"], size=(16, 16)).freeze()
        >>> any(one.requires_grad for one in model.backbone.parameters())
        False
        >>> model({"pixel_values": torch.rand(2, 3, 16, 16)}).prediction.shape
        torch.Size([2, 5])
        >>> model.detach() is cnn
        True
    """

    def __init__(
        self,
        backbone: nn.Module,
        levels: tuple[FeatureLevel, ...],
        classes: int,
        score: MakeCompatibility = additive_score,
        decision: MakeClassifier = concat_levels,
        dropout: float = 0.1,
        run: RunBackbone = run_backbone,
        processor: Any = None,
    ) -> None:
        super().__init__()
        if not levels:
            raise ValueError("levels is empty: expected at least one level")
        if classes < 1:
            raise ValueError(f"classes must be 1 or more, got {classes}")
        self.backbone, self.levels = backbone, levels
        self.classes, self.dropout = classes, dropout
        self.score, self.decide_by, self.run = score, decision, run
        self.processor = processor
        self.numbers: PixelStats | None = pixel_stats(backbone, processor)
        self.frozen = False
        # the backbone as it was, so that `detach` can restore it
        self.found = {name: value.requires_grad for name, value in backbone.named_parameters()}
        self.modes = {name: module.training for name, module in backbone.named_modules()}
        widths = [level.width for level in levels]
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths)
        self.classify = AttentionClassifier(classes, widths, widths[-1], score, decision, dropout)
        # a score without a query gets no query layers: they would never have a gradient
        self.query = GlobalQuery(widths[-1]) if self.classify.takes_query else None

    # --- inference

    def encode(self, batch: Any) -> MultiLevelFeatures:
        """Return the cells of every level and the query.

        Args:
            batch: a `Batch` with images, a tensor of images, or a mapping with "pixel_values" from
                a processor. The mapping may contain the original images or their sizes as "images";
                with the processor they give each cell its pixels.
        """
        images, image_of, geometry = self._unpack(batch)
        canvas: Size = (images.shape[-2], images.shape[-1])
        kind = parameter_dtype(self.norms)  # the backbone may be in 16 bits
        found = [one.to(kind) for one in self.backbone_features(images)]
        query = None
        if self.query is not None:
            query = self.query(found[-1])
            # computed per image, then repeated for samples that share it
            query = query if image_of is None else query[image_of]
        cells = []
        for level, norm, one in zip(self.levels, self.norms, found, strict=True):
            # BatchNorm1d takes (image, feature, cell): statistics are over all cells of the batch
            values = rearrange(norm(one.cells.flatten(2)), "i d k -> i k d")
            # a convolution may drop the last pixels of the canvas: cells then cover less than all
            # of it
            here = crop_to_grid(geometry, canvas, level.covered(one.grid, canvas))
            layout = grid(*one.grid, geometry=here)
            cells.append(ImageFeatures(values if image_of is None else values[image_of], layout))
        return MultiLevelFeatures(tuple(cells), query)

    def decide(
        self, features: MultiLevelFeatures, mask: Mapping[str, Tensor] | None = None
    ) -> Output:
        """Return the classes and one map per level, in the order of the levels.

        A mask over the grid of one level applies to all levels.
        """
        return self.classify(features, mask)

    def forward(self, batch: Any = None, /, **inputs: Any) -> Output:
        """Classify a batch or a tensor of images, or keyword inputs.

        Raises:
            TypeError: Keyword inputs were given with a batch; nothing would read them.
        """
        if batch is not None and inputs:
            raise TypeError(
                f"expected a batch or keyword inputs, got both, with {sorted(inputs)}: put "
                "geometry into the batch, as in Batch(ids, images=images, geometry=geometry)"
            )
        return self.decide(self.encode(inputs if batch is None else batch))

    def descriptor(self, features: MultiLevelFeatures) -> Float[Tensor, "b s"]:
        """Return the features that the classifier gets."""
        summaries, _ = self.classify.attend_levels(features)
        return torch.cat(summaries, dim=1)

    def backbone_features(self, images: Shaped[Tensor, "i c y x"]) -> list[LevelFeatures]:
        """Return the features of the backbone at each level, before any norm."""
        pixels = normalize_images(images, parameter_dtype(self.backbone), self.numbers)
        canvas: Size = (images.shape[-2], images.shape[-1])
        paths = [level.path for level in self.levels]
        with (
            self._backbone_mode(),
            # several levels may be outputs of one module: hook it once, in the order of the levels
            capture_outputs(self.backbone, list(dict.fromkeys(paths))) as kept,
        ):
            self.run(self.backbone, pixels)
        return [
            level.read(kept[path], canvas) for level, path in zip(self.levels, paths, strict=True)
        ]

    def _unpack(
        self, batch: Any
    ) -> tuple[Shaped[Tensor, "i c y x"], Int[Tensor, " b"] | None, PixelGeometry | None]:
        """Return the images, the image of each sample, and their pixel geometry."""
        if isinstance(batch, Batch):
            return require_images(batch), batch.image_of, batch.sample_geometry
        if isinstance(batch, Tensor):
            channels = input_channels(self.backbone)
            if batch.ndim != 4 or batch.shape[1] != channels:
                raise ValueError(
                    f"expected images of shape (i, {channels}, height, width), got a tensor of "
                    f"shape {tuple(batch.shape)}"
                )
            return batch, None, None
        if not isinstance(batch, Mapping) or "pixel_values" not in batch:
            raise ValueError(
                "expected a Batch with images, a tensor of images or a mapping with pixel_values, "
                f"got {type(batch).__name__}"
            )
        photos = batch.get("images")
        geometry = (
            None if photos is None else batch_images(self.processor, photos).single_geometry()
        )
        return batch["pixel_values"], None, geometry

    @contextmanager
    def _backbone_mode(self) -> Iterator[None]:
        """Run a frozen backbone in eval mode: no dropout, fixed norm statistics."""
        if not self.frozen:
            yield
            return
        with eval_mode(self.backbone):
            yield

    # --- freezing and detaching the backbone

    def freeze(self) -> "AttachedAttention":
        """Train the attention only: the backbone keeps its weights and norm statistics."""
        self.frozen = True
        self.backbone.requires_grad_(False)
        return self

    def unfreeze(self) -> "AttachedAttention":
        """Train the backbone too, except parameters that were frozen before `attach`."""
        self.frozen = False
        for name, value in self.backbone.named_parameters():
            value.requires_grad_(self.found.get(name, True))
        return self

    def detach(self) -> nn.Module:
        """Return the backbone with its original `requires_grad` flags and module modes.

        Trained weights are kept.
        """
        self.unfreeze()
        for name, module in self.backbone.named_modules():
            module.training = self.modes.get(name, module.training)
        return self.backbone

    # --- saving and loading

    def config(self) -> dict[str, Any]:
        """Return the constructor values."""
        return {
            "kind": KIND,
            "backbone": describe_model(self.backbone),
            "levels": [
                {**vars(level), "order": level.order.value, "stride": level.stride}
                for level in self.levels
            ],
            "classes": self.classes,
            "score": registered_name(SCORES, self.score, "score"),
            "decision": registered_name(CLASSIFIERS, self.decide_by, "decision"),
            "dropout": self.dropout,
            "numbers": self.numbers,
            "frozen": self.frozen,
        }

    def save_pretrained(self, folder: Path | str) -> None:
        """Write config.json, the weights of backbone and attention, and the processor settings.

        A custom backbone or `run` function must be passed to `from_pretrained` again.
        """
        settings = processor_settings(self.processor)
        extra_files = {} if settings is None else {PROCESSOR: settings}
        checkpoint.save(self, folder, extra_files)

    @classmethod
    def from_pretrained(
        cls, folder: Path | str, backbone: nn.Module | None = None, run: RunBackbone = run_backbone
    ) -> "AttachedAttention":
        """Load a model written by `save_pretrained`; a custom `backbone` gets the saved weights."""

        def build(config: Mapping[str, Any]) -> "AttachedAttention":
            made = cls(
                build_model(config["backbone"]) if backbone is None else backbone,
                tuple(_level_from_config(one) for one in config["levels"]),
                config["classes"],
                SCORES[config["score"]],
                CLASSIFIERS[config["decision"]],
                config["dropout"],
                run,
                read_processor(Path(folder)),
            )
            if config["numbers"] is not None:
                mean, spread = config["numbers"]
                made.numbers = tuple(mean), tuple(spread)
            return made.freeze() if config["frozen"] else made

        return checkpoint.load(build, folder)


KIND = "attached"  # identifies the folder in config.json


def attach(
    backbone: nn.Module,
    classes: int,
    levels: Sequence[str | FeatureLevel] | None = None,
    score: MakeCompatibility = additive_score,
    decision: MakeClassifier = concat_levels,
    dropout: float = 0.1,
    run: RunBackbone = run_backbone,
    processor: Any = None,
    size: Size | None = None,
) -> AttachedAttention:
    """Attach learned attention to a pretrained backbone.

    The backbone runs once on blank images to find out what its modules return. All weights are
    trainable; `attach(...).freeze()` trains the attention only.

    Args:
        backbone: a CNN or ViT of Hugging Face, timm, torchvision or your own.
        classes: number of classes.
        levels: paths of modules in the backbone, lowest first; a `FeatureLevel` describes an output
            that cannot be recognised. By default the last three resolutions, or three blocks of a
            ViT.
        score: makes the compatibility of a level.
        decision: makes the classifier over the levels.
        dropout: dropout before each linear layer.
        run: `run(backbone, pixels)` runs a backbone that needs more than pixels.
        processor: image processor, for normalisation and for the pixels of each cell.
        size: (height, width) of the images; by default the size that the backbone was made for.

    Returns:
        The backbone with attention.

    Raises:
        TypeError: `backbone` is not a module, `levels` not a list of paths, `score` or `decision`
            not a function, or `size` not a pair.
        ValueError: no level is found, or a given level is not a grid of cells.

    Example:
        >>> import torch
        >>> cnn = torch.nn.Sequential(
        ...     torch.nn.Conv2d(3, 4, 3, 2, 1), torch.nn.ReLU(), torch.nn.Conv2d(4, 8, 3, 2, 1)
        ... )
        >>> model = attach(cnn, classes=5, levels=["1", "2"], size=(16, 16)).eval()
        >>> output = model({"pixel_values": torch.rand(2, 3, 16, 16)})
        >>> output.prediction.shape, [len(one.keys) for one in output.attention]
        (torch.Size([2, 5]), [64, 16])
    """
    if not isinstance(backbone, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(backbone).__name__}")
    if isinstance(levels, str):
        raise TypeError(f"levels must be a list, got a string: use levels=[{levels!r}]")
    for one in levels or ():
        if not isinstance(one, str | FeatureLevel):
            raise TypeError(
                f"a level is the path of a module as a string, got {one!r}: use levels=['{one}'] "
                "for a module of a Sequential"
            )
    for what, given, example in (
        ("score", score, "nn.dot_score"),
        ("decision", decision, "nn.average_levels"),
    ):
        if not callable(given):
            raise TypeError(f"{what} must be a function such as {example}, got {given!r}")
    if size is not None and (not isinstance(size, tuple | list) or len(size) != 2):
        raise TypeError(f"size must be (height, width) of the images, got {size!r}")
    # --- find the levels, then build the heads
    canvas = input_size(backbone) if size is None else size
    if levels is None:
        chosen = find_levels(backbone, run, canvas)
    else:
        chosen = named_levels(backbone, run, canvas, levels)
    made = AttachedAttention(backbone, chosen, classes, score, decision, dropout, run, processor)
    first = next(backbone.parameters(), None)
    # `to` a device, not a dtype: the attention stays in float32 beside a backbone in 16 bits
    return made if first is None else made.to(first.device)


def _level_from_config(config: Mapping[str, Any]) -> FeatureLevel:
    stride = config["stride"]
    return FeatureLevel(
        **{
            **config,
            "order": AxisOrder(config["order"]),
            "stride": None if stride is None else (int(stride[0]), int(stride[1])),
        }
    )
