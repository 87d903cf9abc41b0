"""Hostile inputs: pickles that create a file when they are loaded, and mutated bytes."""

import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def _create_file(path: str) -> dict[str, Any]:
    Path(path).touch()
    return {}


class Canary:
    """An object that creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return _create_file, (str(self.mark),)


def pickles(mark: Path) -> dict[str, bytes]:
    """Return a canary in every file format that can contain pickles."""
    canary = Canary(mark)
    objects = np.array([canary], dtype=object)
    streams: dict[str, io.BytesIO] = {name: io.BytesIO() for name in ("npy", "npz", "pt", "old pt")}
    np.save(streams["npy"], objects, allow_pickle=True)
    np.savez(streams["npz"], a=objects)
    torch.save({"weight": canary}, streams["pt"])
    torch.save({"weight": canary}, streams["old pt"], _use_new_zipfile_serialization=False)
    found = {f"pickle {version}": pickle.dumps(canary, version) for version in (0, 2, 4, 5)}
    return found | {name: stream.getvalue() for name, stream in streams.items()}


def mutate_bytes(data: bytes, rng: random.Random, most: int = 3) -> bytes:
    """Change, truncate, insert, repeat or set to ones up to `most` places of the bytes."""
    found = bytearray(data)
    for _ in range(rng.randint(1, most)):
        at = rng.randrange(len(found)) if found else 0
        match rng.choice([0, 0, 0, 1, 2, 3, 4]):
            case 0 if found:
                found[at] = rng.randrange(256)
            case 1:
                del found[at:]
            case 2:
                found[at:at] = rng.randbytes(rng.randint(1, 9))
            case 3:
                found[at : at + 4] = b"\xff\xff\xff\xff"
            case 4:
                found[at:at] = found[at : at + rng.randint(1, 64)]
    return bytes(found)
