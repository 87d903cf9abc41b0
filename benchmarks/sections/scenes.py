"""Benchmark the generation of synthetic scenes: cached and new batches."""

import torch

from overt.data.scenes.captions import CaptionScenes
from overt.data.scenes.render import render
from overt.data.scenes.world import random_scene

from .clock import time_variants
from .report import Report, Setting, speedup_row


def section(setting: Setting, report: Report) -> None:
    """Time scenes, images and batches; check that a sample does not depend on the batch size."""
    torch.set_num_threads(1)
    count = setting.size(64, 8)
    indices = list(range(count))
    batch = CaptionScenes("train", 0, count).batch(indices)
    assert batch.images is not None
    for index in indices[:4]:
        single = CaptionScenes("train", 0, count).batch([index])
        assert single.images is not None
        assert torch.equal(single.images[0], batch.images[index]), (
            "a sample depends on the batch size"
        )
    rendered = torch.from_numpy(render(random_scene("train", 0, 3), 64).image.copy())
    expected = rendered.permute(2, 0, 1) if rendered.shape[-1] == 3 else rendered
    assert torch.equal(expected, batch.images[3]), "batch and renderer differ"
    cached = CaptionScenes("train", 0, count)
    cached.batch(indices)
    times = time_variants(
        {
            "scene": lambda: [random_scene("train", 0, i) for i in indices],
            "scene and image": lambda: [render(random_scene("train", 0, i), 64) for i in indices],
            "batch, new": lambda: CaptionScenes("train", 0, count).batch(indices),
            "batch, cached": lambda: cached.batch(indices),
        },
        setting.rounds,
    )
    report.add(speedup_row(f"a batch of {count} scenes", times, "batch, cached", "batch, new"))
    report.facts["scenes_per_cpu_second"] = {
        name: count / times.spread(name).median for name in times.seconds
    }
