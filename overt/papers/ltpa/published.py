"""Numbers published in Learn to Pay Attention besides Table 1, by network and training dataset.

Jetley, Lord, Lee and Torr, ICLR 2018, https://arxiv.org/abs/1804.02391. Networks are named as the
rows of the table `ltpa-1`, metrics as in the results of a run; numbers are percentages, as printed.
"""

from collections.abc import Iterator

from overt.experiments.recipe import PublishedValue

PAPER = "Learn to Pay Attention"

# Errors on CUB-200-2011 and SVHN. The paper cites that of VGG-GAP on CUB from elsewhere, and also
# that of a ResNet-34 (26.5), which was pretrained on ImageNet and is not in this table.
TABLE_2: dict[str, tuple[float, float]] = {
    "vgg": (34.64, 4.27),
    "vgg-gap": (29.50, 5.84),
    "vgg-pan": (31.46, 8.02),
    "att2-concat-pc": (26.80, 3.74),
    "att3-concat-pc": (26.95, 3.52),
}

# Accuracies of networks trained on CIFAR-10 on the two splits of STL-10, without an SVM.
STL: dict[str, tuple[float, float]] = {
    "vgg": (45.34, 44.91),
    "vgg-gap": (43.24, 42.76),
    "vgg-pan": (47.5, 47.21),
    "resnet-164": (47.82, 47.02),
    "att2-concat-pc": (48.76, 48.29),
    "att3-concat-pc": (48.42, 48.32),
    "rn164-att2": (46.36, 46.45),
}

# Accuracies of an SVM on features learned from CIFAR-10 and from CIFAR-100.
SETS = ("caltech101", "caltech256", "event8", "action40", "scene67")
TABLE_3: dict[str, tuple[tuple[float, float], ...]] = {
    "vgg": ((35.97, 54.20), (13.16, 25.57), (53.62, 57.05), (13.85, 17.58), (11.02, 16.73)),
    "vgg-gap": ((41.68, 62.61), (16.30, 31.39), (58.83, 68.11), (16.73, 24.50), (12.85, 23.04)),
    "vgg-pan": ((48.09, 65.75), (19.61, 33.66), (56.93, 64.49), (16.96, 23.44), (18.77, 23.43)),
    "resnet-164": ((49.89, 73.62), (22.59, 39.65), (69.19, 75.10), (20.56, 28.72), (20.26, 29.89)),
    "att2-concat-pc": (
        *((55.96, 74.40), (26.54, 41.55), (67.73, 80.24), (22.58, 29.95), (25.43, 30.53)),
    ),
    "att3-concat-pc": (
        *((58.34, 75.39), (29.99, 44.14), (77.06, 82.08), (26.75, 30.96), (26.86, 33.72)),
    ),
    "rn164-att2": ((68.11, 79.17), (36.33, 46.20), (80.37, 83.67), (30.47, 31.45), (30.46, 34.39)),
}

# Fooling rates on CUB at n / 255.
STRENGTHS = (1, 2, 4, 8, 16)
FIGURE_6: dict[str, tuple[float, ...]] = {
    "vgg": (58.58, 78.27, 89.99, 94.89, 96.46),
    "att2-concat-pc": (53.78, 76.00, 89.90, 95.27, 97.60),
}

# Jaccard of airplanes, cars and horses, of networks trained on CIFAR-10 and on CIFAR-100.
KINDS = ("airplane", "car", "horse")
FIGURE_9: dict[str, tuple[tuple[float, float | None], ...]] = {
    "vgg-gap": ((10.10, None), (19.81, None), (29.55, None)),
    "vgg-pan": ((31.91, 31.24), (28.21, 27.45), (25.57, 24.41)),
    "att2-concat-pc": ((34.98, 31.45), (28.96, 38.99), (29.39, 29.21)),
    "att3-concat-pc": ((48.07, 35.66), (61.19, 41.23), (40.95, 29.68)),
    "rn164-att2": ((41.01, 45.46), (63.12, 65.05), (36.78, 40.36)),
}


def figures(label: str, data: str) -> dict[str, PublishedValue]:
    """Return every number outside of Table 1 for this network trained on this dataset."""
    return {
        name: PublishedValue.from_percent(value, f"{PAPER}, {where}", higher)
        for name, value, higher, where in _published_values(label, data)
    }


def _published_values(label: str, data: str) -> Iterator[tuple[str, float, bool, str]]:
    if data in ("cub", "svhn") and label in TABLE_2:
        yield "error", TABLE_2[label][("cub", "svhn").index(data)], False, f"Table 2, {label}"
    if data == "cub" and label in FIGURE_6:
        for steps, rate in zip(STRENGTHS, FIGURE_6[label], strict=True):
            yield f"fooled_fgsm_{steps}", rate, False, f"figure 6, {label}"
    if data not in ("cifar10", "cifar100"):
        return
    which = ("cifar10", "cifar100").index(data)
    if data == "cifar10" and label in STL:
        for part, accuracy in zip(("train", "test"), STL[label], strict=True):
            yield f"stl10_{part}", accuracy, True, f"Table 3, {label}"
    for name, pair in zip(SETS, TABLE_3.get(label, ()), strict=label in TABLE_3):
        yield f"transfer_{name}", pair[which], True, f"Table 3, {label}"
    for kind, scores in zip(KINDS, FIGURE_9.get(label, ()), strict=label in FIGURE_9):
        score = scores[which]
        if score is not None:
            yield f"jaccard_{kind}", score, True, f"figure 9, {label}"
