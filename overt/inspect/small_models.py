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


def example_input(name: str) -> ModelInput:
    """Return the first test sample of an installed model, for a call without an input."""
    from overt.experiments.inference_spec import read_spec
    from overt.viz.gallery_sample import load_gallery

    run = find_small_model(name)
    sample = load_gallery(run / "gallery")[0]
    writes = read_spec(run / "model").generates_text  # its text is output, not input
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
