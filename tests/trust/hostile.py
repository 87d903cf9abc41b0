"""What an attacker would send: canaries that tell when they are run, and changed bytes."""

import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def _sing(path: str) -> dict[str, Any]:
    Path(path).touch()
    return {}


class Canary:
    """An object that leaves a file behind as soon as somebody unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return _sing, (str(self.mark),)


def pickles(mark: Path) -> dict[str, bytes]:
    """The canary in every wrapping in which libraries of the field have met pickles."""
    canary = Canary(mark)
    objects = np.array([canary], dtype=object)
    streams: dict[str, io.BytesIO] = {name: io.BytesIO() for name in ("npy", "npz", "pt", "old pt")}
    np.save(streams["npy"], objects, allow_pickle=True)
    np.savez(streams["npz"], a=objects)
    torch.save({"weight": canary}, streams["pt"])
    torch.save({"weight": canary}, streams["old pt"], _use_new_zipfile_serialization=False)
    found = {f"pickle {version}": pickle.dumps(canary, version) for version in (0, 2, 4, 5)}
    return found | {name: stream.getvalue() for name, stream in streams.items()}


def mutated(data: bytes, dice: random.Random, most: int = 3) -> bytes:
    """The bytes with one to `most` of them changed, cut off, put in, doubled or set to ones."""
    found = bytearray(data)
    for _ in range(dice.randint(1, most)):
        at = dice.randrange(len(found)) if found else 0
        match dice.choice([0, 0, 0, 1, 2, 3, 4]):
            case 0 if found:
                found[at] = dice.randrange(256)
            case 1:
                del found[at:]
            case 2:
                found[at:at] = dice.randbytes(dice.randint(1, 9))
            case 3:
                found[at : at + 4] = b"\xff\xff\xff\xff"
            case 4:
                found[at:at] = found[at : at + dice.randint(1, 64)]
    return bytes(found)
