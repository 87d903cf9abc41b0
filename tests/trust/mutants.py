"""Artefacts with something wrong about them: bits, lengths, names, links, files of another."""

import os
import random
import shutil
from pathlib import Path


def mutate(folder: Path, other: Path, chance: random.Random) -> None:
    """Change something about an artefact of several files, in one of fourteen ways."""
    listed = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path, second = chance.sample(listed, 2)
    data = bytearray(path.read_bytes())
    where = chance.randrange(len(data))
    match chance.randrange(14):
        case 0 | 1 | 2:
            data[where] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
        case 3:
            path.write_bytes(data[:where])
        case 4:
            data[where : where + 64] = bytes(len(data[where : where + 64]))
            path.write_bytes(data)
        case 5:
            path.write_bytes(data + chance.randbytes(chance.randrange(1, 64)))
        case 6:
            path.write_bytes(second.read_bytes())
            second.write_bytes(data)
        case 7:
            shutil.copy(other / path.relative_to(folder), path)  # whole, but of another step
        case 8:
            path.unlink()
        case 9:
            (path.parent / f"new{chance.randrange(9)}").write_bytes(data)
        case 10:
            path.rename(path.with_name("renamed"))
        case 11:
            path.unlink()
            path.mkdir()
        case 12:
            path.rename(folder.parent / "moved")
            path.symlink_to(folder.parent / "moved")
        case 13:
            path.unlink()
            os.mkfifo(path)


def picture(folder: Path) -> dict[Path, object]:
    """What is in a folder, to see whether two are the same."""
    return {
        path: path.read_bytes() if path.is_file() and not path.is_symlink() else os.lstat(path)
        for path in folder.rglob("*")
        if not path.is_dir()
    }
