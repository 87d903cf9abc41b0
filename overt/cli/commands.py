"""Each command of `overt`, and how a command line is run."""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer

from overt.cli.arguments import (
    Context,
    Data,
    Device,
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
    first_process,
    folder_of_run,
    named,
    one_process,
    split_values,
)
from overt.cli.data import data_app
from overt.cli.ending import ended
from overt.cli.printing import (
    Line,
    plain,
    print_table,
    say,
    show_list,
    show_model,
    show_recipe,
    show_results,
    show_rows,
)
from overt.errors import BadInput, Damaged, Failed

PATHS = {"--out", "--data", "--maps", "--images", "--vocabulary"}  # options that name one
app = typer.Typer(
    name="overt",
    help="Attention you can see and test: learned, supervised, hard, aligned, measured, visible.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None if plain() else "markdown",
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
        typer.Argument(metavar="NAME", help="A recipe or a table.", autocompletion=complete_listed),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """List recipes and tables, or show one with its settings.

    A recipe is the settings of one training under a name; a table is several of them, its rows.
    """
    from overt.recipes import find, listing, recipes, settings
    from overt.recipes.tables import tables

    known = list({**recipes(), **tables()})  # some tables have the name of a recipe
    if name is not None and name not in known:
        offered = settings.offer(name, known)
        raise BadInput(f"there is no recipe or table {name[:60]!r}; {offered}.")
    table = tables().get(name) if name is not None else None
    alone = table is not None and name not in recipes()
    chosen = None if name is None or alone else find(name)
    if as_json:
        print(json.dumps(listing(name), indent=2))
        return
    if chosen is not None:
        show_recipe(chosen)
    if table is not None:
        print(end="" if alone else "\n")
        show_rows(table)
    if name is None:
        show_list()


@app.command(
    epilog=examples(
        "overt run scenes-soft --out runs/soft",
        "overt run scenes-truth --out runs/truth --set supervise.weight=2 --seed 1",
        "overt run scenes-soft --out runs/soft --resume",
    )
)
def run(
    context: Context,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="Its name; `overt list` has them all.",
            autocompletion=complete_recipe,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder of the run; made if it is not there.")],
    seed: Seed = 0,
    device: Device = "auto",
    data: Data = None,
    sets: Sets = None,
    resume: Resume = False,
    title: Annotated[
        str | None, typer.Option(help="What tables and pages call the run; its recipe's name.")
    ] = None,
) -> None:
    """Train and measure one recipe.

    Writes results.json, samples.npz, checkpoints, the model and report.html into --out.
    """
    from overt import files
    from overt.recipes import checks, find, folder, settings

    made = settings.apply(find(recipe), sets or [])
    checks.device(device)
    root = checks.data_root(data)
    if first_process():
        held = folder.claim(out, made, seed, resume=resume)
        if held is not None and held.done:
            files.verify(out)
            show_results(held.results)
            print(f"\n{out} already holds {held}, and it is whole; nothing was run.")
            return
        checks.data(made, root)
        folder.try_writing(out)

    from overt.recipes import running

    results = running.run(
        made,
        out,
        seed=seed,
        device=device,
        data_root=root,
        resume=resume,
        command=command_line(context),
        title=title,
    )
    if first_process():
        show_results(results)
        print(f"\nEverything is in {out}; open {out / 'report.html'} in a browser.")


@app.command(
    epilog=examples(
        "overt table scenes --out runs/scenes --seeds 3",
        "overt table ssa-1 --out runs/ssa-1 --rows none,mse --seeds 1 --data DATA",
        "overt table scenes --out runs/scenes --jobs 4 --resume",
    )
)
def table(
    context: Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="TABLE",
            help="Its name; `overt list` has them all.",
            autocompletion=complete_table,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder of the table, with a folder a run.")],
    rows: Rows = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="How many seeds a row.")] = 3,
    device: Device = "auto",
    data: Data = None,
    sets: Sets = None,
    resume: Resume = False,
    jobs: Annotated[
        int,
        typer.Option(min=1, max=256, help="How many runs at a time, each in its own process."),
    ] = 1,
) -> None:
    """Run what is missing of a table, and print it beside the paper.

    Rows that are finished are kept as they are, so a table can be filled bit by bit.
    """
    from overt.recipes import checks
    from overt.recipes.comparison import as_text
    from overt.recipes.tables import find, pick, run_table

    wanted = find(name)
    chosen = pick(wanted, split_values(rows, "--rows"))
    checks.device(device)
    root = checks.data_root(data)
    one_process("table")
    filled = run_table(
        wanted,
        out,
        rows=[row.label for row in chosen],
        seeds=seeds,
        device=device,
        data_root=root,
        sets=sets or [],
        resume=resume,
        command=command_line(context),
        jobs=jobs,
        say=say,
    )
    print()
    print_table(f"{wanted.name}: {wanted.about}", *as_text(filled))
    print(f"\nmean ± standard deviation over seeds; written to {out / wanted.stem}.md.")
    if filled.failures:
        first = filled.failures[0]
        raise Failed(
            f"{len(filled.failures)} of {len(filled.entries)} runs failed, the first of them "
            f"{first.row} with seed {first.seed}: {first.error.rstrip('.')}; the others are kept, "
            "and the same command with --resume tries again."
        )


