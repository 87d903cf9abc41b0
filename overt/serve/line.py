"""People wait in line: one question is answered at a time, and too long a line is turned away."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Found = TypeVar("Found")


class Busy(Exception):
    """The line is full, or an answer took too long; what to do is in the message."""


class Line:
    """A thread that does one piece of work after another, and a bound on how many wait for it.

    One model is never asked twice at once: watching it changes it for a moment. `patience` is how
    many seconds a person waits before being told; work that has begun then ends by itself.
    """

    def __init__(self, waiting: int = 64, patience: float = 60.0) -> None:
        self.waiting, self.patience = waiting, patience
        self.length = 0
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="overt-answers")

    async def run(self, work: Callable[[], Found]) -> Found:
        """Do this when those before it are done; its result, or what it raised."""
        if self.length >= self.waiting:
            raise Busy(f"{self.length} questions are waiting; ask again in a moment.")
        self.length += 1
        begun = asyncio.get_running_loop().run_in_executor(self._pool, work)
        begun.add_done_callback(self._leave)
        try:
            return await asyncio.wait_for(asyncio.shield(begun), self.patience)
        except TimeoutError as error:
            begun.cancel()
            raise Busy(
                f"no answer within {self.patience:.0f} s; ask for less, or again in a moment."
            ) from error
        except asyncio.CancelledError:  # whoever asked has gone
            begun.cancel()
            raise

    def _leave(self, begun: "asyncio.Future[Found]") -> None:
        self.length -= 1
        if not begun.cancelled():
            begun.exception()  # was raised to whoever waited, if anybody still does

    def close(self) -> None:
        """Let what has begun end, and begin nothing more."""
        self._pool.shutdown(wait=True, cancel_futures=True)
