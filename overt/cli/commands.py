"""The commands of `overt`."""

import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer

from overt.cli.arguments import (
    Context,
    Data,
    Device,
    Recipes,
    Resume,
    Rows,
    Seed,
    Sets,
    command_line,
    complete_data,
    complete_listed,
    complete_recipe,
    complete_table,
    examples,
    is_given,
    is_main_process,
    parse_run_folder,
    require_name,
    require_single_process,
    split_values,
)
from overt.cli.data import data_app
from overt.cli.exit_codes import report_error
from overt.cli.output import (
    ProgressLine,
    announce,
    is_plain,
    print_table,
    say,
    show,
    show_list,
    show_model,
    show_recipe,
    show_results,
    show_rows,
)
from overt.errors import CorruptFileError, RunError, UserError, print_to_stderr

PATH_OPTIONS = {"--out", "--data", "--maps", "--images", "--vocabulary", "--reuse"}
app = typer.Typer(
    name="overt",
    help="Capture, supervise, measure and visualize attention.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None if is_plain() else "markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data_app, name="data")


def _version(wanted: bool) -> bool:
    if wanted:
        from overt import __version__

        print(f"overt {__version__}")
        raise typer.Exit()
    return wanted


@app.callback(invoke_without_command=True)
def _start(
    context: Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("list", epilog=examples("overt list", "overt list scenes-soft", "overt list ltpa-1"))
def list_(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A recipe or a table, or FILE.py:NAME.",
            autocompletion=complete_listed,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """List recipes and tables, or show one with its settings.

    A recipe is a named experiment with its settings; a table compares several of them.
    """
    import inspect

    from overt.experiments import settings
    from overt.experiments.recipe_file import is_recipe_file
    from overt.papers.catalog import find_recipe, listing, recipes, tables

    if name is not None and is_recipe_file(name):
        _announce_import(name)
        _list_file(name, as_json)
        return
    known = list({**recipes(), **tables()})  # some tables have the name of a recipe
    if name is not None and name not in known:
        suggestion = settings.suggest_names(name, known)
        raise UserError(f"unknown recipe or table {name[:60]!r}; {suggestion}")
    table = tables().get(name) if name is not None else None
    alone = table is not None and name not in recipes()
    chosen = None if name is None or alone else find_recipe(name)
    if as_json:
        print(json.dumps(listing(name), indent=2))
        return
    if chosen is not None:
        show_recipe(chosen, inspect.getdoc(recipes()[chosen.name]) or "")
    if table is not None:
        print(end="" if alone else "\n")
        show_rows(table)
    if name is None:
        show_list()


def _announce_import(word: str | None) -> None:
    """Announce the import of a Python file, which may import PyTorch."""
    from overt.experiments.recipe_file import is_recipe_file

    if word is not None and is_recipe_file(word):
        announce(f"importing {word} ...")


def _list_file(word: str, as_json: bool) -> None:
    """Show the recipe or the table of a Python file."""
    from overt.experiments.recipe_file import load_recipe_file
    from overt.experiments.table import TableSpec
    from overt.papers.catalog import describe_recipe, describe_table, recipes

    file = load_recipe_file(word, recipes())
    found = file.found
    if as_json:
        of_recipes = [describe_recipe(one) for one in file.recipes().values()]
        of_tables = [describe_table(found)] if isinstance(found, TableSpec) else []
        print(json.dumps({"recipes": of_recipes, "tables": of_tables}, indent=2))
    elif isinstance(found, TableSpec):
        show_rows(found)
    else:
        show_recipe(found, file.doc)


@app.command(
    epilog=examples(
        "overt run scenes-soft --out runs/soft",
        "overt run scenes-truth --out runs/truth --set supervise.weight=2 --seed 1",
        "overt run --out runs/truth --resume",
        "overt run mine.py:experiment --out runs/mine",
    )
)
def run(
    context: Context,
    out: Annotated[Path, typer.Option(help="Folder of the run; created if it does not exist.")],
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="Name of the recipe, see `overt list`, or FILE.py:NAME for one of your own; "
            "with --resume that of the run by default.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    data: Data = None,
    sets: Sets = None,
    resume: Resume = False,
    title: Annotated[
        str | None,
        typer.Option(help="Name of the run in tables and reports; the recipe's name by default."),
    ] = None,
) -> None:
    """Train and evaluate a recipe.

    Writes results.json, samples.npz, checkpoints, the model and report.html to --out. With
    --resume, recipe, settings and seed are those of the run; name a FILE.py:NAME again.
    """
    from overt import io
    from overt.experiments import preflight, run_folder, settings
    from overt.experiments.recipe_file import file_errors
    from overt.papers.catalog import recipes, resolve_recipe

    _announce_import(recipe)
    existing = run_folder.read_run(run_folder.check_folder_path(out)) if resume else None
    if recipe is None:
        recipe = run_folder.recipe_name(existing, out, recipes())
    chosen, file = resolve_recipe(recipe)
    if existing is None or existing.results["recipe"] != chosen.name:
        chosen = settings.apply(chosen, sets or [])
    else:
        chosen = existing.restore(chosen, sets or [])
        if not is_given(context, "seed"):
            seed = int(existing.results["seed"])
    preflight.check_device(device)
    root = preflight.resolve_data_root(data)
    if is_main_process():
        existing = run_folder.check_claim(out, chosen, seed, resume=resume)
        if existing is not None and existing.is_finished:
            io.verify(out)
            show_results(existing.results)
            show(f"\n{out} already has {existing}, and its files are intact; nothing was run.")
            return
        preflight.check_dataset(chosen, root)
        run_folder.check_writable(out)
        announce(f"running {chosen.name} in {out}: loading PyTorch and the data ...")

    from overt.experiments import runner
    from overt.papers.catalog import build

    with file_errors(None if file is None else file.path):
        results = runner.run(
            chosen,
            out,
            build,
            seed=seed,
            device=device,
            data_root=root,
            resume=resume,
            command=command_line(context),
            title=title,
        )
    if is_main_process():
        show_results(results)
        show(f"\nWrote {out}; open {out / 'report.html'} in a browser.")


@app.command(
    epilog=examples(
        "overt table scenes --out runs/scenes --seeds 3",
        "overt table ssa-1 --out runs/ssa-1 --rows none,mse --seeds 1 --data DATA",
        "overt table scenes --out runs/scenes --seeds 5 --first-seed 20",
        "overt table scenes --out runs/scenes --jobs 4 --resume",
        'overt table scenes --out runs/scenes --jobs 16 --launcher "srun -n1"',
        "overt table mine.py:table --out runs/mine --jobs 2",
    )
)
def table(
    context: Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="TABLE",
            help="Name of the table, see `overt list`, or FILE.py:NAME for one of your own.",
            autocompletion=complete_table,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the table, with one folder per run.")],
    rows: Rows = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Number of seeds per row.")] = 3,
    first_seed: Annotated[
        int,
        typer.Option(min=0, max=2**32 - 1000, help="The first seed; the others follow it."),
    ] = 0,
    device: Device = "auto",
    data: Data = None,
    sets: Sets = None,
    resume: Resume = False,
    jobs: Annotated[
        int,
        typer.Option(min=1, max=256, help="Number of runs at a time, each in its own process."),
    ] = 1,
    launcher: Annotated[
        str,
        typer.Option(
            help="Command that starts each of these processes on another machine, such as "
            "`srun -n1 --gpus=1 --exclusive`; the machines share --out and --data."
        ),
    ] = "",
    reuse: Annotated[
        Path | None,
        typer.Option(
            help="Folder of earlier results to reuse, as TABLE/ROW/seed-N; ./results or "
            "./benchmarks by default, if it exists."
        ),
    ] = None,
) -> None:
    """Run the missing rows of a table and print it with the paper.

    Finished runs are not repeated, so a table can be completed in several calls.
    """
    from overt.experiments import preflight
    from overt.experiments.table import as_text, table_notes
    from overt.experiments.table_runner import default_reuse, run_table, select_rows
    from overt.experiments.workers import split_launcher
    from overt.papers.catalog import build, resolve_table

    _announce_import(name)
    spec, file = resolve_table(name)
    chosen = select_rows(spec, split_values(rows, "--rows"))
    starter = split_launcher(launcher)
    # The device is one of the machines that the launcher chooses, not of this one.
    (preflight.check_device_name if starter else preflight.check_device)(device)
    root = preflight.resolve_data_root(data)
    require_single_process("table")
    if reuse is not None and not reuse.is_dir():
        raise UserError(f"--reuse must be an existing folder, got {str(reuse)!r}.")
    span = f"{seeds} seeds from {first_seed}" if first_seed else f"{seeds} seeds"
    announce(f"running {spec.name} in {out}: {len(chosen)} rows, {span} ...")
    filled = run_table(
        spec,
        out,
        build,
        rows=[row.label for row in chosen],
        seeds=seeds,
        first_seed=first_seed,
        device=device,
        data_root=root,
        sets=sets or [],
        resume=resume,
        command=command_line(context),
        jobs=jobs,
        launcher=starter,
        say=say,
        reuse=reuse if reuse is not None else default_reuse(),
        file=file,
    )
    print()
    print_table(f"{spec.name}: {spec.about}", *as_text(filled))
    show(f"\nMean ± standard deviation over seeds; written to {out / spec.stem}.md.")
    for note in table_notes(filled):
        show(note)
    if filled.failures:
        first = filled.failures[0]
        raise RunError(
            f"{len(filled.failures)} of {len(filled.runs)} runs failed, first {first.row} with "
            f"seed {first.seed}: {first.error.rstrip('.')}; the other runs are kept, and the same "
            "command with --resume tries again."
        )


@app.command(epilog=examples("overt demo", "overt demo --rows soft-attention --out runs/one"))
def demo(
    context: Context,
    out: Annotated[Path, typer.Option(help="Folder of the demo.")] = Path("runs/demo"),
    rows: Rows = None,
    seed: Seed = 0,
    device: Device = "auto",
    data: Data = None,
) -> None:
    """Train the methods of five papers beside their controls.

    Small models on synthetic images, a few minutes on two cores; then a page shows where they
    attend.
    """
    from overt.experiments import preflight, run_folder
    from overt.papers import demo as demo_module

    chosen = demo_module.select_rows(split_values(rows, "--rows"))
    preflight.check_device(device)
    root = preflight.resolve_data_root(data)
    require_single_process("demo")
    run_folder.refuse_run_folder(run_folder.check_folder_path(out))
    run_folder.check_writable(out)
    announce(f"running the demo in {out}: loading PyTorch, then generating images ...")
    results = demo_module.run_demo(out, chosen, seed=seed, device=device, data_root=root, say=say)
    print()
    header, *lines = demo_module.comparison_table(out, chosen) or _metric_table(results)
    print_table(f"The demo, seed {seed}: one seed is an illustration", header, lines)
    report_page = out / "report.html"
    print(
        f"\nOpen {report_page} in a browser: the same images with and without each method."
        f"\nNext: `overt serve {out}` serves the models for your own input, `overt list` shows"
        "\nall recipes, `overt run scenes-soft --out runs/soft` trains longer, and"
        "\n`overt look MODEL INPUT` shows the attention of your own model."
    )


def _metric_table(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a header and a line of metrics for each run."""
    from overt.viz.results_table import result_columns

    columns = result_columns(results)
    lines = [["row", *(f"{one.title} {one.arrow}".rstrip() for one in columns)]]
    for number, one in enumerate(results):
        cells = [column.cells[number] for column in columns]
        lines.append([str(one.get("title") or one["recipe"]), *(cell.text for cell in cells)])
    return lines


@app.command(
    epilog=examples("overt report runs/soft", "overt report runs/soft runs/truth --out both.html")
)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Folders of runs, or folders that contain runs.",
            parser=parse_run_folder,
        ),
    ],
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path("report.html"),
    samples: Annotated[
        int, typer.Option(min=1, max=1000, help="Maximum number of samples to show.")
    ] = 64,
) -> None:
    """Write a report of a run, or a comparison of several.

    Runs are compared on the same samples.
    """
    from overt.experiments import run_folder

    found = [one for path in runs for one in run_folder.find_runs(path)]
    is_page = out.suffix.lower() in (".html", ".htm")
    if out.suffix[1:].isalpha() and not is_page and not out.is_dir():
        raise UserError(f"Unsupported format {out.suffix!r} of {out}: use .html, or a folder.")
    target = out if is_page else out / "report.html"
    run_folder.check_output_file(out, target)
    announce(f"writing a report of {len(found)} runs ...")

    from overt.viz import report_page

    show(str(report_page.write_report(target, found, samples)))


@app.command(
    epilog=examples(
        "overt look overt:hard-attention",
        "overt look runs/demo/hard-attention",
        "overt look hf:google/vit-base-patch16-224 photo.jpg",
        "overt look timm:vit_base_patch16_224 photo.jpg --map relevance",
        "overt look hf:openai-community/gpt2 'the cat sat' --layer 3 --query sat",
    )
)
def look(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A run, a model folder, hf:NAME, timm:NAME or overt:NAME."
        ),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT",
            help="An image, a text in quotes, or one of each; several images are a video; "
            "for a run or overt:NAME, the id of a test sample, or nothing for the first.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="File to write: interactive .html, .png or .svg.")
    ] = Path("look.html"),
    layer: Annotated[
        str | None, typer.Option(help="Layer, by number or module name; the last by default.")
    ] = None,
    head: Annotated[
        int | None, typer.Option(help="Head, by number; the mean of all heads by default.")
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(help="Query: a word, 'class', a position, or 'mean' of all."),
    ] = None,
    way: Annotated[
        str,
        typer.Option(
            "--map",
            help="attention: weights of a layer; values: weights times value norms; gradient: "
            "weights times their gradient; rollout, relevance: through all layers; search (runs "
            "only): attention on the masked input with the highest confidence.",
        ),
    ] = "attention",
    deletion: Annotated[
        bool,
        typer.Option(
            "--deletion",
            help="For the words of a written answer: is a word less probable without the cells of "
            "its map than without random cells? Runs the model once per word, and ten times.",
        ),
    ] = False,
    recipe: Recipes = None,
    device: Device = "cpu",
) -> None:
    """Show where a model attends: in an image, a text, or both."""
    from overt.experiments import preflight, run_folder
    from overt.inspect import look as look_module
    from overt.inspect import small_models
    from overt.papers.catalog import load_recipe_files

    require_name(model, "model")
    options = look_module.ViewOptions(layer, head, query, way, deletion=deletion)
    given = inputs or []
    look_module.check_request(out, given, options, has_example=small_models.has_examples(model))
    preflight.check_device(device)
    run_folder.check_output_file(out)
    announce(f"loading {model} ...")
    files, root = load_recipe_files(recipe or []), preflight.resolve_data_root(None)
    viewed = look_module.look(model, given, out, options, device, say, files, root)
    lines = [
        [one.title, str(len(one.layers)), str(one.heads), look_module.describe_view(one, choice)]
        for one, choice in zip(viewed.panels, viewed.choices, strict=True)
    ]
    print_table(viewed.title, ["attention", "layers", "heads", "shown"], lines)
    for note in viewed.notes:
        show(note)
    show(f"\nWrote {out}.")


@app.command(epilog=examples("overt serve", "overt serve runs/demo hf:google/vit-base-patch16-224"))
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Runs, folders of runs, or models as for `overt look`; by default runs/demo, or "
            "else the installed models.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; by default only this machine can connect.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 selects a free one.")] = 8642,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Another host name of the server, such as that of a proxy."
        ),
    ] = None,
    recipe: Recipes = None,
    device: Device = "cpu",
) -> None:
    """Serve models on a local page that shows where they attend.

    Words and parts of the image can be removed to see how the answer changes.
    """
    from overt.experiments import preflight
    from overt.papers.catalog import load_recipe_files

    for model in models or []:
        require_name(model, "model")
    preflight.check_device(device)
    announce(f"loading {', '.join(models or ['small models of the five papers'])} ...")
    files, root = load_recipe_files(recipe or []), preflight.resolve_data_root(None)
    from overt.inspect.server.run_server import serve as run

    run(models or [], host, port, device, say, allow_host or [], files, root)


@app.command(
    epilog=examples(
        "overt measure runs/demo/soft-attention",
        "overt measure hf:google/vit-base-patch16-224 osie --data DATA --limit 100",
        "overt measure runs/soft --compare runs/truth --out both",
        "overt measure MODEL photos --method rollout,gradcam,ig",
        "overt measure --list",
    )
)
def measure(
    context: Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL_OR_RUN",
            help="A run, a model folder, hf:NAME, timm:NAME, or maps: an .npz or a folder of PNGs.",
        ),
    ] = None,
    data_set: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="Dataset as NAME or NAME:SPLIT, or a folder of photos; runs have test data.",
            autocompletion=complete_data,
        ),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Another model, run or maps, measured on the same samples.")
    ] = None,
    maps: Annotated[
        Path | None,
        typer.Option(
            help="Additional maps: an .npz with one array per sample id, or a folder of PNGs."
        ),
    ] = None,
    measures: Annotated[
        list[str] | None,
        typer.Option(help="Only these metrics: comma-separated or repeated; `all` for every one."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Also score maps of these methods, comma-separated: attention, values, rollout, "
            "relevance, gradcam, gradcam++, hirescam, layercam, saliency, inputxgradient, "
            "smoothgrad, vargrad, ig, deeplift, occlusion, rise, shap, lime."
        ),
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(help="Evaluate the map over image or text; that of the target by default."),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Only the first samples, this many; the last image is scored with all of its "
            "questions.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the scorecard; the same command continues there.")
    ] = Path("scorecard"),
    portion: Annotated[int, typer.Option(min=1, max=4096, help="Items per batch.")] = 16,
    listed: Annotated[
        bool, typer.Option("--list", help="List all metrics and their limits.")
    ] = False,
    recipe: Recipes = None,
    seed: Seed = 0,
    device: Device = "cpu",
    data: Data = None,
) -> None:
    """Score attention maps beside control maps and human maps.

    Metrics of agreement with annotations and of the effect of removing parts. The same command
    continues where it was stopped.
    """
    from overt.experiments import preflight
    from overt.inspect import measure as measure_module
    from overt.papers.catalog import load_recipe_files

    if listed:
        announce("loading the metrics ...")
        header = ["metric", "measures", "better", "range", "unit", "needs", "cannot show"]
        print_table("Metrics", header, measure_module.list_metrics())
        return
    if model is None:
        raise UserError("overt measure needs a run, a model or maps; see `overt measure --help`.")
    for word, what in ((model, "model or run"), (data_set, "dataset"), (compare, "other model")):
        if word is not None:
            require_name(word, what)
    chosen = tuple(split_values(measures, "--measures")) or None
    files = load_recipe_files(recipe or [])
    request = measure_module.MeasureRequest(
        model,
        data_set,
        chosen,
        maps,
        over,
        limit,
        seed,
        portion,
        files,
        tuple(split_values(method, "--method")),
    )
    measure_module.check_request(request, out, compare)
    announce(f"loading {model} ...")
    preflight.check_device(device)
    root = preflight.resolve_data_root(data)
    card, other = measure_module.run_measure(
        request, compare, out, root, device, command_line(context), say, ProgressLine
    )
    if not is_main_process():
        return
    print_table(card.title, *card.table())
    for note in card.notes():
        show(note)
    if other is not None:
        print()
        gaps = card.compare(other)
        print_table(f"{card.name} minus {other.name}", *measure_module.difference_table(gaps))
        if left_out := card.not_compared(other):
            show(left_out)
    show(f"\nWrote {out}; open {out / measure_module.PAGE_FILE} in a browser.")


@app.command(
    epilog=examples(
        "overt bench --model runs/demo/soft-attention --limit 20",
        "overt bench --model hf:google/vit-base-patch16-224 --on photos",
        "overt bench --model VQA=runs/vqa-0 --model VQA=runs/vqa-1 --jobs 2",
        "overt bench --model mine.py:model --on mine.py:data --maps my-maps",
    )
)
def bench(
    context: Context,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A model as for `overt measure`, or FILE.py:NAME, a function that returns a "
            "module of batches; NAME=MODEL sets its name. Repeat for several. Models with one "
            "name are runs of one model with different seeds.",
        ),
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            help="A dataset as for `overt measure`, or FILE.py:NAME; repeat for several. By "
            "default the test set of a run.",
            autocompletion=complete_data,
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Methods as for `overt measure`, comma-separated; by default all that apply."
        ),
    ] = None,
    measures: Annotated[
        list[str] | None,
        typer.Option(help="Metrics as for `overt measure`, comma-separated or repeated."),
    ] = None,
    maps: Annotated[
        list[Path] | None,
        typer.Option(
            help="Submitted maps of a further method: a folder with maps.npz or PNG images, and "
            "maps.json; or an .npz. Repeat for several."
        ),
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(help="Evaluate maps over image or text; that of the target by default."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first items of each dataset, this many.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder of the results; the same command continues there.")
    ] = Path("bench"),
    portion: Annotated[int, typer.Option(min=1, max=4096, help="Items per batch.")] = 8,
    jobs: Annotated[
        int,
        typer.Option(
            min=1,
            max=256,
            help="Processes on this machine; `torchrun` divides the models over several machines.",
        ),
    ] = 1,
    recipe: Recipes = None,
    seed: Seed = 0,
    device: Device = "cpu",
    data: Data = None,
) -> None:
    """Rank explanation methods by metrics, and say which to trust.

    Every method beside control maps and the target, with intervals and sets of ranks. The same
    command continues where it was stopped.
    """
    from overt.experiments import preflight, run_folder
    from overt.inspect import benchmark
    from overt.papers.catalog import load_recipe_files

    for word in (*(model or []), *(on or [])):
        require_name(word, "model or dataset")
    run_folder.check_folder_path(out)
    request = benchmark.BenchmarkRequest(
        tuple(model or ()),
        tuple(on or ()),
        tuple(split_values(method, "--method")),
        tuple(split_values(measures, "--measures")),
        tuple(maps or ()),
        over,
        limit,
        seed,
        portion,
        load_recipe_files(recipe or []),
    )
    benchmark.benchmark_pairs(request)
    preflight.check_device(device)
    root = preflight.resolve_data_root(data)
    announce(f"loading {len(request.models)} models ...")
    command = " ".join(command_line(context))
    found = benchmark.run_benchmark(request, out, root, device, jobs, command, say)
    if found is None:
        return
    for title, header, lines in benchmark.standing_tables(found):
        print_table(title, header, lines)
    print_table("Metrics", *benchmark.agreement_table(found))
    show(f"\nWrote {out}; open {out / benchmark.PAGE} in a browser.")


@app.command(
    epilog=examples(
        "overt doctor",
        "overt doctor hf:openai-community/gpt2",
        "overt doctor hf:openai-community/gpt2 --compare --dtype bfloat16",
        "overt doctor --repair runs/soft",
    )
)
def doctor(
    subject: Annotated[
        str | None,
        typer.Argument(metavar="RUN|MODEL", help="A run, a model folder, hf:NAME or timm:NAME."),
    ] = None,
    data: Data = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Set damaged files of RUN aside; without it, only check."),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Compare outputs, generated tokens and maps of MODEL under eager, sdpa and "
            "flash-attention.",
        ),
    ] = False,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="With --compare: also in this floating-point type, such as bfloat16; "
            "comma-separated or repeated."
        ),
    ] = None,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="With --compare: also under torch.compile, which is slow."),
    ] = False,
    device: Device = "cpu",
) -> None:
    """Check this machine, a run, or a model.

    This machine: installed packages and available datasets. A run: whether its files are intact. A
    model: its attention modules, how exactly each is captured, and with --compare how much its
    answers and maps depend on the attention implementation.
    """
    from overt.experiments import preflight
    from overt.inspect import doctor as doctor_module
    from overt.inspect import load_model

    if subject is not None:
        require_name(subject, "run or model")
    if data is not None:
        preflight.resolve_data_root(data)
    preflight.check_device_name(device)
    dtypes = split_values(dtype, "--dtype")
    if (dtypes or compiled) and not compare:
        raise UserError(f"{'--dtype' if dtypes else '--compile'} needs --compare.")
    is_model = subject is not None and load_model.is_model(subject)
    if compare and (repair or not is_model):
        raise UserError("--compare needs a model: `overt doctor MODEL --compare`.")
    announce(f"checking {subject or 'this machine'} ...")
    if repair:
        _repair(subject)
    elif subject is not None and is_model:
        show_model(subject, device, dtypes if compare else None, compiled)
        return
    if subject is None:
        findings = doctor_module.brief_findings(doctor_module.check_machine(data))
    else:
        findings = doctor_module.check_run_folder(Path(subject))
    lines = [[one.what, one.found, one.advice] for one in findings]
    print_table(subject or "This machine", ["check", "result", "advice"], lines)
    for one in findings:
        if one.wrong:
            sentence = f"{one.what}: {one.found} {one.advice}".rstrip()
            raise CorruptFileError(sentence) if subject is not None else RunError(sentence)


def _repair(subject: str | None) -> None:
    """Repair the folder of a run and print what was done."""
    from overt.experiments.repair import repair
    from overt.inspect import doctor as doctor_module

    if subject is None:
        raise UserError("--repair needs the folder of a run: `overt doctor --repair RUN`.")
    doctor_module.require_run(Path(subject))
    for sentence in repair(Path(subject)) or ["nothing to do"]:
        show(f"repair: {sentence}")


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; errors are printed as one line."""
    given = list(sys.argv[1:] if args is None else args)
    _open_streams()
    # Spinning OpenMP threads make torch ten times slower on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # do not fail on a terminal without ±
    try:
        code = _invoke(given)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BaseException as error:
        if os.environ.get("OVERT_TRACEBACK") and not isinstance(error, SystemExit):
            print_to_stderr(traceback.format_exc())
        return report_error(error, given[0] if given else "")


def _open_streams() -> None:
    """Reopen closed streams (`2>&-`): else a file of a run would become stdout or stderr."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # uses the lowest free descriptor


def _invoke(given: list[str]) -> int:
    if given == ["list"]:  # parsing with typer takes longer than the command
        list_()
        return 0
    command = typer.main.get_command(app)
    _refuse_empty(given)
    try:
        result = command.main(given, prog_name="overt", standalone_mode=False, obj=given)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        raise
    if result == 130:  # typer's code for Ctrl-C
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


def _refuse_empty(given: Sequence[str]) -> None:
    """Raise `UserError` for an empty path, such as from an unset shell variable."""
    for word, after in zip_longest(given, given[1:]):
        option, equals, value = word.partition("=")
        if option in PATH_OPTIONS and value == "" and (equals or after == ""):
            raise UserError(f"{option} is empty: give a path, or `.` for this folder.")
