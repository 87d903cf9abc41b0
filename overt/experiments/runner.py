"""Run a recipe in a folder: build, train and evaluate it, and write its results.

DIR/results.json   settings, datasets, versions and metrics
DIR/samples.npz    one row per test sample: prediction, truth, every metric
DIR/elsewhere.npz  one row per item of other datasets, where the recipe has any
DIR/log.jsonl      losses and validations, without timestamps
DIR/checkpoints/   the last two of each stage
DIR/model/         the trained model, for `from_pretrained`
DIR/gallery/       images and maps of some samples
DIR/scorecard/     its attention beside uninformed control maps, on few samples
DIR/report.html    a page with all of it
"""

import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, cast

from overt import io
from overt.errors import RunError, RunInterrupted, UserError
from overt.experiments import recipe_file, run_folder, settings
from overt.experiments.recipe import Build, PublishedValue, Recipe, RunContext

SCHEMA = 1
SEALED_FILES = ("results.json", "samples.npz", "elsewhere.npz", "log.jsonl", "report.html")


def run(
    recipe: Recipe,
    out: Path | str,
    build: Build,
    *,
    seed: int = 0,
    device: str = "auto",
    data_root: Path | str | None = None,
    resume: bool = False,
    command: Sequence[str] = (),
    title: str | None = None,
    show_progress: bool = True,
) -> dict[str, Any]:
    """Run a recipe, or resume it, and return its results.

    The results of a finished run are returned without running it again. A run that ends early keeps
    its checkpoints, and results.json has the status "stopped", or "failed" with the reason. If it
    failed before it saved anything, for example without data, the folder can be used again.

    Args:
        recipe: Settings of the run.
        out: Folder of the run.
        build: Turns the recipe and a `RunContext` into an experiment: `papers.catalog.build`, or
            your own function.
        seed: Seed of all random numbers.
        device: "auto", "cpu", "cuda", "cuda:N" or "mps".
        data_root: Folder of datasets.
        resume: Continue the run in `out`.
        command: Command line, for results.json.
        title: Name in tables and reports; the name of the recipe by default.
        show_progress: Print progress to stderr.

    Returns:
        The contents of results.json.

    Raises:
        UserError: The folder, the settings or the data cannot be used, or the data are not those of
            the run to resume.
        RunError: The run failed.
        RunInterrupted: The run was stopped by a signal and saved.

    Example:
        >>> import tempfile
        >>> from overt.experiments.experiment import Evaluation, Experiment, MetricValue
        >>> from overt.papers.catalog import find_recipe
        >>> from overt.testing import PlantedCell, toy_batch
        >>> def build(recipe, context):  # a model that needs no training
        ...     found = Evaluation({"accuracy": MetricValue(1.0, "share", "higher", "test", 8)}, {})
        ...     model = PlantedCell((2, 2), cell=0)
        ...     return Experiment(model, [], [], lambda report: found, lambda: toy_batch(2))
        >>> recipe = find_recipe("scenes-soft")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     results = run(recipe, Path(folder) / "a", build, device="cpu", show_progress=False)
        >>> results["status"], results["ours"]["accuracy"]["value"]
        ('done', 1.0)
    """
    out = Path(out)
    data_root = None if data_root is None else Path(data_root)
    # Before torch is imported: mistakes and finished runs return at once.
    existing = run_folder.check_claim(out, recipe, seed, resume=resume)
    if existing is not None and existing.is_finished:
        return dict(existing.results)
    from overt.train.distributed import processes

    ranks = processes(device)
    with io.lock(out) if ranks.is_main else nullcontext():
        if ranks.is_main:  # another process may have started or finished before we got the lock
            existing = run_folder.check_claim(out, recipe, seed, resume=resume, locked=True)
            if existing is not None and existing.is_finished:
                return dict(existing.results)
        results = {
            "schema": SCHEMA,
            "status": "running",
            "title": title or (existing.results.get("title") if existing else None) or recipe.name,
            "recipe": recipe.name,
            "about": recipe.about,
            "settings": settings.to_json(recipe),
            "seed": seed,
            "device": describe_device(ranks.device),
            "world_size": ranks.world,
            "versions": package_versions(),
            # Those of this attempt, if a run was resumed.
            "commit": git_commit(),
            "command": shlex.join(command),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "paper": {name: published_json(figure) for name, figure in recipe.paper.items()},
        }
        former = existing.results if resume and existing is not None else None
        if former is not None and "data" in former:  # kept also if this attempt ends early
            results["data"] = former["data"]
        if (version := recipe_file.code_version(recipe)) is not None:
            before = [] if former is None else former.get("code", [])
            results["code"] = [*before, *([version] if before[-1:] != [version] else [])]
            if former is not None and ranks.is_main:
                recipe_file.warn_of_other_code(former, recipe, out)
        if ranks.is_main:
            io.write_json(out / "results.json", results)
        try:
            context = RunContext(out, seed, device, data_root)
            with stop_on_sigterm():
                _execute(
                    recipe,
                    build,
                    context,
                    results,
                    former is not None,
                    show_progress and ranks.is_main,
                )
        except (RunInterrupted, KeyboardInterrupt):
            _write_status(out, results, "stopped", ranks.is_main)
            raise
        except (Exception, SystemExit) as error:
            results["reason"] = " ".join(str(error).split()) or type(error).__name__
            _write_status(out, results, "failed", ranks.is_main)
            raise
        ranks.barrier()
    return results