@app.command(epilog=examples("overt demo", "overt demo --rows soft-attention --out runs/one"))
def demo(
    context: Context,
    out: Annotated[Path, typer.Option(help="The folder of the demo.")] = Path("runs/demo"),
    rows: Rows = None,
    seed: Seed = 0,
    device: Device = "auto",
    data: Data = None,
) -> None:
    """Train four small models and show where they look.

    With and without attention, on questions about drawn scenes; some minutes on two cores.
    """
    from overt.recipes import checks, folder
    from overt.recipes import demo as showing

    wanted = showing.pick(split_values(rows, "--rows"))
    checks.device(device)
    root = checks.data_root(data)
    one_process("demo")
    folder.usable(out)
    folder.try_writing(out)
    results = showing.run_demo(out, wanted, seed=seed, device=device, data_root=root, say=say)

    from overt.show.table import columns

    made = columns(results)
    header = ["row", *(f"{one.title} {one.arrow}".rstrip() for one in made)]
    lines = []
    for number, one in enumerate(results):
        cells = [column.cells[number] for column in made]
        lines.append([str(one.get("title") or one["recipe"]), *(cell.text for cell in cells)])
    print()
    print_table(f"The demo, seed {seed}", header, lines)
    page = out / "report.html"
    print(
        f"\nLook at {page}: the same questions side by side, and where each model looked."
        f"\nNext: `overt serve {out}` opens a page to ask them yourself; `overt list` shows all"
        "\nrecipes, `overt run scenes-soft --out runs/soft` trains longer, and `overt look MODEL"
        "\nINPUT` shows where a model of yours looks."
    )


@app.command(
    epilog=examples("overt report runs/soft", "overt report runs/soft runs/truth --out both.html")
)
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Folders of runs.", parser=folder_of_run)
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    samples: Annotated[
        int, typer.Option(min=1, max=1000, help="How many samples at most are shown.")
    ] = 64,
) -> None:
    """Write a page about a run, or about several compared.

    Runs are compared on the same samples. A folder of runs stands for all that are in it.
    """
    from overt import files
    from overt.recipes import folder

    found = [one for path in runs for one in folder.runs_below(path)]
    target = out if out.suffix.lower() in (".html", ".htm") else out / "report.html"
    folder.usable(target.parent)
    if (target.parent / files.MANIFEST).exists():
        raise BadInput(f"{target} would change a finished run; choose another place with --out.")

    from overt.show import page

    print(page.report(target, found, samples))


