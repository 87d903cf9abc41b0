"""The models that a server answers for, opened when first asked, a few of them at a time."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import files
from overt.errors import BadInput, Damaged
from overt.recipes import spoken
from overt.recipes.feeding import PAIRED
from overt.recipes.looking import place
from overt.recipes.opening import PICTURES, TOKENIZERS, Subject, locate, open_model
from overt.recipes.seeing import MAPS
from overt.recipes.spoken import FILE

DEMO = Path("runs") / "demo"
OPEN = 4  # models kept in memory
EXAMPLES = 12  # samples of a run's gallery that a person can begin with


@dataclass(frozen=True)
class Offered:
    """A model by the name that people choose it by, and the folder it is in."""

    name: str
    folder: Path
    run: Path | None = None


class Shelf:
    """Models by name. Opening one may put away another that nobody has asked for longest."""

    def __init__(self, offered: Sequence[Offered], device: str = "cpu") -> None:
        self.offered = {one.name: one for one in offered}
        self.device = device
        self._open: OrderedDict[str, Subject] = OrderedDict()

    @property
    def names(self) -> list[str]:
        """Every model that can be asked, in the order of the command line."""
        return list(self.offered)

    def find(self, name: str) -> Offered:
        """The model of this name; another name is answered with those there are."""
        if name not in self.offered:
            raise BadInput(f"there is no model '{name[:60]}' here; there are {self._told()}.")
        return self.offered[name]

    def subject(self, name: str) -> Subject:
        """The model itself, opened the first time."""
        offered = self.find(name)
        if name not in self._open:
            subject = open_model(offered.folder, name)
            subject.model.to(place(self.device))
            self._open[name] = subject
            while len(self._open) > OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(name)
        return self._open[name]

    def about(self, name: str) -> dict[str, Any]:
        """What a page says of a model before it is asked: what it takes, what maps it has."""
        offered = self.find(name)
        examples = offered.run is not None and (offered.run / "gallery").is_dir()
        return {"name": name, "examples": examples, **takes(offered.folder)}

    def examples(self, name: str) -> list[dict[str, Any]]:
        """A few samples of the run behind a model: text, picture, truth; none without a run."""
        from overt.show.browse import Photos
        from overt.show.sample import load_gallery

        offered = self.find(name)
        if offered.run is None or not (offered.run / "gallery").is_dir():
            return []
        found, photos = [], Photos(lossless=True)
        known = spoken.read(offered.folder) if (offered.folder / FILE).is_file() else None
        writes = known is not None and known.writes  # what is said of a picture is no input
        samples = load_gallery(offered.run / "gallery")
        step = max(1, len(samples) // EXAMPLES)
        for sample in samples[::step][:EXAMPLES]:
            picture = None if sample.image is None else photos.number(sample.image)
            found.append(
                {
                    "text": None if writes else sample.text or None,
                    "truth": sample.truth if known and sample.truth in known.answers else None,
                    "picture": None if picture is None else photos.addresses[picture],
                }
            )
        return found

    def _told(self) -> str:
        return ", ".join(self.names[:8]) + (", ..." if len(self.offered) > 8 else "")


def takes(folder: Path) -> dict[str, Any]:
    """What the model in a folder takes and has, without opening it: texts, pictures, maps.

    Of a model of other people it is told by the files of its tokenizer and its processor.
    """
    if (folder / FILE).is_file():
        from overt.recipes import own

        known = spoken.read(folder)
        return {
            "maps": own.maps_for(known),
            "reads": known.reads,
            "looks": known.pixels is not None,
            "boxed": known.boxed,
            "writes": known.writes,
            **_wanted(known),
        }
    config = files.read_json(folder / "config.json")
    kind = config if isinstance(config, dict) else {}
    if kind.get("kind") == "attached" or "model_type" not in kind:  # attached, ours, or timm's
        ours = kind.get("kind") == "attached" or "architecture" not in kind
        maps = {one: told for one, told in MAPS.items() if one != "search"}
        return {"maps": {"raw": MAPS["raw"]} if ours else maps, "reads": False, "looks": True}
    return {
        "maps": {one: told for one, told in MAPS.items() if one != "search"},
        "reads": any(path.is_file() for pattern in TOKENIZERS for path in folder.glob(pattern)),
        "looks": any((folder / name).is_file() for name in PICTURES),
    }


def _wanted(known: spoken.Spoken) -> dict[str, str]:
    """What a page calls the text that a network takes, and an example of one."""
    if known.writes:
        return {"wants": "Caption (or leave it empty: the model writes one)", "hint": ""}
    if known.network == PAIRED:
        return {"wants": "A caption, or two to choose from, a line each", "hint": "a red circle"}
    if known.pixels is None:
        return {"wants": "Text", "hint": ""}
    return {"wants": "Question", "hint": "What is left of the red circle?"}


def offer(names: Sequence[str]) -> list[Offered]:
    """The models that a command line names: runs, folders of runs, or anything `overt look` takes.

    Without a name it is the demo's, if it has been run here.
    """
    if not names:
        if not DEMO.is_dir():
            raise BadInput(
                f"there is no {DEMO} to show; run `overt demo`, or name a run or a model: "
                "`overt serve runs/soft`, `overt serve hf:google/vit-base-patch16-224`."
            )
        names = [str(DEMO)]
    found: dict[str, Offered] = {}
    for name in names:
        for one in _one(name):
            found.setdefault(one.name, one)
    return list(found.values())


def _one(name: str) -> list[Offered]:
    """One word of the command line: a model, a run, or a folder whose runs are meant."""
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        runs = [folder] if (folder / "results.json").is_file() else sorted(folder.iterdir())
        found = sorted((run for run in runs if _can_be_asked(run)), key=_looks_at_nothing)
        if found:
            whole = folder.resolve()
            return [
                Offered(whole.name if run == folder else run.name, run / "model", run)
                for run in found
            ]
        for run in runs:
            if (run / "results.json").is_file() and (run / "model" / FILE).is_file():
                spoken.said(run / "model")  # says why it cannot be asked
        if any((run / "results.json").is_file() for run in runs):
            raise BadInput(
                f"no run in {name} has a network that people can ask; runs that were made by an "
                "earlier version of overt say nothing of their words: run them again."
            )
    located = locate(name)
    return [Offered(name.rstrip("/"), located, None)]


def _looks_at_nothing(run: Path) -> bool:
    """Whether a run's network answers questions without attention: such a one is listed last."""
    attend = files.read_json(run / "model" / "config.json").get("attend")
    return isinstance(attend, dict) and attend.get("kind") in ("blind", "mean")


def _can_be_asked(run: Path) -> bool:
    """Whether a folder is a finished run whose model can be opened for questions."""
    model = run / "model"
    if not (run / "results.json").is_file() or not (model / "config.json").is_file():
        return False
    try:
        if (model / FILE).is_file():
            return bool(spoken.said(model))
        config = files.read_json(model / "config.json")
    except (BadInput, Damaged):
        return False
    return isinstance(config, dict) and "model_type" in config
