"""The commands. What can be wrong with a command line is found before anything heavy is imported.

Exit codes: 0 done, 2 bad input, 1 failed work, 130 and 143 stopped by a signal. What goes wrong is
said in one sentence on stderr; OVERT_TRACEBACK=1 adds where it happened.
"""

import json
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overt.errors import BadInput, Damaged, Failed, Stopped

if TYPE_CHECKING:
    from typer import Context
else:  # what is passed in is not typer's own class but the one below it
    Context = typer.Context.__mro__[1]


def _plain() -> bool:
    """Whether to print without colours and boxes: into a file or a pipe, or because asked to."""
    return sys.stdout is None or not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))


def _examples(*lines: str) -> str:
    """What stands below the options of a command: lines to copy, one below the other."""
    if _plain():
        return "\n".join(["\b", "Examples:", *(f"  $ {line}" for line in lines)])
    return "\n\n".join(["Examples:", *(f"- `{line}`" for line in lines)])


app = typer.Typer(
    name="overt",
    help="Attention you can see and test: learned, supervised, hard, aligned, measured, visible.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None if _plain() else "markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Data sets: which are here, what is wrong, how to get one.")
app.add_typer(data_app, name="data")


# Completion of names in the shell


def _complete_recipe(incomplete: str) -> list[str]:
    from overt.recipes import recipes

    return [name for name in recipes() if name.startswith(incomplete)]


def _complete_listed(incomplete: str) -> list[str]:
    return list(dict.fromkeys(_complete_recipe(incomplete) + _complete_table(incomplete)))


def _complete_table(incomplete: str) -> list[str]:
    from overt.recipes.tables import tables

    return [name for name in tables() if name.startswith(incomplete)]


def _complete_set(context: Context, incomplete: str) -> list[str]:
    """The keys of the recipe, or of the table's first recipe, that stands before on the line."""
    from overt.recipes import recipes, settings
    from overt.recipes.tables import tables

    makers = {**{name: table.rows[0].recipe for name, table in tables().items()}, **recipes()}
    words = [context.params.get("recipe"), context.params.get("name"), *context.args]
    for word in words:
        if word in makers:
            keys = settings.flatten(makers[word]())
            return [f"{key}=" for key in keys if key.startswith(incomplete)]
    return []


def _complete_data(incomplete: str) -> list[str]:
    from overt.data import sets

    return [each.name for each in sets.SETS if each.name.startswith(incomplete)]


# What several commands take

Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The seed of all random numbers.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]
Data = Annotated[
    Path | None, typer.Option("--data", help="The folder of data sets; else OVERT_DATA names it.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", autocompletion=_complete_set,
                 help="Change a setting; may be repeated. `overt list RECIPE` shows the keys."),
]  # fmt: skip
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what is in the folder.")]
Rows = Annotated[
    list[str] | None, typer.Option(help="Only these rows: repeat it, or put commas between.")
]


# The commands


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


