"""Small models of five papers that are installed with the package.

They are models of `overt demo`, seed 0, with a few of their test samples. So `overt look` and
`overt serve` have something to show before anything is trained.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from overt.errors import UserError
from overt.inspect.inputs import Box, ModelInput

if TYPE_CHECKING:
    from overt.viz.gallery_sample import GallerySample

PREFIX = "overt:"
FOLDER = Path(__file__).parent / "pretrained_models"
NAMES = ("learned-attention", "self-supervised", "hard-attention", "grounded", "aligned-captions")
MAX_SAMPLES = 8  # of each model


def find_small_model(name: str) -> Path:
    """Return the run folder of an installed model.

    Args:
        name: The name of the model, with or without the prefix `overt:`.

    Raises:
        UserError: There is no such model.

    Example:
        >>> find_small_model("overt:hard-attention").name
        'hard-attention'
    """
    known = name.removeprefix(PREFIX)
    if known not in NAMES:
        listed = ", ".join(PREFIX + one for one in NAMES)
        raise UserError(f"no installed model is called '{known[:60]}': choose one of {listed}.")
    return FOLDER / known


def has_examples(name: str) -> bool:
    """Return whether this is an installed model or the folder of a run with test samples."""
    return name.startswith(PREFIX) or (Path(name) / "gallery").is_dir()


def example_input(name: str, writes: bool, chosen: str | None = None) -> ModelInput | None:
    """Return a test sample of an installed model or of a run, for a call without an input.

    Args:
        name: Name of the model, or folder of the run.
        writes: Whether the text of a sample is the output of the model, not its input.
        chosen: Id of the sample; the first by default.

    Returns:
        The input; None if no sample has this id.
    """
    from overt.viz.gallery_sample import load_gallery

    run = find_small_model(name) if name.startswith(PREFIX) else Path(name)
    samples = load_gallery(run / "gallery")
    sample = next((one for one in samples if chosen in (None, one.id)), None)
    if sample is None:
        return None
    return ModelInput(None if writes else sample.text or None, sample.image, boxes=boxes_of(sample))


def boxes_of(sample: "GallerySample") -> tuple[Box, ...]:
    """Return the regions of a sample as fractions of its photo, without padding."""
    if sample.image is None or sample.boxes is None:
        return ()
    height, width = sample.image.shape[:2]
    shares = (sample.boxes / [width, height, width, height]).clip(0, 1).tolist()
    return tuple((x0, y0, x1, y1) for x0, y0, x1, y1 in shares if x1 > x0 and y1 > y0)


def copy_models(demo: Path, folder: Path) -> None:
    """Copy the models of a finished demo, with a few samples each, to `folder`.

    Args:
        demo: The folder of `overt demo`.
        folder: The new folder; existing models are replaced.
    """
    import shutil

    from overt import io
    from overt.viz.gallery_sample import GallerySample, load_gallery, save_gallery

    for name in NAMES:
        io.verify(demo / name)
        with io.atomic_folder(folder / name) as made:
            shutil.copytree(demo / name / "model", made / "model")
            results = io.read_json(demo / name / "results.json")
            kept = {
                key: results[key]
                for key in ("title", "recipe", "about", "settings", "seed", "ours", "versions")
            }
            io.write_json(made / "results.json", {**kept, "command": "overt demo --out runs/demo"})
            # one sample per image, without maps: the model computes them
            samples = {
                sample.image.tobytes(): GallerySample(
                    id=sample.id,
                    image=sample.image,
                    text=sample.text,
                    prediction=sample.prediction,
                    confidence=sample.confidence,
                    truth=sample.truth,
                    boxes=sample.boxes,
                )
                for sample in reversed(load_gallery(demo / name / "gallery"))
                if sample.image is not None
            }
            save_gallery(made / "gallery", list(reversed(samples.values()))[:MAX_SAMPLES])
