"""Run a recipe in a folder: claim it, build, train, judge, and leave results that can be checked.

DIR/results.json   what was run, on what, and what came out
DIR/samples.npz    one row a test sample: prediction, truth, every measure
DIR/elsewhere.npz  one row an item of other data sets, where the model was taken to any
DIR/log.jsonl      losses and validations, free of clock times
DIR/checkpoints/   each stage's newest two
DIR/model/         the finished model, for `from_pretrained`
DIR/gallery/       samples to look at
DIR/scorecard/     its attention beside maps that know nothing, on few samples
DIR/report.html    a page about all of it
"""

import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, cast

from overt import files
from overt.errors import Failed, Stopped
from overt.recipes import folder as run_folder
from overt.recipes import settings
from overt.recipes.recipe import Context, Figure, Recipe

SCHEMA = 1
LOOSE = ("results.json", "samples.npz", "elsewhere.npz", "log.jsonl", "report.html")


def run(
    recipe: Recipe,
    out: Path | str,
    *,
    seed: int = 0,
    device: str = "auto",
    data_root: Path | str | None = None,
    resume: bool = False,
    command: Sequence[str] = (),
    title: str | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Run a recipe to its end, or on from where it stopped, and return its results.

    A run that is already finished is returned as it is. One that ends early leaves everything it
    saved before, and `results.json` with the status "stopped", or "failed" and the reason. Where it
    failed before it saved anything, such as for want of data, the folder is free to start again.
    """
    out = Path(out)
    data_root = None if data_root is None else Path(data_root)
    held = run_folder.claim(out, recipe, seed, resume=resume)
    if held is not None and held.done:
        return dict(held.results)
    from overt.train.processes import processes

    ranks = processes(device)
    with files.lock(out) if ranks.first else nullcontext():
        results = {
            "schema": SCHEMA,
            "status": "running",
            "title": title or (held.results.get("title") if held else None) or recipe.name,
            "recipe": recipe.name,
            "about": recipe.about,
            "settings": settings.to_json(recipe),
            "seed": seed,
            "device": describe(ranks.device),
            "world_size": ranks.world,
            "versions": versions(),
            "commit": commit(),
            "command": shlex.join(command),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "paper": {name: stated(figure) for name, figure in recipe.paper.items()},
        }
        if ranks.first:
            files.write_json(out / "results.json", results)
        try:
            context = Context(out, seed, device, data_root)
            with ending():
                going_on = resume and held is not None
                _go(recipe, context, results, going_on, show_progress and ranks.first)
        except (Stopped, KeyboardInterrupt):
            _end(out, results, "stopped", ranks.first)
            raise
        except Exception as error:
            results["reason"] = " ".join(str(error).split()) or type(error).__name__
            _end(out, results, "failed", ranks.first)
            raise
        ranks.wait()
    return results


def _go(
    recipe: Recipe, context: Context, results: dict[str, Any], resume: bool, show: bool
) -> None:
    import torch

    from overt.models.network import Kept
    from overt.recipes import experiment as parts
    from overt.recipes import reporting
    from overt.recipes.spoken import beside
    from overt.show.page import report
    from overt.show.sample import save_gallery
    from overt.train import Reporter
    from overt.train.loop import mixed, seed_everything
    from overt.train.processes import processes

    ranks = processes(context.device)
    reporter = Reporter(enabled=show)
    seed_everything(mixed(context.seed, recipe.name, "build"))
    experiment = recipe.build(context)
    experiment.model.to(ranks.device)
    ranks.share(experiment.model.state_dict().values())
    results["data"] = [asdict(source) for source in experiment.sources]
    fitted = [stage.run(resume, reporter) for stage in experiment.stages]
    trained = [one for one in fitted if one is not None]
    experiment.model.eval()
    with torch.no_grad():
        evaluation = experiment.evaluate(reporter)
    seconds = sum(one.seconds for one in trained)
    results |= {
        "status": "done",
        "ours": evaluation.ours,
        "groups": evaluation.groups,
        "steps": sum(one.steps for one in trained),
        "epochs": sum(one.epochs for one in trained),
        "parameters": parts.parameters(experiment.model),
        "flops": parts.flops(experiment.model, experiment.example().to(ranks.device)),
        "seconds": round(seconds, 2),
        "samples_per_second": round(sum(one.samples for one in trained) / max(seconds, 1e-9), 1),
        "peak_memory": parts.peak_memory(ranks.device),
    }
    if evaluation.clock:
        results["clock"] = {name: round(one, 6) for name, one in evaluation.clock.items()}
    plain = parts.plain(results)
    results.clear()
    results.update(plain)
    if not ranks.first:
        return
    out = context.out
    if isinstance(experiment.model, Kept):
        experiment.model.save_pretrained(out / "model", beside(experiment.spoken))
    elif hasattr(experiment.model, "save_pretrained"):
        cast(Any, experiment.model).save_pretrained(out / "model")
    files.write_arrays(out / "samples.npz", dict(evaluation.samples))
    if evaluation.elsewhere:
        files.write_arrays(out / "elsewhere.npz", dict(evaluation.elsewhere))
    if evaluation.gallery:
        save_gallery(out / "gallery", evaluation.gallery)
    count, flops = recipe.train.card, results["flops"]
    asked = reporting.scored(experiment, out, count, flops, context.seed, results["title"])
    results["scorecard"] = reporting.told(asked)
    files.write_json(out / "results.json", results)
    report(out / "report.html", [out])
    files.seal(out, [name for name in LOOSE if (out / name).is_file()])


@contextmanager
def ending() -> Iterator[None]:
    """Turn SIGTERM into `Stopped` wherever no training waits for the end of its step.

    Ctrl-C interrupts, as it does in training, even where whoever started us had it ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a process that loads or makes data
            os._exit(128 + number)
        raise Stopped(
            "stopped at once; what was saved before is whole, and the same command with --resume "
            "goes on from there",
            number,
        )

    answers = {signal.SIGTERM: stop, signal.SIGINT: signal.default_int_handler}
    former = {number: signal.signal(number, answer) for number, answer in answers.items()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _end(out: Path, results: dict[str, Any], status: str, first: bool) -> None:
    """Say in results.json how a run ended early; a full disk must not hide the real reason."""
    if not first:
        return
    results["status"] = status
    try:
        files.write_json(out / "results.json", results)
    except Failed:
        return


def stated(figure: Figure) -> dict[str, Any]:
    """A paper's number as results.json holds it, beside ours."""
    return {
        "value": figure.value,
        "unit": figure.unit,
        "direction": "higher" if figure.higher_is_better else "lower",
        "source": figure.source,
    }


def describe(device: Any) -> str:
    """The device by its own name."""
    import platform

    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type} {platform.machine()}, {threads} threads"


def versions() -> dict[str, str]:
    """The versions of what the numbers depend on."""
    import platform

    found = {"python": platform.python_version()}
    for package in ("overt", "torch", "numpy", "accelerate", "safetensors", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The commit of this checkout, marked where files were changed; None outside of one.

    A copy that is installed somewhere below another project is no checkout.
    """
    root = Path(__file__).resolve().parents[2]
    try:
        if Path(_git(root, "rev-parse", "--show-toplevel")).resolve() != root:
            return None
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+changes" if changed else "")


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
