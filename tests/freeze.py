"""The flags of the command line as text: one line a parameter. `make freeze` records them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

FROZEN = Path(__file__).with_name("cli_flags.txt")


def flags() -> str:
    """Every command with its arguments, flags, kinds and defaults, in a stable order."""
    import typer

    from overt.cli import app

    return "\n".join(lines(typer.main.get_command(app), "overt")) + "\n"


def lines(command: Any, name: str) -> Iterator[str]:
    """The lines of one command, then those of its sub-commands by name."""
    yield name
    for parameter in sorted(command.params, key=lambda p: (p.param_type_name, p.name)):
        spelled = (
            parameter.name.upper()
            if parameter.param_type_name == "argument"
            else " / ".join([*parameter.opts, *parameter.secondary_opts])
        )
        kind = getattr(parameter.type, "choices", None) or parameter.type.name
        kind = "|".join(map(str, kind)) if not isinstance(kind, str) else kind
        words = [kind, *(["required"] if parameter.required else [])]
        words += ["many"] if parameter.multiple or parameter.nargs == -1 else []
        if parameter.default is not None and isinstance(parameter.default, str | int | float):
            words.append(f"default {parameter.default}")
        yield f"  {name} {spelled} ({', '.join(words)})"
    for sub, child in sorted(getattr(command, "commands", {}).items()):
        if not child.hidden:
            yield from lines(child, f"{name} {sub}")


if __name__ == "__main__":
    FROZEN.write_text(flags())
    print(f"wrote {FROZEN}")
