"""Location of the easy-VQA files: a folder of the user or the installed package.

Apart from `easy_vqa`, so that the catalog can look for the files without importing torch.
"""

import importlib.util
from pathlib import Path

from overt.errors import UserError

INSTRUCTIONS = "Install the package that carries it: pip install easy-vqa."


def easy_vqa_folder(root: Path | str | None = None) -> Path:
    """Find the easy-VQA files in `root`/easy-vqa, in `root`, or in the installed package.

    Args:
        root: The data folder; None looks in the installed package only.

    Returns:
        The folder with `answers.txt`, `train/` and `test/`.

    Raises:
        UserError: The files are in none of these places.
    """
    for folder in [] if root is None else [Path(root, "easy-vqa"), Path(root)]:
        if (folder / "train" / "questions.json").is_file():
            return folder
    package = importlib.util.find_spec("easy_vqa")
    if package is None or not package.submodule_search_locations:
        raise UserError(f"easy-VQA is not installed. {INSTRUCTIONS}")
    return Path(next(iter(package.submodule_search_locations))) / "data"
