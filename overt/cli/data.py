"""`overt data`: list, check and download datasets; vocabularies and n-grams of captions."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from overt.cli.arguments import Context, Data, complete_data
from overt.cli.output import ProgressLine, print_table, show
from overt.errors import CorruptFileError, UserError

data_app = typer.Typer(help="List, check and download datasets.")


@data_app.callback(invoke_without_command=True)
def _data(context: Context) -> None:
    if context.invoked_subcommand is None:
        list_data(None)


@data_app.command("list")
def list_data(data: Data = None) -> None:
    """List datasets and whether they are available."""
    from overt.data import catalog
    from overt.experiments import preflight

    root = preflight.resolve_data_root(data)
    here = catalog.available_datasets(root or Path(os.devnull))
    lines = []
    for each in catalog.DATASETS:
        found = each.name in here
        lines.append(
            [
                each.name,
                "yes" if found else "no",
                each.description,
                "" if found else each.instructions,
            ]
        )
    where = f"in {root}" if root else "(no folder: give --data or set OVERT_DATA)"
    print_table(f"Datasets {where}", ["name", "available", "description", "how to get it"], lines)


@data_app.command("check")
def check_sets(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SET",
            help="Names of datasets; all available ones by default.",
            autocompletion=complete_data,
        ),
    ] = None,
    data: Data = None,
) -> None:
    """Check every file of datasets."""
    from overt.data import catalog
    from overt.experiments import preflight

    chosen = [catalog.find_dataset(name).name for name in names or []]
    root = catalog.data_root(preflight.resolve_data_root(data))
    if not names:
        chosen = list(catalog.available_datasets(root))
    lines, wrong = [], []
    for name in chosen:
        problems = catalog.check_dataset(root, name)
        wrong += problems
        lines += [[name, problem] for problem in problems or ["intact"]]
    print_table(f"Datasets in {root}", ["name", "state"], lines)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise CorruptFileError(f"{wrong[0].rstrip('.')}{more}.")


@data_app.command("prepare")
def prepare_sets(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="SET",
            help="Names of datasets; see `overt data list`.",
            autocompletion=complete_data,
        ),
    ],
    data: Data = None,
) -> None:
    """Download datasets and check them.

    An intact dataset is not downloaded again.
    """
    from overt.data import catalog
    from overt.experiments import run_folder

    chosen = [catalog.find_dataset(name).name for name in names]
    root = run_folder.check_folder_path(catalog.data_root(data), "--data" if data else "OVERT_DATA")
    for name in chosen:
        show(catalog.prepare_dataset(root, name, ProgressLine(name)))


# Captions

CaptionFiles = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE", help="Captions: one per line, COCO annotations, or Karpathy's .json."
    ),
]
CaptionSplit = Annotated[
    str | None, typer.Option(help="train, val or test of Karpathy's files; train by default.")
]
CaptionImages = Annotated[
    Path | None, typer.Option(help="File with image names, one per line: use only their captions.")
]


@data_app.command("vocabulary")
def build_vocabulary(
    captions: CaptionFiles,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    split: CaptionSplit = None,
    images: CaptionImages = None,
    minimum: Annotated[
        int, typer.Option(min=1, help="Minimum number of occurrences of a word.")
    ] = 5,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of words.")] = None,
    pieces: Annotated[
        int | None, typer.Option(min=256, help="Use this many sub-words instead of words.")
    ] = None,
) -> None:
    """Build the vocabulary of a captioner."""
    if pieces is not None and limit is not None:
        raise UserError("--limit (words) and --pieces (sub-words) cannot be combined: give one.")
    _require_files([*captions, *([] if images is None else [images])])

    from overt.experiments import run_folder
    from overt.metrics.captions import caption_corpus

    run_folder.check_folder_path(out)
    read = caption_corpus.read_corpus(captions, split, _lines(images))
    known: caption_corpus.AnyVocabulary = (
        caption_corpus.build_vocabulary(read, minimum, limit)
        if pieces is None
        else caption_corpus.build_subwords(read, pieces)
    )
    caption_corpus.write_vocabulary(out, known, read)
    _show_corpus(read.sources)
    share = caption_corpus.vocabulary_coverage(read, known)
    kind = "words" if pieces is None else "sub-words"
    print(f"\n{known.size - 5} {kind} cover {100 * share:.2f} % of the captions; written to {out}.")


@data_app.command("frequencies")
def count_frequencies(
    captions: CaptionFiles,
    vocabulary: Annotated[
        Path, typer.Option(help="Vocabulary of the ids, from `overt data vocabulary`.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    split: CaptionSplit = None,
    images: CaptionImages = None,
) -> None:
    """Count the document frequencies of CIDEr-D."""
    _require_files([*captions, vocabulary, *([] if images is None else [images])])

    from overt.data.vocabulary import load_vocabulary
    from overt.experiments import run_folder
    from overt.metrics.captions import caption_corpus

    run_folder.check_folder_path(out)
    known = load_vocabulary(vocabulary)
    read = caption_corpus.read_corpus(captions, split, _lines(images))
    counted = caption_corpus.caption_frequencies(read, known)
    caption_corpus.write_frequencies(out, counted, known, read)
    _show_corpus(read.sources)
    sizes = ", ".join(str(len(one.keys)) for one in counted.tables)
    print(f"\n{sizes} n-grams of 1 to 4 in {counted.documents} images; written to {out}.")


def _require_files(paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist.")


def _lines(path: Path | None) -> list[str] | None:
    """Return the lines of a file that are not blank; None without a file."""
    if path is None:
        return None

    from overt.data.photo_dataset import read_lines

    return read_lines(path)


def _show_corpus(sources: Sequence[Mapping[str, Any]]) -> None:
    lines = [[str(one["file"]), str(one["images"]), str(one["captions"])] for one in sources]
    print_table("Captions", ["file", "images", "captions"], lines)
