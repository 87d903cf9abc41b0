"""The models that a server answers for, opened when first asked, a few of them at a time."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import files
from overt.errors import BadInput, Damaged
from overt.recipes.looking import place
from overt.recipes.opening import Subject, locate, open_model
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
        from overt.recipes import own

        offered = self.find(name)
        known: dict[str, Any] = {"name": name, "maps": {}}
        if (offered.folder / FILE).is_file():
            known["maps"] = own.MAPS
            said = files.read_json(offered.folder / FILE)
            known |= {"reads": said.get("words") is not None, "looks": bool(said.get("pixels"))}
        else:
            known["maps"] = {one: told for one, told in MAPS.items() if one != "search"}
        known["examples"] = offered.run is not None and (offered.run / "gallery").is_dir()
        return known

    def examples(self, name: str) -> list[dict[str, Any]]:
        """A few samples of the run behind a model: text, picture, truth; none without a run."""
        from overt.show.browse import Photos
        from overt.show.sample import load_gallery

        offered = self.find(name)
        if offered.run is None or not (offered.run / "gallery").is_dir():
            return []
        found, photos = [], Photos(lossless=True)
        samples = load_gallery(offered.run / "gallery")
        step = max(1, len(samples) // EXAMPLES)
        for sample in samples[::step][:EXAMPLES]:
            picture = None if sample.image is None else photos.number(sample.image)
            found.append(
                {
                    "text": sample.text or None,
                    "truth": sample.truth or None,
                    "picture": None if picture is None else photos.addresses[picture],
                }
            )
        return found

    def _told(self) -> str:
        return ", ".join(self.names[:8]) + (", ..." if len(self.offered) > 8 else "")


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
        config = files.read_json(model / "config.json")
    except Damaged:
        return False
    return isinstance(config, dict) and ((model / FILE).is_file() or "model_type" in config)
