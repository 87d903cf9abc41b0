"""The flags of the command line as text: one line a parameter. `make freeze` records them."""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

FROZEN = Path(__file__).with_name("cli_flags.txt")


def flags() -> str:
    """Every command with its arguments, flags, kinds and defaults, in a stable order."""
    import typer

    from overt.cli import app

    return "\n".join(lines(typer.main.get_command(app), "overt")) + "\n"


def lines(command: Any, name: str) -> Iterator[str]:
    """The lines of one command, then those of its sub-commands by name."""
    yield name
    kinds = get_type_hints(command.callback) if command.callback else {}
    # What is not in the signature (--help, --install-completion) is typer's, not ours.
    ours = [parameter for parameter in command.params if parameter.name in kinds]
    for parameter in sorted(ours, key=lambda p: (p.param_type_name, p.name)):
        if parameter.param_type_name == "argument":
            spelled = parameter.name.upper()
        else:
            spelled = " / ".join([*parameter.opts, *parameter.secondary_opts])
        words = [say(kinds[parameter.name]), *(["required"] if parameter.required else [])]
        if isinstance(parameter.default, str | int | float | Path):
            words.append(f"default {parameter.default}")
        yield f"  {name} {spelled} ({', '.join(words)})"
    for sub, child in sorted(getattr(command, "commands", {}).items()):
        if not child.hidden:
            yield from lines(child, f"{name} {sub}")


def say(kind: Any) -> str:
    """A type as it would be written, an enum with its values."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(member.value) for member in kind)
    return kind.__name__ if type(kind) is type else str(kind).replace("pathlib.", "")


if __name__ == "__main__":
    FROZEN.write_text(flags())
    print(f"wrote {FROZEN}")