def _execute(
    recipe: Recipe,
    build: Build,
    context: RunContext,
    results: dict[str, Any],
    resume: bool,
    show: bool,
) -> None:
    import torch

    from overt.experiments import run_scorecard
    from overt.experiments.experiment import (
        count_flops,
        count_parameters,
        peak_memory,
        to_json_value,
    )
    from overt.experiments.inference_spec import spec_files
    from overt.nn.inner_checkpoint import save_inner_model
    from overt.nn.network import SavableModule
    from overt.train import Reporter
    from overt.train.distributed import processes
    from overt.train.loop import derive_seed, seed_everything
    from overt.viz.gallery_sample import save_gallery
    from overt.viz.report_page import write_report

    ranks = processes(context.device)
    reporter = Reporter(enabled=show)
    # The build draws the initial weights: they must not depend on what ran before in this process.
    seed_everything(derive_seed(context.seed, recipe.name, "build"))
    experiment = build(recipe, context)
    experiment.model.to(ranks.device)
    # All processes start from the weights of the main one.
    ranks.broadcast_tensors(experiment.model.state_dict().values())
    sources = [asdict(source) for source in experiment.sources]
    _check_same_data(results.get("data", []), sources)
    results["data"] = sources
    if ranks.is_main:  # with the data, for the next attempt
        io.write_json(context.out / "results.json", results)
    results_of_stages = [stage.run(resume, reporter) for stage in experiment.stages]
    fitted = [one for one in results_of_stages if one is not None]
    experiment.model.eval()
    with torch.no_grad():
        evaluation = experiment.evaluate(reporter)
    seconds = sum(one.seconds for one in fitted)
    results |= {
        "status": "done",
        "ours": evaluation.ours,
        "groups": evaluation.groups,
        "steps": sum(one.steps for one in fitted),
        "epochs": sum(one.epochs for one in fitted),
        "parameters": count_parameters(experiment.model),
        "flops": count_flops(experiment.model, experiment.example().to(ranks.device)),
        "seconds": round(seconds, 2),
        "samples_per_second": round(sum(one.samples for one in fitted) / max(seconds, 1e-9), 1),
        "peak_memory": peak_memory(ranks.device),
    }
    if evaluation.clock:
        results["clock"] = {name: round(one, 6) for name, one in evaluation.clock.items()}
    # Every process returns these values; the main one also writes them.
    plain = to_json_value(results)
    results.clear()
    results.update(plain)
    if not ranks.is_main:
        return
    # All outputs, then results.json, then the report, and at last the manifest, which marks the run
    # as finished.
    out = context.out
    if isinstance(experiment.model, SavableModule):
        experiment.model.save_pretrained(out / "model", spec_files(experiment.inference_spec))
    elif hasattr(experiment.model, "save_pretrained"):
        cast(Any, experiment.model).save_pretrained(out / "model")
    else:
        save_inner_model(experiment.model, out / "model")  # for `overt measure`
    io.write_arrays(out / "samples.npz", dict(evaluation.samples))
    if evaluation.elsewhere:
        io.write_arrays(out / "elsewhere.npz", dict(evaluation.elsewhere))
    if evaluation.gallery:
        save_gallery(out / "gallery", evaluation.gallery)
    count, flops = recipe.train.card, results["flops"]
    outcome = run_scorecard.write_scorecard(
        experiment, out, count, flops, context.seed, results["title"]
    )
    results["scorecard"] = run_scorecard.results_entry(outcome)
    io.write_json(out / "results.json", results)
    write_report(out / "report.html", [out])
    io.write_manifest(out, [name for name in SEALED_FILES if (out / name).is_file()])


def _check_same_data(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> None:
    """Raise if the data of a run differ from those of the attempt that it continues."""
    for one in now:
        # a run may read two parts of one split
        same = [it for it in before if (it["name"], it["split"]) == (one["name"], one["split"])]
        if same and all((it["hash"], it["n"]) != (one["hash"], one["n"]) for it in same):
            raise UserError(
                f"cannot resume with different data: {one['name']} {one['split']} has {one['n']} "
                f"items with the hash {one['hash'][:12]}, had {same[0]['n']} items with "
                f"{same[0]['hash'][:12]}. Restore the data, or choose another folder."
            )


@contextmanager
def stop_on_sigterm() -> Iterator[None]:
    """Raise `RunInterrupted` on SIGTERM, outside of training, which handles signals itself.

    Ctrl-C raises `KeyboardInterrupt` even if the parent process ignored SIGINT.
    """
    # Python allows signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked data-loading process
            os._exit(128 + number)
        raise RunInterrupted(
            "stopped at once; earlier checkpoints are complete, and the same command with --resume "
            "continues from there",
            number,
        )

    handlers = {signal.SIGTERM: stop, signal.SIGINT: signal.default_int_handler}
    former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _write_status(out: Path, results: dict[str, Any], status: str, first: bool) -> None:
    """Write the status of a run that ended early; a full disk must not hide the real error."""
    if not first:
        return
    results["status"] = status
    try:
        io.write_json(out / "results.json", results)
    except RunError:
        return


def published_json(figure: PublishedValue) -> dict[str, Any]:
    """Return a published value in the form of results.json."""
    return {
        "value": figure.value,
        "unit": figure.unit,
        "direction": "higher" if figure.higher_is_better else "lower",
        "source": figure.source,
    }


def describe_device(device: Any) -> str:
    """Return the name of the GPU, or device type, architecture and threads."""
    import platform

    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type} {platform.machine()}, {threads} threads"


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    import platform

    found = {"python": platform.python_version()}
    for package in ("overt", "torch", "numpy", "accelerate", "safetensors", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Return the commit of this checkout, with "+changes" if files differ; None if installed.

    A copy that is installed inside another repository is not a checkout.
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
    command = ["git", "--no-optional-locks", "-C", str(root), *words]  # leaves no lock
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
