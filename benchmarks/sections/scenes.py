"""Making scenes and batches of them: what is kept against what is drawn anew."""

import torch

from overt.data.scenes.captions import CaptionScenes
from overt.data.scenes.render import render
from overt.data.scenes.world import scene

from .clock import race
from .report import Report, Setting, faster


def section(setting: Setting, report: Report) -> None:
    """Worlds, pictures, batches; a batch does not depend on its size."""
    torch.set_num_threads(1)
    count = setting.some(64, 8)
    every = list(range(count))
    whole = CaptionScenes("train", 0, count).batch(every)
    assert whole.images is not None
    for index in every[:4]:
        part = CaptionScenes("train", 0, count).batch([index])
        assert part.images is not None
        assert torch.equal(part.images[0], whole.images[index]), "a batch depends on its size"
    drawn = torch.from_numpy(render(scene("train", 0, 3), 64).image.copy())
    same = drawn.permute(2, 0, 1) if drawn.shape[-1] == 3 else drawn
    assert torch.equal(same, whole.images[3]), "a batch shows another picture than the renderer"
    kept = CaptionScenes("train", 0, count)
    kept.batch(every)
    times = race(
        {
            "world": lambda: [scene("train", 0, i) for i in every],
            "world and picture": lambda: [render(scene("train", 0, i), 64) for i in every],
            "batch, new": lambda: CaptionScenes("train", 0, count).batch(every),
            "batch, kept": lambda: kept.batch(every),
        },
        setting.rounds,
    )
    report.add(faster(f"a batch of {count} scenes", times, "batch, kept", "batch, new"))
    report.facts["scenes_per_cpu_second"] = {
        name: count / times.of(name).median for name in times.seconds
    }