@app.command("list", epilog=_examples("overt list", "overt list scenes-soft", "overt list ltpa-1"))
def list_(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="A recipe or a table.", autocompletion=_complete_listed
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """List recipes and tables, or show one with its settings.

    A recipe is the settings of one training under a name; a table is several of them, its rows.
    """
    from overt.recipes import find, listing, recipes, settings
    from overt.recipes.tables import tables

    known = [*recipes(), *tables()]
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
        _show_recipe(chosen)
    if table is not None:
        print(end="" if alone else "\n")
        _show_rows(table)
    if name is not None:
        return
    if _plain():
        print(listed())
        return
    for one in _lists():
        _print(*one)
        print()
    print(_HINT)


_HINT = (
    "`overt list NAME` shows the settings of a recipe and the rows of a table; `overt run "
    "RECIPE --out DIR` and `overt table TABLE --out DIR` run them."
)


def listed() -> str:
    """What `overt list` prints into a file or a pipe."""
    return "\n\n".join([*(_laid(*table) for table in _lists()), _HINT])


def _lists() -> list[tuple[str, list[str], list[list[str]]]]:
    """All recipes and all tables: a title, a header, and a line each."""
    from overt.recipes import recipes
    from overt.recipes.tables import tables

    found = [make() for make in recipes().values()]
    of_recipes = [[one.name, one.about, _figures(one.paper)] for one in found]
    of_tables = [[one.name, str(len(one.rows)), one.about] for one in tables().values()]
    return [
        ("Recipes", ["recipe", "what", "paper"], of_recipes),
        ("Tables", ["table", "rows", "what"], of_tables),
    ]


@app.command(
    epilog=_examples(
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
            autocompletion=_complete_recipe,
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
    if _first_process():
        held = folder.claim(out, made, seed, resume=resume)
        if held is not None and held.done:
            files.verify(out)
            _show_results(held.results)
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
        command=_command(context),
        title=title,
    )
    if _first_process():
        _show_results(results)
        print(f"\nEverything is in {out}; open {out / 'report.html'} in a browser.")


@app.command(
    epilog=_examples(
        "overt table scenes --out runs/scenes --seeds 3",
        "overt table ssa-1 --out runs/ssa-1 --rows none,mse --seeds 1 --data DATA",
        "overt table scenes --out runs/scenes --resume",
    )
)
def table(
    context: Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="TABLE",
            help="Its name; `overt list` has them all.",
            autocompletion=_complete_table,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder of the table, with a folder a run.")],
    rows: Rows = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="How many seeds a row.")] = 3,
    device: Device = "auto",
    data: Data = None,
    sets: Sets = None,
    resume: Resume = False,
) -> None:
    """Run what is missing of a table, and print it beside the paper.

    Rows that are finished are kept as they are, so a table can be filled bit by bit.
    """
    from overt.recipes import checks
    from overt.recipes.comparison import as_text
    from overt.recipes.tables import find, pick, run_table

    wanted = find(name)
    chosen = pick(wanted, _split(rows))
    checks.device(device)
    root = checks.data_root(data)
    _one_process("table")
    filled = run_table(
        wanted,
        out,
        rows=[row.label for row in chosen],
        seeds=seeds,
        device=device,
        data_root=root,
        sets=sets or [],
        resume=resume,
        command=_command(context),
        say=_say,
    )
    print()
    _print(f"{wanted.name}: {wanted.about}", *as_text(filled))
    print(f"\nmean ± standard deviation over seeds; written to {out / wanted.stem}.md.")
    if filled.failures:
        first = filled.failures[0]
        raise Failed(
            f"{len(filled.failures)} of {len(filled.entries)} runs failed, the first of them "
            f"{first.row} with seed {first.seed}: {first.error.rstrip('.')}; the others are kept, "
            "and the same command with --resume tries again."
        )


@app.command(epilog=_examples("overt demo", "overt demo --rows soft-attention --out runs/one"))
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

    wanted = showing.pick(_split(rows))
    checks.device(device)
    root = checks.data_root(data)
    _one_process("demo")
    folder.usable(out)
    folder.try_writing(out)
    results = showing.run_demo(out, wanted, seed=seed, device=device, data_root=root, say=_say)

    from overt.show.table import columns

    made = columns(results)
    header = ["row", *(f"{one.title} {one.arrow}".rstrip() for one in made)]
    lines = []
    for number, one in enumerate(results):
        cells = [column.cells[number] for column in made]
        lines.append([str(one.get("title") or one["recipe"]), *(cell.text for cell in cells)])
    print()
    _print(f"The demo, seed {seed}", header, lines)
    page = out / "report.html"
    print(
        f"\nLook at {page}: the same questions side by side, and where each model looked."
        f"\nNext: `overt serve {out}` opens a page to ask them yourself; `overt list` shows all"
        "\nrecipes, `overt run scenes-soft --out runs/soft` trains longer, and `overt look MODEL"
        "\nINPUT` shows where a model of yours looks."
    )