@app.command(
    epilog=examples(
        "overt look hf:google/vit-base-patch16-224 photo.jpg",
        "overt look timm:vit_base_patch16_224 photo.jpg --map relevance --out view.png",
        "overt look hf:openai-community/gpt2 'the cat sat' --layer 3 --query sat",
    )
)
def look(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A run, a model's folder, hf:NAME or timm:NAME.")
    ],
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT", help="A picture, a text in quotes, or one of each."),
    ],
    out: Annotated[
        Path, typer.Option(help="The view to write: .html to look around in, .png or .svg.")
    ] = Path("look.html"),
    layer: Annotated[
        str | None, typer.Option(help="A layer by number or by the name of its module; the last.")
    ] = None,
    head: Annotated[int | None, typer.Option(help="A head by number; the mean of all.")] = None,
    query: Annotated[
        str | None,
        typer.Option(help="What looks: a word, 'class', a position, or 'mean' of all."),
    ] = None,
    way: Annotated[
        str,
        typer.Option(
            "--map",
            help="raw: weights of a layer; values: times the length of what they carry; gradient: "
            "times what raises the answer; rollout, relevance: through all layers; search, "
            "of a run: attention on the masked input that it is surest on.",
        ),
    ] = "raw",
    device: Device = "cpu",
) -> None:
    """Show where a model looks: in a picture, a text, or both."""
    from overt.recipes import checks, folder, looking

    named(model, "model")
    wish = looking.Wish(layer, head, query, way)
    looking.check(out, inputs, wish)
    checks.device(device)
    folder.usable(out.parent)
    viewed = looking.look(model, inputs, out, wish, device, say)
    lines = [
        [one.title, str(len(one.layers)), str(one.heads), looking.summary(one, choice)]
        for one, choice in zip(viewed.panels, viewed.choices, strict=True)
    ]
    print_table(viewed.title, ["attention", "layers", "heads", "drawn large"], lines)
    for note in viewed.notes:
        print(note)
    print(f"\nThe view is in {out}.")


@app.command(epilog=examples("overt serve", "overt serve runs/demo hf:google/vit-base-patch16-224"))
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Runs, folders of runs or models, as `overt look` takes them; else runs/demo.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen at; as it is, only this machine can ask.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0 takes one that is free.")
    ] = 8642,
    device: Device = "cpu",
) -> None:
    """Open a page to ask models where they look.

    Words and parts of the picture can be taken away there, to see what changes.
    """
    from overt.recipes import checks

    for model in models or []:
        named(model, "model")
    checks.device(device)
    from overt.serve.running import serve as run

    run(models or [], host, port, device, say)


@app.command(
    epilog=examples(
        "overt measure runs/demo/soft-attention",
        "overt measure hf:google/vit-base-patch16-224 osie --data DATA --limit 100",
        "overt measure runs/soft --compare runs/truth --out both",
        "overt measure --list",
    )
)
def measure(
    context: Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL_OR_RUN",
            help="A run, a model's folder, hf:NAME, timm:NAME, or maps: an .npz, a folder of PNGs.",
        ),
    ] = None,
    data_set: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="A data set, NAME or NAME:SPLIT, or a folder of photos; of a run, its own test.",
            autocompletion=complete_data,
        ),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Another model, run or maps, measured on the same samples.")
    ] = None,
    maps: Annotated[
        Path | None,
        typer.Option(help="Maps of somebody else too: an .npz, an array under each id, or PNGs."),
    ] = None,
    measures: Annotated[
        list[str] | None,
        typer.Option(help="Only these: repeat it, or put commas between; `all` takes every one."),
    ] = None,
    over: Annotated[
        str | None, typer.Option(help="What is judged, image or text; else what the truth is of.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many items.")] = None,
    out: Annotated[
        Path, typer.Option(help="The folder of the scorecard; the same command goes on there.")
    ] = Path("scorecard"),
    portion: Annotated[int, typer.Option(min=1, max=4096, help="Items at a time.")] = 16,
    listed: Annotated[
        bool, typer.Option("--list", help="List all measures and what they cannot say.")
    ] = False,
    seed: Seed = 0,
    device: Device = "cpu",
    data: Data = None,
) -> None:
    """Score attention beside controls, and beside people.

    By agreement with what people marked, by what removing parts does, and beside maps that know
    nothing. The same command goes on where it was stopped.
    """
    from overt.recipes import checks, measuring

    if listed:
        header = ["measure", "better", "range", "unit", "needs", "what it cannot say"]
        print_table("Measures", header, measuring.listing())
        return
    if model is None:
        raise BadInput("name what to measure: a run, a model or maps; `overt measure --help`.")
    for word, what in ((model, "model or run"), (data_set, "data set"), (compare, "other model")):
        if word is not None:
            named(word, what)
    chosen = tuple(split_values(measures, "--measures")) or None
    wish = measuring.Wish(model, data_set, chosen, maps, over, limit, seed, portion)
    measuring.check(wish, out, compare)
    checks.device(device)
    root = checks.data_root(data)
    card, other = measuring.run(wish, compare, out, root, device, command_line(context), say, Line)
    if not first_process():
        return
    print_table(card.title, *card.table())
    for note in card.notes():
        print(note)
    if other is not None:
        print()
        gaps = card.compare(other)
        print_table(f"{card.name} less {other.name}", *measuring.differences(gaps))
        if left_out := card.not_compared(other):
            print(left_out)
    print(f"\nEverything is in {out}; open {out / measuring.PAGE} in a browser.")


