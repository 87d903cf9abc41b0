"""Random damage to artifacts: bits, lengths, names, links, files of another artifact."""

import os
import random
import shutil
from pathlib import Path


def mutate(folder: Path, other: Path, rng: random.Random) -> None:
    """Damage an artifact of several files in one of fourteen ways."""
    listed = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path, second = rng.sample(listed, 2)
    data = bytearray(path.read_bytes())
    position = rng.randrange(len(data))
    match rng.randrange(14):
        case 0 | 1 | 2:
            data[position] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
        case 3:
            path.write_bytes(data[:position])
        case 4:
            data[position : position + 64] = bytes(len(data[position : position + 64]))
            path.write_bytes(data)
        case 5:
            path.write_bytes(data + rng.randbytes(rng.randrange(1, 64)))
        case 6:
            path.write_bytes(second.read_bytes())
            second.write_bytes(data)
        case 7:
            shutil.copy(other / path.relative_to(folder), path)  # intact, but of another step
        case 8:
            path.unlink()
        case 9:
            (path.parent / f"new{rng.randrange(9)}").write_bytes(data)
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


def snapshot(folder: Path) -> dict[Path, object]:
    """Return the contents of a folder, to compare two folders."""
    return {
        path: path.read_bytes() if path.is_file() and not path.is_symlink() else os.lstat(path)
        for path in folder.rglob("*")
        if not path.is_dir()
    }
