"""Real picture files for readers of photos."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

Write = Callable[..., Path]


@pytest.fixture(scope="session")
def write_photo() -> Write:
    """`write_photo(path, (height, width), value)` makes a JPEG or PNG of one grey, folders too."""

    def write(path: Path, size: tuple[int, int] = (6, 8), value: int = 100) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((*size, 3), value, dtype=np.uint8)).save(path, quality=95)
        return path

    return write