@app.command(
    epilog=examples(
        "overt doctor", "overt doctor hf:openai-community/gpt2", "overt doctor --repair runs/soft"
    )
)
def doctor(
    subject: Annotated[
        str | None,
        typer.Argument(metavar="RUN|MODEL", help="A run's folder, a model's, hf:NAME, timm:NAME."),
    ] = None,
    data: Data = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Set aside what is broken in RUN; without, only look."),
    ] = False,
) -> None:
    """Check this machine, the folder of a run, or a model.

    Of this machine: what is installed and which data sets are here. Of a run: whether it is whole.
    Of a model: which attention modules it has, and how exactly each of them can be seen.
    """
    from overt.recipes import checks, opening
    from overt.recipes import doctor as examine

    if subject is not None:
        named(subject, "run or model")
    if data is not None:
        checks.data_root(data)
    if repair:
        _repair(subject)
    elif subject is not None and opening.is_model(subject):
        show_model(subject)
        return
    findings = examine.machine(data) if subject is None else examine.run_folder(Path(subject))
    lines = [[one.what, one.found, one.advice] for one in findings]
    print_table(subject or "This machine", ["what", "found", "to do"], lines)
    for one in findings:
        if one.wrong:
            sentence = f"{one.what}: {one.found} {one.advice}".rstrip()
            raise Damaged(sentence) if subject is not None else Failed(sentence)


def _repair(subject: str | None) -> None:
    """Mend the folder of a run, a line a deed."""
    from overt.recipes import doctor as examine
    from overt.recipes.repair import repair

    if subject is None:
        raise BadInput("--repair needs the folder of a run: overt doctor --repair RUN.")
    examine.check_run(Path(subject))
    for sentence in repair(Path(subject)) or ["nothing to do"]:
        typer.echo(f"repair: {sentence}")


def main(args: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; what went wrong is said in one sentence."""
    given = list(sys.argv[1:] if args is None else args)
    # Threads that spin while they wait slow torch tenfold on a machine that has other work to do.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ± is no reason to fail
    try:
        code = _invoke(given)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BaseException as error:
        if os.environ.get("OVERT_TRACEBACK") and not isinstance(error, SystemExit):
            traceback.print_exc()
        return ended(error)


def _invoke(given: list[str]) -> int:
    if given == ["list"]:  # to read words takes typer longer than all of this
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
    if result == 130:  # how typer passes Ctrl-C on
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


def _refuse_empty(given: Sequence[str]) -> None:
    """An empty path, as of a shell's variable that is not set, would be the folder one is in."""
    for word, after in zip_longest(given, given[1:]):
        option, equals, value = word.partition("=")
        if option in PATHS and value == "" and (equals or after == ""):
            raise BadInput(f"{option} is empty; give it a path, `.` for this folder.")
