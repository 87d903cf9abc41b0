"""Bounded request queue with one worker thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def _run_contained(work: Callable[[], Result]) -> Result:
    """Run the work; turn SystemExit or a Rust panic, which would end the server, into an error."""
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


class QueueBusyError(Exception):
    """The queue is full, or a response took too long."""


class RequestQueue:
    """One worker thread with a limit on the number of waiting requests.

    A model is never used twice at once, since `watch` changes it temporarily. A request is rejected
    after `patience` seconds. Work that has begun cannot be stopped; the next begins after it. Work
    that has not begun is dropped as soon as its request is cancelled or rejected.
    """

    def __init__(self, waiting: int = 64, patience: float = 60.0) -> None:
        self.waiting, self.patience = waiting, patience
        self.length = 0
        self._turn = asyncio.Lock()  # first come, first served; held until the work has ended
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="overt-answers")

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run this work after the work before it.

        Returns:
            The result of `work`.

        Raises:
            QueueBusyError: `waiting` requests are waiting, or there was no result within `patience`
                seconds.
            Exception: the exception of `work`.
        """
        if self.length >= self.waiting:
            raise QueueBusyError(f"{self.length} requests are waiting: try again in a moment.")
        self.length += 1
        limit = asyncio.timeout(self.patience)
        try:
            async with limit:
                return await self._in_turn(work)
        except TimeoutError as error:
            if not limit.expired():
                raise  # raised by the work itself
            raise QueueBusyError(
                f"no response within {self.patience:.0f} s: request less, or try again in a moment."
            ) from error
        finally:
            self.length -= 1

    async def _in_turn(self, work: Callable[[], Result]) -> Result:
        """Wait for the worker, and release it when the work has really ended."""
        await self._turn.acquire()
        try:
            begun = asyncio.get_running_loop().run_in_executor(self._pool, _run_contained, work)
        except RuntimeError as error:
            self._turn.release()
            raise QueueBusyError("the server is shutting down.") from error
        begun.add_done_callback(self._ended)
        # Cancelling the request must not cancel the future: its callback releases the lock when the
        # work has really ended.
        return await asyncio.shield(begun)

    def _ended(self, begun: "asyncio.Future[Result]") -> None:
        self._turn.release()
        if not begun.cancelled():
            begun.exception()  # mark as retrieved

    def close(self) -> None:
        """Finish the current work and start nothing more."""
        self._pool.shutdown(wait=True, cancel_futures=True)
