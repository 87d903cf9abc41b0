"""Maps that others submit to a benchmark: a folder with `maps.npz` or PNG images, and `maps.json`.

    FOLDER/maps.npz     one array per sample under its id, or the arrays `ids` and `maps`
    FOLDER/maps.json    {"format": "overt maps 1", "method": NAME, "model": NAME, "data": NAME}

`maps.json` may be missing; the method then has the name of the folder. `model` and `data` restrict
the maps to one model or dataset; without them they are for every one whose samples they have. The
arrays are those of `external_maps`, and nothing that is read is executed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt import io
from overt.errors import UserError
from overt.metrics.scorecard.external_maps import ExternalMaps, load_external_maps

FORMAT = "overt maps 1"
ABOUT, MAPS = "maps.json", "maps.npz"
_KEYS = ("format", "method", "model", "data")
_NAME = re.compile(r"[\w][\w .+()-]{0,59}")


@dataclass(frozen=True, eq=False)
class Submission:
    """Maps of a method.

    Args:
        method: Name of the method.
        maps: The maps by sample id.
        model: The model that they explain; None for every model.
        data: The dataset; None for every dataset.
    """

    method: str
    maps: ExternalMaps
    model: str | None = None
    data: str | None = None

    def covers(self, model: str, data: str, ids: Sequence[str]) -> bool:
        """Return whether the maps are for these samples, after checking every map of them.

        Raises:
            UserError: Some of the samples have maps and others have not, or no sample has one
                although the submission names this model or dataset.
            CorruptFileError: A map has the wrong shape or invalid weights.
        """
        if self.model not in (None, model) or self.data not in (None, data):
            return False
        named = self.model is not None or self.data is not None
        if not named and not any(one in self.maps for one in ids):
            return False
        self.maps.check(ids)
        return True


def load_submission(where: Path | str) -> Submission:
    """Load maps from a folder, or from an .npz file alone.

    Args:
        where: The folder or file.

    Returns:
        The submission; its maps are checked by `covers`.

    Raises:
        UserError: There are no maps, or `maps.json` has missing, unknown or invalid entries.
        CorruptFileError: A file is damaged.

    Example:
        >>> load_submission("no/such/folder")
        Traceback (most recent call last):
        overt.errors.UserError: no/such/folder does not exist: ...
    """
    where = Path(where)
    about: dict[str, Any] = {}
    if (where / ABOUT).is_file():
        about = _check_about(where / ABOUT, io.read_json(where / ABOUT))
    maps = load_external_maps(where / MAPS if (where / MAPS).is_file() else where)
    method = about.get("method", where.stem)
    if not _NAME.fullmatch(method):
        raise UserError(
            f"{where}: the name of a method has letters, digits, spaces and `.+()-_`, at most 60, "
            f"got {method[:60]!r}: set it in {ABOUT}."
        )
    return Submission(method, maps, about.get("model"), about.get("data"))


def _check_about(path: Path, about: Any) -> dict[str, Any]:
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise UserError(f'{path} must be an object with "format": "{FORMAT}".')
    unknown = sorted(set(about) - set(_KEYS))
    if unknown:
        raise UserError(f"{path} has unknown entries {', '.join(unknown)}: use {', '.join(_KEYS)}.")
    wrong = [key for key in about if not isinstance(about[key], str)]
    if wrong or "method" not in about:
        raise UserError(f"{path} needs the name of the method, and only texts as values.")
    return about
