"""Settings of a recipe: list them, change them with `--set KEY=VALUE`, write and read them.

A setting is a field of one of the recipe's sections, by its dotted name: `train.epochs`. Its type
says which values are allowed; `metadata={"low": 0, "high": 1}` on the field limits a number.
A common name has a range of its own in sections of overt only.
Nothing here imports torch, so mistakes are reported at once.
"""

import dataclasses
import difflib
import inspect
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from overt.errors import UserError
from overt.experiments.recipe import Recipe

R = TypeVar("R", bound=Recipe)
Bounds = tuple[int | float, int | float]

_NOTHING = ("none", "null")
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
# Larger numbers would fail far from the setting, in torch or NumPy.
_LARGEST = 2**31 - 1
_LARGEST_FLOAT = 3.4e38  # the largest float32
# Ranges of common names in sections of overt; the metadata of a field takes precedence.
_RANGES: dict[str, Bounds] = {
    **dict.fromkeys(("epochs", "steps", "batch", "accumulate", "save_every"), (1, math.inf)),
    **dict.fromkeys(("limit", "train", "val", "test", "size"), (1, math.inf)),
    **dict.fromkeys(
        ("patience", "rate", "decay", "weight", "penalty", "world", "card", "watch"), (0, math.inf)
    ),
    **dict.fromkeys(("heads", "glimpses", "hops"), (1, 1024)),
    "workers": (0, 256),  # each is a process: more would exhaust the memory before training starts
    **dict.fromkeys(("warmup", "dropout", "share"), (0, 1)),
    # Above zero, but not necessarily whole: a width may be a factor.
    "width": (math.ulp(0.0), 64),
    "clip": (math.ulp(0.0), math.inf),
}


@dataclasses.dataclass(frozen=True)
class RecipeSetting:
    """A setting of a recipe: its dotted name, its value, and the values it accepts, in words."""

    key: str
    value: Any
    accepts: str


def flatten(recipe: Recipe) -> dict[str, Any]:
    """Return the value of every setting by dotted name, in the order of the fields."""
    return {key: value for key, _, _, value in _leaves(recipe)}


def explain(recipe: Recipe) -> dict[str, str]:
    """Return the docstring of each section, with those of its enums.

    An enum is left out if the docstring of the section names its field.
    """
    texts: dict[str, str] = {}
    for section, part in _sections(recipe):
        # The docstring of a section explains its fields, that of an enum its values.
        text = inspect.getdoc(type(part)) or ""
        hints = get_type_hints(type(part))
        for field in dataclasses.fields(part):
            kinds = [one for one in _members(hints[field.name]) if _is_enum(one)]
            if kinds and f"`{field.name}`" not in text:
                text += f"\n\n`{field.name}`: {(inspect.getdoc(kinds[0]) or '').strip()}"
        texts[section] = text
    return texts


