"""Global random generators, protected while the content of a cache is computed."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserve_global_rng() -> Iterator[None]:
    """Restore the global random generators of Python, NumPy and PyTorch after the block.

    The content of a cache is computed in one run and read in the next. If computing drew random
    numbers, the first run would continue with others than the second, for example for the initial
    weights of its model.

    Yields:
        Nothing.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> with preserve_global_rng():
        ...     _ = torch.nn.Linear(3, 3)  # draws its weights
        >>> bool(torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(0)))
        True
    """
    ours, theirs = random.getstate(), np.random.get_state()  # noqa: NPY002  it is restored
    # A device that was not used yet has no state, and asking for it would initialize the device.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    apple = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(theirs)  # noqa: NPY002
        if apple is not None:
            torch.mps.set_rng_state(apple)
