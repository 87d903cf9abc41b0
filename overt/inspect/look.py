"""`overt look`: run a model on an image, a text or both, and view its attention."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt.errors import UserError, rust_panic_as_corrupt_file
from overt.experiments.recipe_file import RecipeFile
from overt.inspect.answers import Answer, answer_note, model_answers, similarity_note
from overt.inspect.attached_view import view_attached
from overt.inspect.deletion_check import check_deletion
from overt.inspect.inputs import (
    ModelInput,
    PreparedCall,
    TextRange,
    cover_removed,
    is_image_path,
    load_photo,
    read_inputs,
    require_video,
    run_model,
)
from overt.inspect.load_model import load_model, locate_model, quiet_transformers
from overt.inspect.load_run import is_custom_run, load_custom_model
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.panels import (
    ALL_LAYER_MAPS,
    GRADIENT_MAPS,
    MAPS,
    AxisNames,
    ViewOptions,
    answer_score,
    build_panel,
    compute_map,
    group_calls,
    infer_layouts,
)
from overt.inspect.predict_answer import view_network
from overt.inspect.small_models import example_input, has_examples
from overt.inspect.written_answer import (
    build_answer_panel,
    prepare_written_call,
    score_words,
    token_scores,
)

if TYPE_CHECKING:
    from overt.viz.panel import Choice, Panel

__all__ = [
    "ModelInput",
    "ModelView",
    "ViewOptions",
    "check_request",
    "describe_view",
    "load_model",
    "load_photo",
    "locate_model",
    "look",
    "model_answers",
    "read_inputs",
    "select_device",
    "view_model",
    "write_view",
]  # the Python code that a page shows uses only these names
PAGE_SUFFIXES = (".html", ".htm")
SUFFIXES = (".png", ".svg", *PAGE_SUFFIXES)


@dataclass(frozen=True, eq=False)
class ModelView:
    """Panels with choices, notes and answers of one model and input.

    `answers` are the most probable first, with probabilities where available. `origin` maps
    characters of the displayed text to those of the input; None is the identity.
    """

    title: str
    panels: tuple["Panel", ...]
    choices: tuple["Choice", ...]
    notes: tuple[str, ...] = ()
    answers: tuple[Answer, ...] = ()
    origin: tuple[TextRange, ...] | None = None


def check_request(
    out: Path, inputs: Sequence[str], options: ViewOptions, has_example: bool = False
) -> None:
    """Check the arguments before anything is loaded.

    A model that `has_example` needs no input.

    Raises:
        UserError: if an argument is invalid.
    """
    if out.suffix.lower() not in SUFFIXES:
        raise UserError(f"Unsupported format {out.suffix!r} of {out}: use .png, .svg or .html.")
    if out.is_dir():
        raise UserError(f"{out} is a folder: give a file name.")
    for word in inputs:
        if is_image_path(word) and out.exists() and Path(word).exists() and out.samefile(word):
            raise UserError(f"{out} is the input image: choose another file for --out.")
    if options.method not in MAPS:
        raise UserError(f"Unknown map '{options.method}': choose one of {', '.join(MAPS)}.")
    if options.method in ALL_LAYER_MAPS and (options.layer is not None or options.head is not None):
        raise UserError(
            f"The map '{options.method}' combines all layers and heads: leave out --layer "
            "and --head."
        )
    pictures = [word for word in inputs if is_image_path(word)]
    if not inputs and not has_example:
        raise UserError(
            "No input: give an image, a text in quotes, or both; a run needs none, or the id of "
            "one of its test samples."
        )
    if len(pictures) > 1 and out.suffix.lower() not in PAGE_SUFFIXES:
        raise UserError(
            f"Several images are the frames of a video, which needs a page (.html), not {out}."
        )
    if len(pictures) > 1 and options.deletion:
        raise UserError("Deletion is not available for a video: leave out --deletion.")
    if len(inputs) - len(pictures) > 1:
        raise UserError(
            f"expected one text, got {len(inputs) - len(pictures)}: put the text into quotes, "
            'as in "a dog on the grass".'
        )


def look(
    name: str,
    inputs: Sequence[str],
    out: Path,
    options: ViewOptions,
    device: str = "cpu",
    say: Callable[[str], None] = lambda line: None,
    files: Sequence[RecipeFile] = (),
    root: Path | None = None,
) -> ModelView:
    """Run the model on the inputs, write the view, and return it.

    An installed model or a run takes the id of one of its test samples, and no input is the first.
    `files` define the recipes of runs that are not of overt, and `root` is the folder of their
    datasets.
    """
    check_request(out, inputs, options, has_example=has_examples(name))
    model_input = read_inputs(inputs) if inputs else None
    if files and is_custom_run(Path(name), files):
        loaded = load_custom_model(Path(name), name, files, root)
    else:
        loaded = load_model(locate_model(name, say), name)
    if has_examples(name) and len(inputs) < 2:
        writes = loaded.spec is not None and loaded.spec.generates_text
        example = example_input(name, writes, *inputs)
        model_input = model_input if example is None else example
    if model_input is None:
        raise UserError(f"{name} has no test samples: give an image, a text in quotes, or both.")
    loaded.model.to(select_device(device))
    viewed = view_model(loaded, model_input, options)
    if not viewed.panels and out.suffix.lower() not in PAGE_SUFFIXES:
        raise UserError(f"{name} has no attention to draw: use a page (.html) or --map gradient.")
    write_view(out, viewed)
    return viewed


def select_device(name: str) -> Any:
    """Return the device of this name, checked; `auto` is a GPU if available."""
    import torch

    from overt.train.distributed import check_device

    if name != "auto":
        check_device(name)
        return torch.device(name)
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"


def describe_view(shown: "Panel", choice: "Choice") -> str:
    """Return the choice of a panel and its strongest keys as a phrase."""
    from overt.viz.attention_figure import describe_strongest
    from overt.viz.panel import describe_choice, weight_row

    return (
        f"{describe_choice(shown, choice)}; {describe_strongest(shown, weight_row(shown, choice))}"
    )


def write_view(out: Path | str, viewed: ModelView) -> None:
    """Write the view as .html, .png or .svg."""
    from overt import io
    from overt.viz import attention_figure as drawing
    from overt.viz import browse_page

    out = Path(out)
    if out.suffix.lower() in PAGE_SUFFIXES:
        written = any(shown.chances for shown in viewed.panels)  # the page shows the answer
        notes = [note for note in viewed.notes if not (written and note.startswith("It writes: "))]
        page = browse_page.render_page(viewed.panels, viewed.choices, viewed.title, notes)
        io.write_text(out, page)
    else:
        drawing.save_panels(out, viewed.panels, viewed.choices)


@rust_panic_as_corrupt_file("the tokenizer or processor files of this model are invalid")
def view_model(
    loaded: LoadedModel,
    model_input: ModelInput,
    options: ViewOptions = ViewOptions(),  # noqa: B008  # frozen
) -> ModelView:
    """Run the model under `watch` and build panels of its attention.

    A part of the model without the chosen layer, head or query is left out, unless no part has it.
    Removed parts of the input are removed from the features of a network of overt, and covered for
    other models (`cover_removed`).

    Args:
        loaded: A model from `load_model`.
        model_input: The image, the text or both, and the parts to remove.
        options: Which layer, head, query and map to show first.

    Returns:
        The panels, the answers of the model and notes about them.

    Raises:
        UserError: No part of the model has the chosen layer, head or query.

    Example:
        >>> from overt.inspect.small_models import example_input
        >>> loaded = load_model(locate_model("overt:hard-attention"), "hard-attention")
        >>> view = view_model(loaded, example_input("overt:hard-attention", writes=False))
        >>> view.title, len(view.panels)
        ('Where hard-attention (HAN) looks', 1)
    """
    import torch

    from overt.capture import UncapturedAttentionError, watch
    from overt.nn.backbone_attention.attached_model import AttachedAttention

    if model_input.frames:
        require_video(loaded)
    # Networks of overt remove parts by masks; for other models they are covered.
    if loaded.spec is not None:
        panels, choices, notes, answers = view_network(loaded, model_input, options)
        notes = [*notes, answer_note(answers, loaded.spec.generates_text)]
        return _make_view(loaded, panels, choices, notes, answers)
    whole = model_input
    model_input, covered = cover_removed(loaded, model_input)
    if isinstance(loaded.model, AttachedAttention):
        return _make_view(loaded, *view_attached(loaded, model_input, options))
    with quiet_transformers():  # the notes state truncation
        prepared = prepare_written_call(loaded, model_input, options.max_flops)
        before: tuple[float, ...] = ()
        rewritten = None
        if covered and prepared.answer is not None:
            rewritten = (prepared.answer.text, math.nan)
            prepared, before = _read_former_answer(loaded, whole, model_input, options)
        layouts, problem = infer_layouts(loaded, prepared)
    try:
        with torch.set_grad_enabled(options.method in GRADIENT_MAPS), watch(loaded.model) as trace:
            output = run_model(loaded.name, prepared)
    except UncapturedAttentionError as error:
        raise UserError(f"{loaded.name}: {error}") from error
    answers = [rewritten] if rewritten else model_answers(loaded, output, prepared)
    about = [answer_note(answers), similarity_note(output, prepared)]
    notes = [*loaded.notes, *covered, *prepared.notes, *about]
    if problem:
        notes.append(f"The positions could not be identified: {problem}.")
    scores = None if prepared.answer is None else token_scores(output, prepared.answer)
    target = None
    if options.method in GRADIENT_MAPS:
        target = answer_score(loaded, output) if scores is None else scores.sum()
    source = partial(compute_map, method=options.method, model=loaded.model, target=target)
    names = AxisNames(loaded.tokenizer, prepared, layouts, loaded.model)
    makers = [
        partial(build_panel, group, names, model_input, options, source)
        for group in group_calls(trace)
    ]
    if scores is not None:  # first, the words of the answer
        makers[:0] = [
            partial(build_answer_panel, group, names, prepared, options, loaded.model, scores)
            for group in group_calls(trace)
            if names.reads_answer(group.calls[0])
        ]
    panels, choices, refused = [], [], []
    for make in makers:
        try:
            shown, choice = make()
        except UserError as error:
            refused.append(error)
            continue
        if shown.chances:
            shown = replace(shown, before=before)
            if options.deletion and not covered:
                check = check_deletion(loaded, prepared, shown, choice, options.max_flops)
                shown = replace(shown, deletion=check)
        panels.append(shown)
        choices.append(choice)
    if not panels:
        raise refused[0]
    return replace(_make_view(loaded, panels, choices, notes, answers), origin=prepared.origin)


def _read_former_answer(
    loaded: LoadedModel, whole: ModelInput, covered: ModelInput, options: ViewOptions
) -> tuple[PreparedCall, tuple[float, ...]]:
    """Prepare a call on the covered input that reads the answer to the whole input.

    Also return the probability of each word of this answer on the whole input.
    """
    kept = replace(whole, removed_boxes=(), removed_ranges=())
    former = prepare_written_call(loaded, kept, options.max_flops)
    before = () if former.answer is None else score_words(loaded, former)
    return prepare_written_call(loaded, covered, options.max_flops, former.answer), before


def _make_view(
    loaded: LoadedModel,
    panels: list["Panel"],
    choices: list["Choice"],
    notes: list[str],
    answers: Sequence[Answer],
) -> ModelView:
    name = loaded.name.rstrip("/").rsplit("/", maxsplit=1)[-1]
    title = f"Where {name} ({type(loaded.model).__name__}) looks"
    kept = tuple(note for note in notes if note)
    return ModelView(title, tuple(panels), tuple(choices), kept, tuple(answers))
