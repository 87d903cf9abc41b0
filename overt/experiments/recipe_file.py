"""Recipes and tables in a Python file of the user, named on the command line as `FILE.py:NAME`.

The file is imported, which runs its code. So its path always comes from a command line or a caller,
never from the folder of a run or a model.
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from overt.errors import CorruptFileError, RunError, RunInterrupted, UserError
from overt.experiments.recipe import Recipe, TrainConfig
from overt.experiments.table import TableSpec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
_SECTIONS = ("data", "model", "train")


@dataclass(frozen=True)
class RecipeFile:
    """A recipe or a table in a Python file.

    `word` is FILE.py:NAME with the absolute path, `found` what NAME makes, and `doc` its docstring.
    """

    word: str
    path: Path
    found: Recipe | TableSpec
    doc: str = ""

    @property
    def recipe(self) -> Recipe:
        """The recipe; a table raises `UserError`."""
        if isinstance(self.found, TableSpec):
            raise UserError(
                f"{self.word} is a table, and a recipe is needed: run it with "
                f"`overt table {self.word} --out DIR`, or name one of its recipes."
            )
        return self.found

    @property
    def table(self) -> TableSpec:
        """The table; a recipe raises `UserError`."""
        if not isinstance(self.found, TableSpec):
            raise UserError(
                f"{self.word} is a recipe, and a table is needed: define a "
                "`TableSpec(name, about, rows, columns)` in the file and name that."
            )
        return self.found

    def recipes(self) -> dict[str, Recipe]:
        """Return the recipe, or those of the table's rows, by name."""
        if not isinstance(self.found, TableSpec):
            return {self.found.name: self.found}
        made = [row.recipe() for row in self.found.rows]
        return {one.name: one for one in made}


def is_recipe_file(word: str) -> bool:
    """Return whether a word of a command line names a Python file: `FILE.py` or `FILE.py:NAME`.

    Example:
        >>> is_recipe_file("mine.py:experiment"), is_recipe_file("scenes-soft")
        (True, False)
    """
    return bool(re.search(r"\.py(:[^/]*)?$", word))


def load_recipe_file(word: str, reserved: Iterable[str] = ()) -> RecipeFile:
    """Import a Python file and return the recipe or table that it defines.

    NAME is a function or class that is called without arguments, or a finished object. The folder
    of the file is added to the end of the import path, so the file can import its neighbours.

    Args:
        word: `FILE.py:NAME`.
        reserved: Names that recipes of the file must not have.

    Returns:
        The recipe or the table.

    Raises:
        UserError: The file, the name or the recipe cannot be used; the message has the line of the
            file that failed.
    """
    path, name = _split_word(word, "a recipe or a table", "experiment")
    with file_errors(path):
        module = _import_file(path)
        made = _find_object(module, name, path)
        doc = (inspect.getdoc(made) or "") if callable(made) else ""
        if callable(made):
            _check_no_arguments(made, name, path, "a recipe or a table")
            made = made()
    if isinstance(made, TableSpec):
        found = RecipeFile(f"{path}:{name}", path, made)
        with file_errors(path):
            listed = [(f"row {row.label!r} of {name}", row.recipe()) for row in made.rows]
        by_name: dict[str, Recipe] = {}
        for label, one in listed:
            if not _is_from_package(one):
                _check_recipe(one, label, path, reserved)
            # Worker processes find a recipe by its name.
            if by_name.setdefault(one.name, one) != one:
                raise UserError(
                    f"{path}, {name}: two different recipes have the name {one.name!r}: give each "
                    "its own name."
                )
        return found
    _check_recipe(made, name, path, reserved)
    return RecipeFile(f"{path}:{name}", path, made, doc)


def load_object(word: str, what: str) -> Any:
    """Import a Python file and return what a function or class of it makes, such as a model.

    Args:
        word: `FILE.py:NAME`; NAME is called without arguments.
        what: What it should make, for messages, such as "a model".

    Returns:
        The object.

    Raises:
        UserError: The file or the name cannot be used.
    """
    path, name = _split_word(word, f"a function that returns {what}", what.rpartition(" ")[2])
    with file_errors(path):
        make = _find_object(_import_file(path), name, path)
        if not callable(make):
            raise UserError(f"{path}: {name} must be a function that returns {what}.")
        _check_no_arguments(make, name, path, what)
        return make()


