"""The settings of a recipe: shown, changed by `--set KEY=VALUE`, written and read back.

A setting is a field of one of the recipe's sections, by its dotted name: `train.epochs`. What it
may be is said once, by the field's type; `metadata={"low": 0, "high": 1}` on the field narrows a
number. Nothing here imports torch, so that a typing mistake is answered at once.
"""

import dataclasses
import difflib
import inspect
import math
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from overt.errors import BadInput
from overt.recipes.recipe import Recipe

R = TypeVar("R", bound=Recipe)
Bounds = tuple[int | float, int | float]

_NOTHING = ("none", "null")
_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_LARGEST = 2**31 - 1
# Ranges of the names that every recipe uses; a field's own metadata comes first.
_RANGES: dict[str, Bounds] = {
    **dict.fromkeys(("epochs", "steps", "batch", "accumulate", "save_every"), (1, math.inf)),
    **dict.fromkeys(
        ("limit", "train", "val", "test", "size", "heads", "glimpses", "hops"), (1, math.inf)
    ),
    **dict.fromkeys(
        ("patience", "workers", "rate", "decay", "weight", "penalty", "world", "card", "watch"),
        (0, math.inf),
    ),
    **dict.fromkeys(("warmup", "dropout", "share"), (0, 1)),
    # What is more than zero, but need not be whole: a width may be a factor.
    **dict.fromkeys(("width", "clip"), (math.ulp(0.0), math.inf)),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting of a recipe: its dotted name, its value, and what it may be, in words."""

    key: str
    value: Any
    wants: str


def flatten(recipe: Recipe) -> dict[str, Any]:
    """The value of every setting, by dotted name, in the order of the recipe's fields."""
    return {key: value for key, _, _, value in _leaves(recipe)}


def explain(recipe: Recipe) -> dict[str, str]:
    """What the settings of each section mean: the docstring of its class, and of its choices.

    A choice that the section's own words name is not told again.
    """
    told: dict[str, str] = {}
    for section, part in _sections(recipe):
        text = inspect.getdoc(type(part)) or ""
        hints = get_type_hints(type(part))
        for field in dataclasses.fields(part):
            kinds = [one for one in _members(hints[field.name]) if _is_enum(one)]
            if kinds and f"`{field.name}`" not in text:
                text += f"\n\n`{field.name}`: {(inspect.getdoc(kinds[0]) or '').strip()}"
        told[section] = text
    return told


def _sections(part: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each dataclass below `part`, by its dotted name."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            yield f"{prefix}{field.name}", value
            yield from _sections(value, f"{prefix}{field.name}.")


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def describe(recipe: Recipe) -> list[Setting]:
    """Every setting with its value and what else it may be."""
    return [
        Setting(key, value, _wants(hint, _range(field)))
        for key, field, hint, value in _leaves(recipe)
    ]


def apply(recipe: R, changes: Sequence[str]) -> R:
    """The recipe with each `KEY=VALUE` set; of two for one key the last wins.

    An unknown key is answered with the nearest ones, a wrong value with what the key takes.
    """
    known = {key: (field, hint) for key, field, hint, _ in _leaves(recipe)}
    values: dict[str, Any] = {}
    for change in changes:
        key, equals, text = change.partition("=")
        key = key.strip()
        if not equals:
            raise BadInput(
                f"--set {_quote(change)} has no '='; write KEY=VALUE, as in --set train.epochs=2."
            )
        if key not in known:
            raise BadInput(f"{recipe.name} has no setting {_quote(key)}; {_offer_key(key, known)}.")
        field, hint = known[key]
        values[key] = _read(key, text.strip(), hint, _range(field))
    return _rebuilt(recipe, values)


def to_json(recipe: Recipe) -> dict[str, Any]:
    """The settings as JSON values; `restore` leads back to an equal recipe."""
    return {key: _encoded(value) for key, value in flatten(recipe).items()}


def restore(recipe: R, values: Mapping[str, Any]) -> R:
    """The recipe with the settings that `to_json` gave, each checked against its type."""
    known = {key: (field, hint) for key, field, hint, _ in _leaves(recipe)}
    if known.keys() != values.keys():
        odd = ", ".join(sorted(known.keys() ^ values.keys()))
        raise BadInput(
            f"these settings of {recipe.name} come from another version of it, "
            f"which differs in {odd}; start a new run in another folder."
        )
    decoded = {
        key: _decoded(key, values[key], hint, _range(field)) for key, (field, hint) in known.items()
    }
    return _rebuilt(recipe, decoded)


def completed(old: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Settings of an earlier run, with what they do not name yet at the default of its field.

    A setting that a section gains has a default under which nothing changes, so a run from before
    it is the run that leaves it there. A section that is new as a whole is not filled in: what it
    asks for was not done then.
    """
    known = {key.partition(".")[0] for key in old}
    gained = [
        (key, _default(field))
        for key, field, _, _ in _leaves(recipe)
        if key not in old and key.partition(".")[0] in known
    ]
    given = {key: _encoded(one) for key, one in gained if one is not dataclasses.MISSING}
    return given | dict(old)


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two results of `to_json`, a phrase a key: `train.rate is 0.1, was 1`."""
    found = []
    for key in dict.fromkeys([*old, *new]):
        if key not in old:
            found.append(f"{key} is {shown(new[key])}, was not there")
        elif key not in new:
            found.append(f"{key} is gone, was {shown(old[key])}")
        elif not _same(old[key], new[key]):
            found.append(f"{key} is {shown(new[key])}, was {shown(old[key])}")
    return found


def shown(value: Any) -> str:
    """A value as `--set` would take it, on one line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return shown(value.value)
    if isinstance(value, list | tuple):
        return ",".join(map(shown, value))
    if isinstance(value, str):
        return value if value and value.isprintable() and len(value) <= 60 else _quote(value)
    return str(value)


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The names most like this one, the best first; none where nothing is like it."""
    names = list(names)
    # A long name would make the comparison slow, and is like nothing anyhow.
    return difflib.get_close_matches(name[:80], names, n=count, cutoff=0.5)


def offer(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that refused a name: the nearest that are known, or else all."""
    known = list(known)
    near = nearest(name, known)
    verb = "is" if len(near or known) == 1 else "are"
    return f"the nearest {verb} {', '.join(near)}" if near else f"there {verb} {', '.join(known)}"


# Walking a recipe


def _leaves(part: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any, Any]]:
    """Each setting below `part`: its dotted name, its field, its type and its value."""
    hints = get_type_hints(type(part))
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        elif prefix:
            yield f"{prefix}{field.name}", field, hints[field.name], value


def _rebuilt(part: Any, values: Mapping[str, Any]) -> Any:
    """A copy of `part` with the values at these dotted names."""
    own: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        head, dot, rest = key.partition(".")
        if dot:
            below.setdefault(head, {})[rest] = value
        else:
            own[head] = value
    for head, inner in below.items():
        own[head] = _rebuilt(getattr(part, head), inner)
    if not own:
        return part
    try:
        return dataclasses.replace(part, **own)
    except BadInput:
        raise
    except ValueError as error:  # a section's own check of values that must fit together
        raise BadInput(f"these settings do not go together: {error}") from error


def _range(field: dataclasses.Field[Any]) -> Bounds:
    low, high = _RANGES.get(field.name, (-math.inf, math.inf))
    return field.metadata.get("low", low), field.metadata.get("high", high)


# From text and back


def _read(key: str, text: str, hint: Any, bounds: Bounds) -> Any:
    """The value that `text` stands for, of the type `hint`."""
    try:
        return _parsed(text, hint, bounds)
    except ValueError:
        near = nearest(text, _choices(hint), count=1)
        hint_at = f"; did you mean {near[0]}?" if near else "."
        raise BadInput(f"{key} takes {_wants(hint, bounds)}, not {_quote(text)}{hint_at}") from None


def _parsed(text: str, hint: Any, bounds: Bounds) -> Any:
    members = _members(hint)
    if type(None) in members and text.lower() in _NOTHING:
        return None
    for member in members:
        try:
            return _parsed_as(member, text, bounds)
        except ValueError:
            continue
    raise ValueError(text)


def _parsed_as(kind: Any, text: str, bounds: Bounds) -> Any:
    if kind is bool:
        if text.lower() in (*_YES, *_NO):
            return text.lower() in _YES
    elif kind is int or kind is float:
        return _within(kind(text), bounds)
    elif kind is str and text.isprintable():
        return text
    elif get_origin(kind) is tuple:
        parts = [part.strip() for part in text.split(",")] if text else []
        return tuple(
            _parsed(part, inner, bounds)
            for part, inner in zip(parts, _items(kind, len(parts)), strict=True)
        )
    for name, value in _named(kind):
        if text == name:
            return value
    raise ValueError(text)


def _within(number: int | float, bounds: Bounds) -> int | float:
    largest = _LARGEST if isinstance(number, int) else sys.float_info.max
    if not bounds[0] <= number <= bounds[1] or not abs(number) <= largest:  # NaN is neither
        raise ValueError(number)
    return number


def _encoded(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return [_encoded(one) for one in value] if isinstance(value, tuple) else value


def _decoded(key: str, value: Any, hint: Any, bounds: Bounds) -> Any:
    for member in _members(hint):
        try:
            return _decoded_as(member, value, bounds)
        except ValueError:
            continue
    raise BadInput(f"{key} takes {_wants(hint, bounds)}, not {shown(value)}.")


def _decoded_as(kind: Any, value: Any, bounds: Bounds) -> Any:
    if kind is type(None) and value is None:
        return None
    if kind in (bool, str) and isinstance(value, kind):
        return value
    if kind is int and type(value) is int:
        return _within(value, bounds)
    if kind is float and type(value) in (int, float):
        return _within(float(value), bounds)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        inner = zip(value, _items(kind, len(value)), strict=True)
        return tuple(_decoded("", one, hint, bounds) for one, hint in inner)
    for _, chosen in _named(kind):
        if _encoded(chosen) == value:
            return chosen
    raise ValueError(value)


# Types, in pieces and in words


def _members(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _items(kind: Any, count: int) -> list[Any]:
    """The types of a tuple's items; the wrong number of them is a ValueError."""
    inner = get_args(kind)
    if inner[-1] is Ellipsis:
        return [inner[0]] * count
    if len(inner) != count:
        raise ValueError(f"{count} values, {len(inner)} wanted")
    return list(inner)


def _named(kind: Any) -> list[tuple[str, Any]]:
    """The values of an enum or a Literal, each with the text it is chosen by."""
    if get_origin(kind) is Literal:
        return [(str(value), value) for value in get_args(kind)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [(str(one.value), one) for one in kind]
    return []


def _choices(hint: Any) -> list[str]:
    members = [one for member in _members(hint) for one in (member, *get_args(member))]
    return [name for member in members for name, _ in _named(member)]


def _wants(hint: Any, bounds: Bounds) -> str:
    """What a setting may be, in words: `a whole number of at least 1, or none`."""
    members = _members(hint)
    words = [_word(member, bounds) for member in members if member is not type(None)]
    return " or ".join(words) + (", or none" if type(None) in members else "")


def _word(kind: Any, bounds: Bounds) -> str:
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _limits(bounds)
    if kind is str:
        return "printable text"
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        if inner[-1] is Ellipsis:
            return f"a comma-separated list, each {_wants(inner[0], bounds)}"
        return f"{len(inner)} values with commas between: " + "; ".join(
            _wants(one, bounds) for one in inner
        )
    return "one of " + ", ".join(name for name, _ in _named(kind))


def _limits(bounds: Bounds) -> str:
    low, high = bounds
    if math.isfinite(low) and math.isfinite(high):
        return f" from {low} to {high}"
    if low == math.ulp(0.0):
        return " above 0"
    if math.isfinite(low):
        return f" of at least {low}"
    return f" of at most {high}" if math.isfinite(high) else ""


def _offer_key(key: str, known: Iterable[str]) -> str:
    """As `offer`, but a key with the same last part comes first: epochs for train.epochs."""
    known = list(known)
    last = key.rpartition(".")[2]
    same = [one for one in known if last and one.rpartition(".")[2] == last]
    return f"the nearest is {same[0]}" if len(same) == 1 else offer(key, same or known)


def _same(one: Any, other: Any) -> bool:
    """Equal, and not only as numbers: true is not 1."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _quote(text: str) -> str:
    """The text on one line, cut where it is long."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