@app.command(
    epilog=_examples("overt report runs/soft", "overt report runs/soft runs/truth --out both.html")
)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Folders of runs.")],
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
    epilog=_examples(
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

    wish = looking.Wish(layer, head, query, way)
    looking.check(out, inputs, wish)
    checks.device(device)
    folder.usable(out.parent)
    viewed = looking.look(model, inputs, out, wish, device, _say)
    lines = [
        [one.title, str(len(one.layers)), str(one.heads), looking.summary(one, choice)]
        for one, choice in zip(viewed.panels, viewed.choices, strict=True)
    ]
    _print(viewed.title, ["attention", "layers", "heads", "drawn large"], lines)
    for note in viewed.notes:
        print(note)
    print(f"\nThe view is in {out}.")


@app.command(
    epilog=_examples("overt serve", "overt serve runs/demo hf:google/vit-base-patch16-224")
)
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

    checks.device(device)
    from overt.serve.running import serve as run

    run(models or [], host, port, device, _say)


@app.command(
    epilog=_examples(
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
            autocompletion=_complete_data,
        ),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Another model, run or maps, measured on the same samples.")
    ] = None,
    maps: Annotated[
        Path | None, typer.Option(help="Maps of somebody else beside those of the model.")
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
        _print("Measures", header, measuring.listing())
        return
    if model is None:
        raise BadInput("name what to measure: a run, a model or maps; `overt measure --help`.")
    named = tuple(_split(measures)) or None
    wish = measuring.Wish(model, data_set, named, maps, over, limit, seed, portion)
    measuring.check(wish, out, compare)
    checks.device(device)
    root = checks.data_root(data)
    card, other = measuring.run(wish, compare, out, root, device, _command(context), _say, _Line)
    if not _first_process():
        return
    _print(card.title, *card.table())
    for note in card.notes():
        print(note)
    if other is not None:
        print()
        gaps = card.compare(other)
        _print(f"{card.name} less {other.name}", *measuring.differences(gaps))
    print(f"\nEverything is in {out}; open {out / measuring.PAGE} in a browser.")


@app.command(
    epilog=_examples(
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

    if data is not None:
        checks.data_root(data)
    if repair:
        _repair(subject)
    elif subject is not None and opening.is_model(subject):
        _show_model(subject)
        return
    findings = examine.machine(data) if subject is None else examine.run_folder(Path(subject))
    lines = [[one.what, one.found, one.advice] for one in findings]
    _print(subject or "This machine", ["what", "found", "to do"], lines)
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


@data_app.callback(invoke_without_command=True)
def _data(context: Context) -> None:
    if context.invoked_subcommand is None:
        list_data(None)


@data_app.command("list")
def list_data(data: Data = None) -> None:
    """Which data sets there are, and which of them are here."""
    from overt.data import sets
    from overt.recipes import checks

    root = checks.data_root(data)
    here = sets.present(root or Path(os.devnull))
    lines = []
    for each in sets.SETS:
        found = each.name in here
        lines.append([each.name, "yes" if found else "no", each.what, "" if found else each.how])
    where = f"in {root}" if root else "(no folder is named: give --data or set OVERT_DATA)"
    _print(f"Data sets {where}", ["name", "here", "what", "how to get it"], lines)


@data_app.command("check")
def check_sets(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="SET", autocompletion=_complete_data)
    ] = None,
    data: Data = None,
) -> None:
    """Look through every file of a data set for what is wrong.

    Without a name, of all that are here.
    """
    from overt.data import sets
    from overt.recipes import checks

    chosen = [sets.find(name).name for name in names or []]
    root = sets.root_of(checks.data_root(data))
    if not names:
        chosen = list(sets.present(root))
    lines, wrong = [], []
    for name in chosen:
        problems = sets.check(root, name)
        wrong += problems
        lines += [[name, problem] for problem in problems or ["whole"]]
    _print(f"Data sets in {root}", ["name", "state"], lines)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise Damaged(f"{wrong[0].rstrip('.')}{more}.")


@data_app.command("prepare")
def prepare_sets(
    names: Annotated[list[str], typer.Argument(metavar="SET", autocompletion=_complete_data)],
    data: Data = None,
) -> None:
    """Download data sets, checked and resumable.

    One that is here and right is kept.
    """
    from overt.data import sets
    from overt.recipes import folder

    chosen = [sets.find(name).name for name in names]
    root = folder.usable(sets.root_of(data))
    for name in chosen:
        print(sets.prepare(root, name, _Line(name)))


CaptionFiles = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE", help="Captions: one a line, COCO's annotations, or Karpathy's .json."
    ),
]
CaptionSplit = Annotated[
    str | None, typer.Option(help="train, val or test of Karpathy's files; train if not told.")
]
CaptionImages = Annotated[
    Path | None, typer.Option(help="A list of image names, one a line: only their captions.")
]


