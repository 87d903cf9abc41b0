"""`overt data`: which data sets are here, what is wrong, how to get one; words of captions."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from overt.cli.arguments import Context, Data, complete_data
from overt.cli.printing import Line, print_table
from overt.errors import BadInput, Damaged

data_app = typer.Typer(help="Data sets: which are here, what is wrong, how to get one.")


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
    print_table(f"Data sets {where}", ["name", "here", "what", "how to get it"], lines)


@data_app.command("check")
def check_sets(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="SET", autocompletion=complete_data)
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
    print_table(f"Data sets in {root}", ["name", "state"], lines)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise Damaged(f"{wrong[0].rstrip('.')}{more}.")


@data_app.command("prepare")
def prepare_sets(
    names: Annotated[list[str], typer.Argument(metavar="SET", autocompletion=complete_data)],
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
        print(sets.prepare(root, name, Line(name)))


# Captions

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
    print_table("Captions", ["file", "images", "captions"], lines)
