"""The flags of the command line as text, one line per parameter; `make freeze` writes them."""

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

FROZEN = Path(__file__).with_name("cli_flags.txt")


def flags() -> str:
    """List every command with its arguments, flags, types and defaults, in a stable order."""
    import typer

    from overt.cli import app

    return "\n".join(command_lines(typer.main.get_command(app), "overt")) + "\n"


def command_lines(command: Any, name: str) -> Iterator[str]:
    """Yield the lines of one command, then those of its sub-commands by name."""
    yield name
    kinds = get_type_hints(command.callback) if command.callback else {}
    # Parameters outside the signature (--help, --install-completion) belong to typer.
    ours = [parameter for parameter in command.params if parameter.name in kinds]
    for parameter in sorted(ours, key=lambda p: (p.param_type_name, p.name)):
        if parameter.param_type_name == "argument":
            flag = parameter.name.upper()
        else:
            flag = " / ".join([*parameter.opts, *parameter.secondary_opts])
        words = [format_type(kinds[parameter.name]), *(["required"] if parameter.required else [])]
        if isinstance(parameter.default, str | int | float | Path):
            words.append(f"default {parameter.default}")
        yield f"  {name} {flag} ({', '.join(words)})"
    for sub, child in sorted(getattr(command, "commands", {}).items()):
        if not child.hidden:
            yield from command_lines(child, f"{name} {sub}")


def format_type(kind: Any) -> str:
    """Format a type as in source code, an enum by its values."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(member.value) for member in kind)
    return kind.__name__ if type(kind) is type else str(kind).replace("pathlib.", "")


if __name__ == "__main__":
    FROZEN.write_text(flags())
    print(f"wrote {FROZEN}")
