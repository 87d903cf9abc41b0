"""Fixtures with run folders: photos of coloured discs, questions, results and logs."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overt import io
from overt.viz.gallery_sample import GallerySample, save_gallery
from tests.viz.maps import spans_of

COLOURS = {
    "red": (214, 60, 52),
    "green": (70, 160, 84),
    "blue": (62, 104, 196),
    "yellow": (232, 196, 60),
}
FAMILIES = ("exist", "count", "query colour", "spatial")
RUNS = {  # name: accuracy, sharpness of the attention (None: no attention), rate of evidence hits
    "no attention": (0.447, None, 0.0),
    "soft attention": (0.489, 0.9, 0.45),
    "truth-supervised": (0.641, 3.0, 0.9),
}


def disc_scene(
    rng: np.random.Generator, size: int
) -> tuple[np.ndarray, list[tuple[str, float, float]]]:
    """A photo of three discs on a textured background, and their unit coordinates."""
    y, x = (np.mgrid[:size, :size] + 0.5) / size
    ground = 150 + 40 * np.sin(7 * x + rng.uniform(0, 6)) * np.cos(5 * y + rng.uniform(0, 6))
    image = ground[..., None] + rng.normal(0, 9, (size, size, 3)) + rng.uniform(-25, 25, 3)
    discs = []
    for colour in rng.permutation(list(COLOURS))[:3].tolist():
        cx, cy = rng.uniform(0.17, 0.83, 2)
        image[(x - cx) ** 2 + (y - cy) ** 2 < 0.13**2] = COLOURS[colour]
        discs.append((colour, float(cx), float(cy)))
    return image.clip(0, 255).astype(np.uint8), discs


def gaussian_map(cx: float, cy: float, sharp: float, grid: int) -> np.ndarray:
    """Attention that is a Gaussian around one point and sums to one."""
    y, x = (np.mgrid[:grid, :grid] + 0.5) / grid
    cells = np.exp(-sharp * 8 * ((x - cx) ** 2 + (y - cy) ** 2)) + 0.02
    return cells / cells.sum()


def make_samples(
    name: str, count: int, size: int = 64, grid: int = 8, seed: int = 0
) -> list[GallerySample]:
    """Samples of the run `name` for the first questions; the photos do not depend on it."""
    accuracy, sharp, aims = RUNS.get(name, (0.5, 1.0, 0.5))
    rng = np.random.default_rng([seed, len(name)])
    samples = []
    for i in range(count):
        image, discs = disc_scene(np.random.default_rng([seed, i]), size)
        colour, cx, cy = discs[-1]
        side = "left" if cx < 0.5 else "right"
        text = f"what colour is the disc on the {side} side?"
        truth_cells = gaussian_map(cx, cy, 4.0, grid)
        truth_cells = (truth_cells > 0.5 * truth_cells.max()).astype(np.float64)
        cells, scores = None, {}
        if sharp is not None:
            tx, ty = (cx, cy) if rng.random() < aims else rng.uniform(0.15, 0.85, 2)
            cells = gaussian_map(tx, ty, sharp, grid)
            hit = truth_cells.flat[cells.argmax()] > 0
            scores = {"pointing": float(hit), "mass inside": float((cells * truth_cells).sum())}
        weights = rng.dirichlet(np.ones(len(text.split())) * 0.7)
        right = rng.random() < accuracy
        samples.append(
            GallerySample(
                id=f"test-{i // 2:05d}/{i % 2}",
                image=image,
                text=text,
                spans=spans_of(text),
                group=FAMILIES[i % len(FAMILIES)],
                prediction=colour if right else next(c for c in COLOURS if c != colour),
                confidence=float(rng.uniform(0.3, 0.98)),
                truth=colour,
                cells=cells,
                word_weights=weights if sharp is not None else None,
                truth_cells=truth_cells,
                scores=scores,
            )
        )
    return samples


def make_results(name: str, **changes: Any) -> dict[str, Any]:
    """The results.json of a finished run."""
    accuracy, sharp, aims = RUNS.get(name, (0.5, 1.0, 0.5))
    n = 2000

    def entry(value: float, **more: Any) -> dict[str, Any]:
        return {
            "value": value,
            "unit": "share",
            "direction": "higher",
            "split": "test",
            "n": n,
            **more,
        }

    ours = {"accuracy": entry(accuracy, low=accuracy - 0.021, high=accuracy + 0.021)}
    if sharp is not None:
        ours["rank_correlation"] = entry(0.1 + 0.4 * aims, n=1712)
        ours["pointing"] = entry(0.05 + 0.9 * aims, n=1712)
        ours["mass_inside"] = entry(0.1 + 0.75 * aims, n=1712)
        ours["deletion drop"] = entry(0.05 + 0.2 * aims)
    results = {
        "schema": 1,
        "status": "done",
        "recipe": f"scenes.{name.replace(' ', '_').replace('-', '_')}",
        "settings": {
            "data": {"limit": 4000},
            "model": {"width": 64},
            "train": {"epochs": 8, "rate": 1e-3},
        },
        "seed": 0,
        "device": "cpu",
        "world_size": 1,
        "versions": {"overt": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
        "commit": "5b35ec9d0c3f6f1e2a4b",
        "command": f"overt run scenes.{name.replace(' ', '_')} --out runs/demo --seed 0",
        "data": [
            {"name": "scenes", "split": "train", "hash": "9f2c" * 16, "n": 16000},
            {"name": "scenes", "split": "test", "hash": "77ab" * 16, "n": n},
        ],
        "paper": {
            "accuracy": {
                "value": 0.589,
                "unit": "share",
                "direction": "higher",
                "source": "Yang et al. 2016, table 2",
            }
        }
        if name == "soft attention"
        else {},
        "ours": ours,
        "groups": {
            "accuracy": {
                family: {"value": min(0.97, accuracy + 0.09 * (i - 1)), "n": 500, "chance": chance}
                for i, (family, chance) in enumerate(
                    zip(FAMILIES, (0.5, 0.25, 0.125, 0.5), strict=True)
                )
            }
        },
        "steps": 1000,
        "epochs": 8,
        "parameters": 412_345,
        "flops": 3.1e12,
        "seconds": 41.3 + 20 * (sharp or 0),
        "samples_per_second": 2310.5,
        "peak_memory": 812 * 2**20,
    }
    return {**results, **changes}


def make_log(name: str, steps: int = 1000) -> list[dict[str, Any]]:
    """The rows of log.jsonl."""
    accuracy, sharp, _ = RUNS.get(name, (0.5, 1.0, 0.5))
    rng = np.random.default_rng(len(name))
    rows: list[dict[str, Any]] = []
    for step in range(10, steps + 1, 10):
        losses = {"task": 0.7 + 2 * math.exp(-step / 300) * (1.4 - accuracy) + rng.normal(0, 0.03)}
        if sharp is not None and sharp > 1:
            losses["attention"] = 0.3 + 2.2 * math.exp(-step / 150) + rng.normal(0, 0.03)
        row = {
            "stage": "train",
            "step": step,
            "epoch": step // 125,
            "split": "train",
            "losses": losses,
        }
        rows.append({**row, "rate": 0.001})
        if step % 125 == 0 or step == steps:
            score = accuracy * (1 - math.exp(-step / 250)) + 0.1 * math.exp(-step / 250)
            measures = {"accuracy": score} | ({"mass inside": score * 0.8} if sharp else {})
            row = {"stage": "train", "step": step, "epoch": step // 125, "split": "val"}
            rows.append({**row, "measures": measures})
    return rows


def make_run(
    folder: Path,
    name: str = "soft attention",
    samples: Sequence[GallerySample] | None = None,
    count: int = 8,
    size: int = 64,
    **changes: Any,
) -> Path:
    """Write a run folder; `changes` go into its results."""
    folder.mkdir(parents=True)
    io.write_json(folder / "results.json", make_results(name, **changes))
    lines = [json.dumps(row) + "\n" for row in make_log(name)]
    (folder / "log.jsonl").write_text("".join(lines))
    save_gallery(
        folder / "gallery", make_samples(name, count, size) if samples is None else samples
    )
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., Path]:
    """`run_folder("soft attention", count=4)` makes a run in the temporary folder of the test."""

    def make(name: str = "soft attention", **options: Any) -> Path:
        return make_run(tmp_path / "runs" / name, name, **options)

    return make


@pytest.fixture
def three_runs(run_folder: Callable[..., Path]) -> list[Path]:
    """The three runs of the demo, over the same samples."""
    return [run_folder(name) for name in RUNS]


@pytest.fixture
def samples() -> Callable[..., list[GallerySample]]:
    """`samples("soft attention", 4)` makes the gallery of a run."""
    return make_samples


# --- a browser

FLAGS = (
    "--no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real browser; tests that need one are skipped if none is installed."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.skip("no chromium is installed: the page was not opened in a browser")
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=found, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open a file; fail at the end after console errors or requests beyond the file."""
    problems: list[str] = []
    contexts = []

    def open_file(path: Path, width: int = 1280, **options: object) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(90_000)
        page.on(
            "console",
            lambda message: problems.append(message.text) if message.type != "log" else None,
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
        allowed = (path.as_uri(), "data:")
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith(allowed) else problems.append(request.url)
            ),
        )
        page.goto(path.as_uri())
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert problems == []
