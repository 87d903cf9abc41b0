"""Numbers published in "Attention-Aligned Transformer", and by others on Flickr8k."""

from collections.abc import Mapping

from overt.experiments.recipe import NO_PUBLISHED_VALUES, PublishedValue

PAPER = "Attention-Aligned Transformer for Image Captioning"
MEASURES = ("bleu_1", "bleu_4", "meteor", "rouge_l", "cider_d", "spice")

# Table 1, in per cent: cross-entropy, then CIDEr optimisation. The row of the paper has the gate.
TABLE_1 = {
    ("gate", False): (78.6, 38.2, 29.2, 58.3, 125.0, 22.1),
    ("gate", True): (81.5, 39.8, 29.6, 59.1, 133.9, 23.0),
}
# Table 3, cross-entropy. Its caption says validation split, but its last row is that of Table 1,
# whose caption says test split: one of the two captions is wrong.
TABLE_3 = {
    "none": (77.4, 37.2, 28.7, 57.7, 120.0, 21.8),
    "max": (77.9, 37.7, 29.0, 58.0, 122.8, 21.9),
    "moving-average": (77.9, 37.6, 29.0, 57.9, 122.3, 21.9),
    "decay": (78.4, 37.9, 29.0, 58.2, 124.2, 22.0),
    "gate": (78.6, 38.2, 29.2, 58.3, 125.0, 22.1),
}
# Show, Attend and Tell on Flickr8k (Xu et al. 2015, Table 1), VGG features of whole photos: the
# closest published numbers of plain attention on this dataset.
SHOW_ATTEND_TELL = {"bleu_1": 67.0, "bleu_2": 44.8, "bleu_3": 29.9, "bleu_4": 19.5, "meteor": 18.93}


def figures(data: str, fuse: str, critical: bool) -> Mapping[str, PublishedValue]:
    """Return the published numbers for a dataset, a fusion and a stage; empty if there are none."""
    match data:
        case "coco_captions" if (fuse, critical) in TABLE_1:
            stage = "CIDEr optimisation" if critical else "cross-entropy"
            return _figures(TABLE_1[fuse, critical], f"Table 1, {stage}")
        case "coco_captions" if not critical and fuse in TABLE_3:
            return _figures(TABLE_3[fuse], f"Table 3, {fuse}")
        case "flickr8k" if fuse == "none" and not critical:
            source = "Show, Attend and Tell, Table 1, soft attention, Flickr8k"
            return {
                name: PublishedValue.from_percent(one, source)
                for name, one in SHOW_ATTEND_TELL.items()
            }
        case _:
            return NO_PUBLISHED_VALUES


def _figures(numbers: tuple[float, ...], where: str) -> Mapping[str, PublishedValue]:
    return {
        name: PublishedValue(
            one / 100, "score" if name == "cider_d" else "share", True, f"{PAPER}, {where}"
        )
        for name, one in zip(MEASURES, numbers, strict=True)
    }