def _sections(part: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dataclass below `part` with its dotted name."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            yield f"{prefix}{field.name}", value
            yield from _sections(value, f"{prefix}{field.name}.")


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def describe(recipe: Recipe) -> list[RecipeSetting]:
    """List every setting with its value and the values it accepts."""
    return [
        RecipeSetting(key, value, _describe_type(hint, bounds))
        for key, (_, bounds), hint, value in _leaves(recipe)
    ]


def apply(recipe: R, changes: Sequence[str]) -> R:
    """Return the recipe with each `KEY=VALUE` set; the last of several for one key wins.

    Args:
        recipe: The recipe.
        changes: `KEY=VALUE` pairs, as for `--set`.

    Returns:
        A changed copy.

    Raises:
        UserError: For an unknown key, with similar ones; for a bad value, with the accepted ones.

    Example:
        >>> from overt.papers.catalog import find_recipe
        >>> apply(find_recipe("scenes-soft"), ["train.epochs=3"]).train.epochs
        3
    """
    # The hints are resolved: the type of a field itself may be a string.
    known = {key: (bounds, hint) for key, (_, bounds), hint, _ in _leaves(recipe)}
    values: dict[str, Any] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        key = key.strip()
        if not equals:
            raise UserError(
                f"--set needs KEY=VALUE, got {_quote(change)}: for example, --set train.epochs=2."
            )
        if key not in known:
            raise UserError(
                f"{recipe.name} has no setting {_quote(key)}; {_suggest_keys(key, known)}"
            )
        bounds, hint = known[key]
        values[key] = _parse(key, text.strip(), hint, bounds)
    return _replace_values(recipe, values)


def to_json(recipe: Recipe) -> dict[str, Any]:
    """Return the settings as JSON values; `restore` returns an equal recipe."""
    return {key: _encode(value) for key, value in flatten(recipe).items()}


def restore(recipe: R, values: Mapping[str, Any]) -> R:
    """Return the recipe with settings from `to_json`, each checked against its type."""
    known = {key: (bounds, hint) for key, (_, bounds), hint, _ in _leaves(recipe)}
    if known.keys() != values.keys():
        odd = ", ".join(sorted(known.keys() ^ values.keys()))
        raise UserError(
            f"the settings of {recipe.name} come from another version of overt, which differs in "
            f"{odd}: start a new run in another folder."
        )
    decoded = {
        key: _decode(key, values[key], hint, bounds) for key, (bounds, hint) in known.items()
    }
    return _replace_values(recipe, decoded)


def fill_defaults(old: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Add the settings that an earlier run does not have, with their defaults.

    The default of a new setting keeps the earlier behaviour, so the earlier run equals one with
    that default. A new section is not filled in: the earlier run did not do what it describes.
    """
    known = {key.partition(".")[0] for key in old}
    gained = [
        (key, _default(field))
        for key, (field, _), _, _ in _leaves(recipe)
        if key not in old and key.partition(".")[0] in known
    ]
    given = {key: _encode(one) for key, one in gained if one is not dataclasses.MISSING}
    return given | dict(old)


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def describe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List the differences between two results of `to_json`, as `train.rate is 0.1, was 1`."""
    found = []
    for key in dict.fromkeys([*old, *new]):
        if key not in old:
            found.append(f"{key} is {format_value(new[key])}, did not exist")
        elif key not in new:
            found.append(f"{key} no longer exists, was {format_value(old[key])}")
        elif not _equal(old[key], new[key]):
            found.append(f"{key} is {format_value(new[key])}, was {format_value(old[key])}")
    return found


def format_value(value: Any) -> str:
    """Format a value as `--set` takes it, on one line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return format_value(value.value)
    if isinstance(value, list | tuple):
        return ",".join(map(format_value, value))
    if isinstance(value, str):
        return value if value and value.isprintable() and len(value) <= 60 else _quote(value)
    return str(value)


def closest_names(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return the most similar names, the best first; none if no name is similar."""
    names = list(names)
    # Comparing a long name is slow, and it matches nothing.
    return difflib.get_close_matches(name[:80], names, n=count, cutoff=0.5)


def suggest_names(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the most similar known names, or all of them."""
    known = list(known)
    near = closest_names(name, known)
    return f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(known)}."


# Walk a recipe


def _leaves(
    part: Any, prefix: str = ""
) -> Iterator[tuple[str, tuple["dataclasses.Field[Any]", Bounds], Any, Any]]:
    """Yield each setting below `part`: its dotted name, field with bounds, type and value."""
    hints = get_type_hints(type(part))
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        # Fields outside of sections, such as the name, are not settings.
        elif prefix:
            bounds = _range(type(part), field)
            yield f"{prefix}{field.name}", (field, bounds), hints[field.name], value


def _replace_values(part: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of `part` with the values at these dotted names."""
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        head, dot, rest = key.partition(".")
        if dot:
            below.setdefault(head, {})[rest] = value
        else:
            own[head] = value
    for head, inner in below.items():
        own[head] = _replace_values(getattr(part, head), inner)
    if not own:
        return part
    try:
        # `replace` runs `__post_init__` again, which rejects combinations that a section does not
        # allow.
        return dataclasses.replace(part, **own)
    except UserError:
        raise
    except ValueError as error:  # from the check in `__post_init__` of a section
        raise UserError(f"these settings cannot be combined: {error}") from error


def _range(section: type, field: "dataclasses.Field[Any]") -> Bounds:
    low, high = -math.inf, math.inf
    # In a section of a user, a name such as `width` may mean something else.
    owner = next(one for one in section.__mro__ if field.name in inspect.get_annotations(one))
    if owner.__module__.partition(".")[0] == "overt":
        low, high = _RANGES.get(field.name, (low, high))
    return field.metadata.get("low", low), field.metadata.get("high", high)


# Parse, encode and decode values


def _parse(key: str, text: str, hint: Any, bounds: Bounds) -> Any:
    """Parse `text` as the type `hint`."""
    try:
        return _parse_any(text, hint, bounds)
    except ValueError:
        near = closest_names(text, _choices(hint), count=1)
        suggestion = f"; did you mean {near[0]}?" if near else "."
        raise UserError(
            f"{key} takes {_describe_type(hint, bounds)}, not {_quote(text)}{suggestion}"
        ) from None


def _parse_any(text: str, hint: Any, bounds: Bounds) -> Any:
    members = _members(hint)
    # Only where the type allows None: a text may have the value "none".
    if type(None) in members and text.lower() in _NOTHING:
        return None
    # The first member of a union that accepts the text wins.
    for member in members:
        try:
            return _parse_as(member, text, bounds)
        except ValueError:
            continue
    raise ValueError(text)


def _parse_as(kind: Any, text: str, bounds: Bounds) -> Any:
    if kind is bool:
        if text.lower() in (*_YES, *_NO):
            return text.lower() in _YES
    elif kind is int or kind is float:
        return _check_bounds(kind(text), bounds)
    elif kind is str and text.isprintable():
        return text
    elif get_origin(kind) is tuple:
        parts = [part.strip() for part in text.split(",")] if text else []
        return tuple(
            _parse_any(part, inner, bounds)
            for part, inner in zip(parts, _items(kind, len(parts)), strict=True)
        )
    for name, value in _named_values(kind):
        if text == name:
            return value
    raise ValueError(text)


def _check_bounds(number: int | float, bounds: Bounds) -> int | float:
    largest = _LARGEST if isinstance(number, int) else _LARGEST_FLOAT
    if not bounds[0] <= number <= bounds[1] or not abs(number) <= largest:  # also refuses NaN
        raise ValueError(number)
    return number


def _encode(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return [_encode(one) for one in value] if isinstance(value, tuple) else value


def _decode(key: str, value: Any, hint: Any, bounds: Bounds) -> Any:
    for member in _members(hint):
        try:
            return _decode_as(member, value, bounds)
        except ValueError:
            continue
    raise UserError(f"{key} takes {_describe_type(hint, bounds)}, not {format_value(value)}.")


def _decode_as(kind: Any, value: Any, bounds: Bounds) -> Any:
    if kind is type(None) and value is None:
        return None
    if kind in (bool, str) and isinstance(value, kind):
        return value
    # `bool` is a subclass of `int`: a JSON true must not pass as the number 1.
    if kind is int and type(value) is int:
        return _check_bounds(value, bounds)
    if kind is float and type(value) in (int, float):
        return _check_bounds(float(value), bounds)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        inner = zip(value, _items(kind, len(value)), strict=True)
        return tuple(_decode("", one, hint, bounds) for one, hint in inner)
    for _, chosen in _named_values(kind):
        if _encode(chosen) == value:
            return chosen
    raise ValueError(value)


# Take types apart and describe them


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _items(kind: Any, count: int) -> list[Any]:
    """Return the types of a tuple's items; a wrong number of items raises `ValueError`."""
    inner = get_args(kind)
    if inner[-1] is Ellipsis:
        return [inner[0]] * count
    if len(inner) != count:
        raise ValueError(f"expected {len(inner)} values, got {count}")
    return list(inner)


def _named_values(kind: Any) -> list[tuple[str, Any]]:
    """Return the values of an enum or a Literal, each with its text."""
    if get_origin(kind) is Literal:
        return [(str(value), value) for value in get_args(kind)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [(str(one.value), one) for one in kind]
    return []


def _choices(hint: Any) -> list[str]:
    members = [one for member in _members(hint) for one in (member, *get_args(member))]
    return [name for member in members for name, _ in _named_values(member)]


def _describe_type(hint: Any, bounds: Bounds) -> str:
    """Describe a type in words: `a whole number of at least 1, or none`."""
    members = _members(hint)
    words = [_describe_one_type(member, bounds) for member in members if member is not type(None)]
    return " or ".join(words) + (", or none" if type(None) in members else "")


def _describe_one_type(kind: Any, bounds: Bounds) -> str:
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _describe_bounds(bounds)
    if kind is str:
        return "printable text"
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        if inner[-1] is Ellipsis:
            return f"a comma-separated list, each {_describe_type(inner[0], bounds)}"
        return f"{len(inner)} comma-separated values: " + "; ".join(
            _describe_type(one, bounds) for one in inner
        )
    return "one of " + ", ".join(name for name, _ in _named_values(kind))


def _describe_bounds(bounds: Bounds) -> str:
    low, high = bounds
    if low == math.ulp(0.0):
        return " above 0" + (f" and at most {high}" if math.isfinite(high) else "")
    if math.isfinite(low) and math.isfinite(high):
        return f" from {low} to {high}"
    if math.isfinite(low):
        return f" of at least {low}"
    return f" of at most {high}" if math.isfinite(high) else ""


def _suggest_keys(key: str, known: Iterable[str]) -> str:
    """Suggest keys; one with the same last part comes first: epochs for train.epochs."""
    known = list(known)
    last = key.rpartition(".")[2]
    same = [one for one in known if last and one.rpartition(".")[2] == last]
    return f"did you mean {same[0]}?" if len(same) == 1 else suggest_names(key, same or known)


def _equal(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; true does not equal 1."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    # In Python, True == 1.
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _quote(text: str) -> str:
    """Quote a text on one line, shortened if it is long."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
