import asyncio
import threading
from collections.abc import Callable

import pytest

from overt.serve.line import Busy, Line


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition, for as long as a loaded machine may need."""
    async with asyncio.timeout(120):
        while not holds():
            await asyncio.sleep(0.001)


def test_one_at_a_time_and_in_order():
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

    async def everybody() -> list[int]:
        return await asyncio.gather(*(line.run(lambda n=n: work(n)) for n in range(20)))

    line = Line()
    assert asyncio.run(everybody()) == list(range(20)) == order
    assert most == 1 and line.length == 0
    line.close()


def test_a_full_line_turns_people_away_and_then_takes_them_again():
    line, go = Line(waiting=2), threading.Event()

    async def story() -> None:
        first = [asyncio.ensure_future(line.run(go.wait)) for _ in range(2)]
        await until(lambda: line.length == 2)
        with pytest.raises(Busy, match="2 questions are waiting"):
            await line.run(lambda: None)
        go.set()
        await asyncio.gather(*first)
        assert await line.run(lambda: 7) == 7

    asyncio.run(story())
    line.close()


def test_a_long_wait_is_told_and_what_had_not_begun_never_does():
    line, go, did = Line(patience=0.05), threading.Event(), []

    async def story() -> None:
        slow = asyncio.ensure_future(line.run(go.wait))
        behind = asyncio.ensure_future(line.run(lambda: did.append(1)))
        for one in (slow, behind):
            with pytest.raises(Busy, match="no answer within"):
                await one
        go.set()
        await until(lambda: not line.length)

    asyncio.run(story())
    assert did == []
    line.close()


def test_what_the_work_raises_reaches_whoever_asked():
    def fail() -> None:
        raise ValueError("bad")

    line = Line()
    with pytest.raises(ValueError, match="bad"):
        asyncio.run(line.run(fail))
    assert line.length == 0
    line.close()


def test_somebody_who_leaves_gives_up_the_place():
    line, go, did = Line(), threading.Event(), []

    async def story() -> None:
        slow = asyncio.ensure_future(line.run(go.wait))
        gone = asyncio.ensure_future(line.run(lambda: did.append(1)))
        await until(lambda: line.length == 2)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        go.set()
        await slow

    asyncio.run(story())
    line.close()
    assert did == [] and line.length == 0
