"""The request queue: order, limits, timeouts, errors, and cancelled requests."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from overt.inspect.server.request_queue import QueueBusyError, RequestQueue


async def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition, with a timeout for a loaded machine."""
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.001)


def test_requests_run_one_at_a_time_and_in_order():
    running, most, order = 0, 0, []
    lock = threading.Lock()

    def work(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        order.append(number)
        with lock:
            running -= 1
        return number

    async def run_all() -> list[int]:
        return await asyncio.gather(*(queue.run(lambda n=n: work(n)) for n in range(20)))

    queue = RequestQueue()
    assert asyncio.run(run_all()) == list(range(20)) == order
    assert most == 1 and queue.length == 0
    queue.close()


def test_a_full_queue_rejects_requests_until_it_has_room():
    queue, go = RequestQueue(waiting=2), threading.Event()

    async def scenario() -> None:
        first = [asyncio.ensure_future(queue.run(go.wait)) for _ in range(2)]
        await wait_until(lambda: queue.length == 2)
        with pytest.raises(QueueBusyError, match="2 requests"):
            await queue.run(lambda: None)
        go.set()
        await asyncio.gather(*first)
        assert await queue.run(lambda: 7) == 7

    asyncio.run(scenario())
    queue.close()


def test_a_timeout_raises_and_queued_work_does_not_start():
    queue, go, processed = RequestQueue(patience=0.05), threading.Event(), []

    async def scenario() -> None:
        slow = asyncio.ensure_future(queue.run(go.wait))
        behind = asyncio.ensure_future(queue.run(lambda: processed.append(1)))
        for one in (slow, behind):
            with pytest.raises(QueueBusyError, match="within"):
                await one
        go.set()
        await wait_until(lambda: not queue.length)

    asyncio.run(scenario())
    assert processed == []
    queue.close()


def test_a_base_exception_in_the_work_is_a_runtime_error():
    class Panic(BaseException):
        """Like a Rust panic in Python."""

    def raise_error(error: BaseException) -> None:
        raise error

    queue = RequestQueue()
    for error in (SystemExit(3), Panic("index out of bounds")):
        with pytest.raises(RuntimeError, match=type(error).__name__):
            asyncio.run(queue.run(lambda error=error: raise_error(error)))
    assert asyncio.run(queue.run(lambda: 7)) == 7
    queue.close()


def test_a_timeout_error_of_the_work_is_passed_on():
    def fail() -> None:
        raise TimeoutError("the disk")

    queue = RequestQueue()
    with pytest.raises(TimeoutError, match="the disk"):
        asyncio.run(queue.run(fail))
    queue.close()


def test_the_next_request_starts_after_timed_out_work_has_finished():
    queue, go, order = RequestQueue(patience=0.05), threading.Event(), []

    def slow() -> None:
        go.wait()
        order.append("slow")

    async def scenario() -> None:
        with pytest.raises(QueueBusyError, match="within"):
            await queue.run(slow)
        queue.patience = 120.0
        behind = asyncio.ensure_future(queue.run(lambda: order.append("behind")))
        await asyncio.sleep(0.01)
        assert order == []
        go.set()
        await behind

    asyncio.run(scenario())
    assert order == ["slow", "behind"]
    queue.close()


@pytest.mark.long
def test_cancelled_work_is_freed_while_another_request_runs():
    """Many requests with large images are cancelled behind a slow one."""
    queue, go = RequestQueue(), threading.Event()

    class Picture:
        pass

    async def scenario() -> None:
        slow = asyncio.ensure_future(queue.run(go.wait))
        await asyncio.sleep(0)
        kept = []
        for _ in range(100):
            picture = Picture()
            kept.append(weakref.ref(picture))
            gone = asyncio.ensure_future(queue.run(lambda picture=picture: picture))
            await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            del picture, gone
        gc.collect()
        assert sum(one() is not None for one in kept) <= 1  # the traceback keeps the last one
        go.set()
        await slow

    asyncio.run(scenario())
    queue.close()


def test_a_closed_queue_raises():
    queue = RequestQueue()
    queue.close()
    with pytest.raises(QueueBusyError, match="shutting down"):
        asyncio.run(queue.run(lambda: 1))


def test_an_error_of_the_work_reaches_the_caller():
    def fail() -> None:
        raise ValueError("bad")

    queue = RequestQueue()
    with pytest.raises(ValueError, match="bad"):
        asyncio.run(queue.run(fail))
    assert queue.length == 0
    queue.close()


def test_a_cancelled_request_leaves_the_queue():
    queue, go, processed = RequestQueue(), threading.Event(), []

    async def scenario() -> None:
        slow = asyncio.ensure_future(queue.run(go.wait))
        gone = asyncio.ensure_future(queue.run(lambda: processed.append(1)))
        await wait_until(lambda: queue.length == 2)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        go.set()
        await slow

    asyncio.run(scenario())
    queue.close()
    assert processed == [] and queue.length == 0