@data_app.command("vocabulary")
def build_vocabulary(
    captions: CaptionFiles,
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    split: CaptionSplit = None,
    images: CaptionImages = None,
    minimum: Annotated[int, typer.Option(min=1, help="How often a word must be there.")] = 5,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many words.")] = None,
    pieces: Annotated[
        int | None, typer.Option(min=256, help="So many sub-words in the place of words.")
    ] = None,
) -> None:
    """Build a captioner's words, or sub-words, from captions."""
    if pieces is not None and limit is not None:
        raise BadInput("--limit is of words and --pieces of sub-words; give one of them.")
    _readable([*captions, *([] if images is None else [images])])

    from overt.measure.captions import building
    from overt.recipes import folder

    folder.usable(out)
    read = building.corpus(captions, split, _lines(images))
    known: building.Known = (
        building.words_of_captions(read, minimum, limit)
        if pieces is None
        else building.pieces_of_captions(read, pieces)
    )
    building.write_vocabulary(out, known, read)
    _show_corpus(read.sources)
    share = building.coverage(read, known)
    kind = "words" if pieces is None else "sub-words"
    print(f"\n{known.size - 5} {kind} cover {100 * share:.2f} % of the captions; kept in {out}.")


@data_app.command("frequencies")
def count_frequencies(
    captions: CaptionFiles,
    vocabulary: Annotated[
        Path, typer.Option(help="The vocabulary, from `overt data vocabulary`, that ids are of.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    split: CaptionSplit = None,
    images: CaptionImages = None,
) -> None:
    """Count in how many images each n-gram is said.

    That is how rare it is to CIDEr-D as a reward.
    """
    _readable([*captions, vocabulary, *([] if images is None else [images])])

    from overt.data.vocabulary import load_words
    from overt.measure.captions import building
    from overt.recipes import folder

    folder.usable(out)
    known = load_words(vocabulary)
    read = building.corpus(captions, split, _lines(images))
    counted = building.frequencies(read, known)
    building.write_frequencies(out, counted, known, read)
    _show_corpus(read.sources)
    sizes = ", ".join(str(len(one.keys)) for one in counted.tables)
    print(f"\n{sizes} n-grams of 1 to 4 in {counted.documents} images; kept in {out}.")


def _readable(paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.exists():
            raise BadInput(f"{path} is not there.")


def _lines(path: Path | None) -> list[str] | None:
    """The lines of a list that are not blank; None where there is no list."""
    if path is None:
        return None

    from overt.data.photos import read_lines

    return read_lines(path)


def _show_corpus(sources: Sequence[Mapping[str, Any]]) -> None:
    lines = [[str(one["file"]), str(one["images"]), str(one["captions"])] for one in sources]
    _print("Captions", ["file", "images", "captions"], lines)


# The process and its command line


def _first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _one_process(command: str) -> None:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise BadInput(
            f"`overt {command}` runs in one process; start `overt run` with torchrun or "
            "accelerate for a run on many."
        )


def _command(context: Context) -> list[str]:
    """The command line as it was given, for the record."""
    given = context.find_root().obj
    return ["overt", *given] if isinstance(given, list) else ["overt"]


def _split(values: Iterable[str] | None) -> list[str]:
    parts = [part.strip() for value in values or () for part in value.split(",")]
    return [part for part in parts if part]


# Printing


def _print(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A table: with boxes on a terminal, else one line a row, columns apart by two spaces."""
    if not _plain():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(title=Text(title), title_justify="left", header_style="bold")
        for name in header:
            drawn.add_column(Text(name), overflow="fold")
        for line in lines:
            drawn.add_row(*map(Text, line))
        Console().print(drawn)
        return
    print(_laid(title, header, lines))


def _laid(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table as plain text."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    laid = [title]
    for line in (header, *lines):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        laid.append("  ".join(cells).rstrip())
    return "\n".join(laid)


def _show_recipe(recipe: Any) -> None:
    """All about one recipe: the docstring of its function, the paper's figures, the settings."""
    import inspect
    import textwrap

    from overt.recipes import recipes, settings

    print(f"{recipe.name}: {recipe.about}\n")
    about = inspect.getdoc(recipes()[recipe.name])
    if about:
        print(f"{about}\n")
    if recipe.paper:
        lines = [
            [name, f"{one.value:g} {one.unit}".rstrip(), one.source]
            for name, one in recipe.paper.items()
        ]
        _print("Stated in the paper", ["measure", "value", "where"], lines)
        print()
    lines = [[one.key, settings.shown(one.value), one.wants] for one in settings.describe(recipe)]
    _print("Settings, for --set KEY=VALUE", ["key", "value", "takes"], lines)
    print("\nWhat they mean")
    for section, text in settings.explain(recipe).items():
        words = " ".join(text.split())
        print(textwrap.fill(words, 96, initial_indent=f"{section}: ", subsequent_indent="  "))


def _show_rows(table: Any) -> None:
    """The rows of a table, each a recipe and what is changed in it."""
    lines = [
        [one.label, one.recipe().name, " ".join(one.changes) or "nothing"] for one in table.rows
    ]
    _print(f"Table {table.name}: {table.about}", ["row", "recipe", "changed"], lines)


def _show_results(results: Mapping[str, Any]) -> None:
    """What a run measured, beside the paper's figures where there are some."""
    paper = results.get("paper") or {}
    lines = []
    for name, one in (results.get("ours") or {}).items():
        stated = paper.get(name)
        figure = f"{stated['value']:g} {stated['unit']}".rstrip() if stated else ""
        low, high = one.get("low"), one.get("high")
        spread = f" [{low:.4g}, {high:.4g}]" if low is not None and high is not None else ""
        value = "–" if one["value"] is None else f"{one['value']:.4g}{spread}"
        lines.append([name, value, str(one["unit"]), f"{one['split']}, {one['n']}", figure])
    title = (
        f"{results['recipe']}, seed {results['seed']}, {results.get('seconds', 0):g} s of training"
    )
    _print(title, ["measure", "ours [95 %]", "unit", "split, n", "paper"], lines)


def _show_model(name: str) -> None:
    """A model's attention modules and how each can be seen; one that cannot is exit code 1."""
    from overt.recipes import checkup

    found = checkup.model(name, _say)
    _print(name, ["what", "found"], found.facts)
    print()
    _print("Attention modules", checkup.HEADER, [one.line() for one in found.modules])
    print(f"\n{found.verdict()}")
    if found.problem:
        raise Failed(found.problem)


def _figures(paper: Mapping[str, Any]) -> str:
    """The first figure of a paper, and how many more there are."""
    for name, one in paper.items():
        more = f" and {len(paper) - 1} more" if len(paper) > 1 else ""
        return f"{name} {one.value:g} {one.unit}".rstrip() + more
    return ""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Line:
    """The progress of a download, on one line of a terminal; silent elsewhere."""

    def __init__(self, name: str) -> None:
        self.name, self.shown = name, -1

    def __call__(self, done: int, total: int | None) -> None:
        now = done * 100 // total if total else done >> 20
        if now == self.shown or sys.stderr is None or not sys.stderr.isatty():
            return
        self.shown = now
        end = "\n" if total and done >= total else ""
        print(f"\r{self.name}: {now} {'%' if total else 'MB'}", end=end, file=sys.stderr)


# The end


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
    try:
        result = command.main(given, prog_name="overt", standalone_mode=False, obj=given)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            raise end.__context__ from None
        raise
    if result == 130:  # how typer passes Ctrl-C on
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


def ended(error: BaseException) -> int:
    """The exit code of an exception, after its sentence was said."""
    code, sentence = _verdict(error)
    if sentence and sys.stderr is not None:
        with suppress(OSError):
            line = _one_line(sentence)
            stop = "" if line[-1] in ".?!)" else "."
            print(f"overt: {line}{stop}", file=sys.stderr, flush=True)
    if isinstance(error, OSError) and sys.stdout is not None:
        # What is still in the buffer cannot be written; without this, Python complains at its end.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _one_line(text: str) -> str:
    """The text on one line that no terminal takes for anything but text."""
    line = " ".join(text.split())
    line = "".join(one if one.isprintable() else repr(one)[1:-1] for one in line)
    return line if len(line) <= 2000 else line[:1997] + "..."


def _usage(error: Any) -> str:
    """What is wrong with the options of a command, and where they are explained."""
    said = error.format_message().strip().rstrip(".")
    path = getattr(getattr(error, "ctx", None), "command_path", None) or "overt"
    return f"{said}; `{path} --help` shows what it takes."


# What an install without extras lacks, by the name it is imported under, and what pip calls it.
_PACKAGES = {
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "numba": "numba",
    "fastapi": "fastapi",
    "starlette": "starlette",
    "pydantic": "pydantic",
    "uvicorn": "uvicorn",
    "timm": "timm",
    "tensorboard": "tensorboard",
    "easy_vqa": "easy-vqa",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "ot": "POT",
    "anywidget": "anywidget",
    "traitlets": "traitlets",
}


def _missing(error: BaseException | None) -> str | None:
    """The package that this fails for the lack of, where an extra of ours brings it."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__ if isinstance(error, ImportError) else None
    name = (error.name or "").partition(".")[0] if error is not None else ""
    return name if name in _PACKAGES else None


def _verdict(error: BaseException) -> tuple[int, str]:
    usage = typer.BadParameter.__mro__[1:3]  # typer carries its own click, or imports it
    match error:
        case BadInput() | Damaged():
            return 2, str(error)
        case Failed():
            return 1, str(error)
        case Stopped():
            return error.code, str(error)
        case KeyboardInterrupt() | typer.Abort():
            return 130, "stopped at once; what was saved before is whole."
        case SystemExit():
            return error.code if isinstance(error.code, int) else int(error.code is not None), ""
        case BrokenPipeError():
            return 141, ""  # nobody reads on, as for any program in a pipe
        case MemoryError():
            return 1, "there was not enough memory; lower train.batch, data.limit or model.width."
    if isinstance(error, usage):
        return 2, _usage(error)
    if (lacks := _missing(error)) is not None:
        return 2, f"this needs {lacks}, which is not here; pip install {_PACKAGES[lacks]}."
    said = f"{type(error).__name__}: {error}"[:300]
    if type(error).__name__ == "OutOfMemoryError":
        return 1, f"the device ran out of memory; lower train.batch or model.width ({said})."
    if isinstance(error, OSError):
        return 1, f"the system refused: {said}."
    return 1, f"a defect in overt, not in what you gave: {said}; OVERT_TRACEBACK=1 shows where."