def _split_word(word: str, what: str, example: str) -> tuple[Path, str]:
    """Split FILE.py:NAME into an absolute path and a name; raise unless both are there."""
    file, _, name = word.rpartition(":") if not word.endswith(".py") else (word, "", "")
    path = Path(file)
    if not path.is_file():
        raise UserError(f"{file} does not exist: give a Python file, as FILE.py:NAME.")
    if not name:
        raise UserError(f"{file} needs the name of {what} in it: {file}:{example}, for example.")
    return path.resolve(), name


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module of its own name, as worker processes do as well."""
    name = path.stem
    if not name.isidentifier():
        raise UserError(f"{path} cannot be imported: give the file a name like my_experiment.py.")
    loaded = sys.modules.get(name)
    folder = str(path.parent)
    if loaded is None:
        if folder not in sys.path:
            sys.path.append(folder)  # at the end: the file must not hide modules of packages
        importlib.invalidate_caches()
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec is not None else None
    else:
        origin = getattr(loaded, "__file__", None)
    if origin is None or not os.path.exists(origin) or not path.samefile(origin):
        where = f" ({origin})" if origin else ""
        raise UserError(f"{path} has the name of another module, {name}{where}: rename the file.")
    return loaded or importlib.import_module(name)


def _find_object(module: ModuleType, name: str, path: Path) -> Any:
    """Return the object `name` of a module; a missing one raises `UserError` with the others."""
    if hasattr(module, name):
        return getattr(module, name)
    own = [
        other
        for other, value in vars(module).items()
        if not other.startswith("_")
        and (isinstance(value, TableSpec) or getattr(value, "__module__", "") == module.__name__)
    ]
    has = f"it has {', '.join(own[:12])}." if own else "it defines nothing."
    raise UserError(f"{path} has no {name!r}; {has}")


def _check_no_arguments(function: Callable[..., Any], name: str, path: Path, what: str) -> None:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        raise UserError(
            f"{path}: {name} must be callable without arguments and return {what}."
        ) from None


def _is_from_package(recipe: Any) -> bool:
    """Return whether a recipe is one of overt, as for a baseline row, and needs no check."""
    kind = type(recipe)
    return kind.__module__.startswith("overt.") and not callable(getattr(recipe, "build", None))


def _check_recipe(recipe: Any, name: str, path: Path, reserved: Iterable[str]) -> None:
    """Raise `UserError` unless an object is a complete recipe with `build`."""
    where = f"{path}, {name}"
    lacking = [
        one for one in ("name", "about", "build", "paper", *_SECTIONS) if not hasattr(recipe, one)
    ]
    if lacking:
        raise UserError(
            f"{where}: expected a recipe, such as `CustomRecipe(name, about, make_experiment)`, or "
            f"a TableSpec, got {type(recipe).__name__} without {', '.join(lacking)}."
        )
    if not isinstance(recipe.name, str) or not _NAME.fullmatch(recipe.name):
        raise UserError(
            f"{where}: the name of a recipe has letters, digits, `.`, `_` and `-`, got "
            f"{recipe.name!r}."
        )
    if recipe.name in reserved:
        raise UserError(
            f"{where}: {recipe.name!r} is the name of a recipe of overt: choose another one."
        )
    if not isinstance(recipe.train, TrainConfig):
        raise UserError(
            f"{where}: `train` must be a TrainConfig, got {type(recipe.train).__name__}."
        )
    for section in _SECTIONS:
        value = getattr(recipe, section)
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            raise UserError(
                f"{where}: `{section}` must be a dataclass of settings, got {type(value).__name__}."
            )


def code_version(recipe: Any) -> str | None:
    """Return the SHA-256 of the Python file that defines a recipe of the user; None for overt's.

    Modules that the file imports do not count.
    """
    maker = getattr(recipe, "make_experiment", getattr(recipe, "build", None))
    module = getattr(maker, "__module__", "")
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or module.split(".")[0] == "overt":
        return None
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:  # deleted since it was imported
        return None


def warn_of_other_code(results: Mapping[str, Any], recipe: Any, folder: Path) -> None:
    """Warn if a run, finished or not, was made by another version of the user's file.

    It is no error: an experiment whose evaluation failed is mended and continued.
    """
    version, before = code_version(recipe), results.get("code") or []
    if version is not None and before and before[-1] != version:
        warnings.warn(
            f"the Python file of {recipe.name} has changed since {folder} was made; choose another "
            "folder to start again with the present code",
            stacklevel=2,
        )


@contextmanager
def file_errors(path: Path | None) -> Iterator[None]:
    """Turn an exception in the user's file into one line that names the file and the line.

    Exceptions that never passed through the file are not changed.
    """
    try:
        yield
    except (UserError, CorruptFileError, RunError, RunInterrupted, MemoryError):
        raise
    except (Exception, SystemExit) as error:  # a script that exits would look like a success
        line = None if path is None else _line_in_file(error, path)
        if line is None or os.environ.get("OVERT_TRACEBACK"):
            raise
        said = " ".join(str(error).split())[:300]
        raise UserError(
            f"{path}, line {line}: {type(error).__name__}{f': {said}' if said else ''}; set "
            "OVERT_TRACEBACK=1 for a traceback."
        ) from error


def _line_in_file(error: BaseException, path: Path) -> int | None:
    """Return the innermost line of a file that an exception passed through, or None."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    return lines[-1] if lines else None


def find_recipe_of_run(
    name: str, files: Iterable[RecipeFile], known: Mapping[str, Callable[[], Recipe]]
) -> Recipe:
    """Return the recipe of a run by its name: from `known`, or from the given files.

    Raises:
        UserError: No file defines it; the code of a run is never read from its folder.
    """
    if name in known:
        return known[name]()
    own = {key: one for file in files for key, one in file.recipes().items()}
    if name in own:
        return own[name]
    given = f" (given: {', '.join(own)})" if own else ""
    raise UserError(
        f"{name[:60]!r} is not a recipe of overt{given}: name the Python file that defines it, "
        "with --recipe FILE.py:NAME; code is never read from the folder of a run."
    )
