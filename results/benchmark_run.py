"""Run the benchmark of explanations: six models, several seeds, one folder and one page.

    python results/benchmark_run.py OUT [--seeds 5] [--limit 60] [--only CNN ViT] [--device cuda]

Models are trained first, then measured, all models with the first seed before the second. What is
finished is not repeated: the same command continues, and more seeds or models add to the folder.
EfficientNet-Lite0 needs OVERT_DATA with Flickr30k Entities; it is pretrained and counts once.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import benchmark_models as models

from overt import io
from overt.inspect import benchmark
from overt.papers import demo

FILE = Path(__file__).resolve().parent / "benchmark_models.py"
VALIDATION = 300  # scenes or sentences
MEASURES = (
    *("spearman", "mass_inside", "pointing_game", "js"),
    *("deletion_area@mean", "insertion_area@mean", "comprehensiveness@mean", "sufficiency@mean"),
    *("infidelity@mean", "leave_one_out_agreement@mean"),
    *("deletion_area@mask", "insertion_area@mask", "leave_one_out_agreement@mask"),
)


@dataclass(frozen=True)
class BenchmarkModel:
    """A model of the benchmark.

    Args:
        name: Its name in the tables.
        function: Its function in benchmark_models.py, or the name of a recipe.
        data: The function of its dataset; None for the test set of a run.
        settings: Settings of the recipe.
        seeds: Whether it is trained once per seed.
    """

    name: str
    function: str
    data: str | None = None
    settings: tuple[str, ...] = ()
    seeds: bool = True

    def pair(self, seed: int) -> benchmark.BenchmarkPair:
        """Return the model of a seed with its dataset."""
        if self.data is None:
            return benchmark.BenchmarkPair(self.name, str(self.run(seed)), None)
        word = f"{FILE}:{self.function}" + (f"_{seed}" if self.seeds else "")
        return benchmark.BenchmarkPair(self.name, word, f"{FILE}:{self.data}")

    def run(self, seed: int) -> Path:
        """Return the run folder of a recipe."""
        return models.FOLDER / f"{self.function}-{seed}"


MODELS = (
    BenchmarkModel("CNN", "cnn", "scenes"),
    BenchmarkModel("ViT", "vit", "scenes"),
    BenchmarkModel("MiniLM", "minilm", "large_things"),
    BenchmarkModel("EfficientNet-Lite0", "lite0", "animals", seeds=False),
    BenchmarkModel("VQA", "scenes-soft", settings=demo.SHORT_VQA),
    BenchmarkModel("captioner", "a2-scenes", settings=(*demo.SHORT_A2, "align.fuse=none")),
)


def train(model: BenchmarkModel, seed: int, device: str) -> None:
    """Train a model that has no weights yet."""
    if model.data is not None:
        getattr(models, model.pair(seed).model.rpartition(":")[2])()
        return
    folder = model.run(seed)
    if (folder / "manifest.json").is_file():
        return
    words = ["run", model.function, "--out", str(folder), "--seed", str(seed), "--device", device]
    words += ["--resume"] if folder.exists() else []
    changes = [part for one in model.settings for part in ("--set", one)]
    subprocess.run([sys.executable, "-m", "overt", *words, *changes], check=True)


def write_accuracies(
    chosen: Sequence[tuple[BenchmarkModel, int, benchmark.BenchmarkPair]], out: Path
) -> None:
    """Write the accuracy on validation of every model that has labels, as accuracy.json."""
    path = out / "accuracy.json"
    found = io.read_json(path) if path.is_file() else {}
    for model, seed, pair in chosen:
        key = f"{model.name} {seed}"
        if model.data is not None and model.seeds and key not in found:
            net = getattr(models, pair.model.rpartition(":")[2])()
            found[key] = models.accuracy(net, getattr(models, model.data)("val", VALIDATION))
            print(f"{key}: accuracy {found[key]:.3f} on validation", flush=True)
    io.write_json(path, found)


def chosen_pairs(
    names: Sequence[str], seeds: int
) -> list[tuple[BenchmarkModel, int, benchmark.BenchmarkPair]]:
    """Return every model with every seed; all models of a seed together."""
    return [
        (one, seed, one.pair(seed))
        for seed in range(seeds)
        for one in MODELS
        if one.name in names and (one.seeds or seed == 0)
    ]


def main(argv: Sequence[str]) -> None:
    """Train, measure, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, len(models.SEEDS) + 1))
    parser.add_argument("--limit", type=int, default=60, help="most samples of each dataset")
    parser.add_argument("--method", nargs="+", default=[], help="all that apply by default")
    parser.add_argument("--measures", nargs="+", default=MEASURES)
    parser.add_argument("--device", default="cpu")
    names = [one.name for one in MODELS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="MODEL")
    parser.add_argument("--train", action="store_true", help="train only")
    args = parser.parse_args(argv)
    chosen = chosen_pairs(args.only, args.seeds)
    for model, seed, _ in chosen:
        train(model, seed, args.device)
    write_accuracies(chosen, args.out)
    if args.train:
        return
    pairs = [pair for *_, pair in chosen]
    request = benchmark.BenchmarkRequest(
        tuple(dict.fromkeys(pair.model for pair in pairs)),
        methods=tuple(args.method),
        measures=tuple(args.measures),
        limit=args.limit,
        portion=20,
    )
    for number, pair in enumerate(pairs):
        benchmark.compute_pair(request, pair, args.out, device=args.device, say=print)
        # written after each model, so that an interrupted run has a page
        found = benchmark.read_benchmark(request, pairs[: number + 1], [], args.out)
        command = " ".join(["python results/benchmark_run.py", *argv])
        benchmark.write_benchmark(found, args.out, command)
        print(f"{pair.name}: finished, {number + 1} of {len(pairs)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
