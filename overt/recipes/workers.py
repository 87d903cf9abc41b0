"""Runs side by side: workers, each a process of its own that takes one run after another.

A worker reads orders from its standard input, a line of JSON each, and answers each with a line.
What a run says while it goes on is in a file beside its folder. A worker ends when its input does;
a run that is under way is then stopped as by SIGTERM, and saved: no worker outlives who started it.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

from overt.errors import BadInput, Damaged, Failed, Stopped
from overt.recipes import checks, find, settings
from overt.recipes.recipe import Recipe

PATIENCE = 120.0  # seconds that a run has to save what it has, before it is killed
OFTEN = 0.3  # seconds after which what runs say is passed on
VISIBLE, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"


def tried(recipe: Recipe, out: Path, **options: Any) -> dict[str, Any] | Exception:
    """The results of one run, or what it failed of, as an error with a sentence of its own.

    An end that was asked for, `Stopped`, goes through.
    """
    from overt.recipes import running

    try:
        return running.run(recipe, out, **options)
    except Stopped:
        raise
    except (BadInput, Damaged, Failed) as error:
        return error
    except Exception as error:
        if os.environ.get("OVERT_TRACEBACK"):
            raise
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Failed(f"a defect in overt: {said} (OVERT_TRACEBACK=1 shows where)")


class Ended(NamedTuple):
    """How an order ended: which it was, the exit code that a command would have, and why."""

    number: int
    code: int = 0
    why: str = ""


@dataclass(frozen=True)
class Order:
    """One run, as a worker is told of it; `settings` are all that its recipe has."""

    recipe: str
    settings: Mapping[str, Any]
    out: str
    seed: int
    device: str
    data_root: str | None
    resume: bool
    command: Sequence[str]
    title: str | None = None

    @classmethod
    def of(cls, recipe: Recipe, out: Path, data_root: Path | None, **rest: Any) -> "Order":
        """The order for a recipe, which has to be one that its name leads back to."""
        values = settings.to_json(recipe)
        if type(find(recipe.name)) is not type(recipe):
            raise BadInput(f"{recipe.name} is another recipe by its name; run it by itself.")
        root = None if data_root is None else str(data_root)
        return cls(recipe.name, values, str(out), data_root=root, **rest)

    @property
    def log(self) -> Path:
        """The file beside the run's folder that has what the run says."""
        return Path(f"{self.out}.log")

    def run(self) -> tuple[int, str]:
        """Run it here: an exit code and what it failed of."""
        recipe = settings.restore(find(self.recipe), self.settings)
        found = tried(
            recipe,
            Path(self.out),
            seed=self.seed,
            device=self.device,
            data_root=None if self.data_root is None else Path(self.data_root),
            resume=self.resume,
            command=self.command,
            title=self.title,
        )
        if not isinstance(found, Exception):
            return 0, ""
        return 2 if isinstance(found, BadInput | Damaged) else 1, str(found)


# --- who gives orders


def side_by_side(
    orders: Sequence[Order],
    jobs: int,
    begins: Callable[[int], None] = lambda index: None,
    says: Callable[[int, str], None] | None = None,
) -> Iterator[Ended]:
    """Run all orders, `jobs` at a time, and tell of each when it ends.

    Orders begin as they come; `begins` hears of each, and `says` gets the lines that they say.
    Cards are shared out among the workers, and so are processors, where the environment does not
    say how many threads there are to be. Whoever stops listening stops the runs: they save what
    they have.
    """
    if not orders:
        return
    waiting = deque(range(len(orders)))
    unmanned = deque(_environments(min(jobs, len(orders)), {order.device for order in orders}))
    idle: list[_Worker] = []
    busy: set[_Worker] = set()
    with selectors.DefaultSelector() as heard:
        try:
            while waiting or busy:
                while waiting and (idle or unmanned):
                    worker = idle.pop() if idle else _Worker(unmanned.popleft())
                    busy.add(worker)
                    heard.register(worker.answers, selectors.EVENT_READ, worker)
                    begins(waiting[0])
                    worker.take(waiting[0], orders[waiting.popleft()])
                ready = heard.select(None if says is None else OFTEN)
                if says is not None:
                    for worker in busy:
                        for line in worker.news():
                            says(worker.index, line)
                for key, _ in ready:
                    worker = key.data
                    heard.unregister(worker.answers)
                    ended = worker.answer()
                    busy.remove(worker)
                    if worker.gone:
                        unmanned.append(worker.environment)
                    else:
                        idle.append(worker)
                    yield ended
        finally:
            for worker in (*idle, *busy):
                worker.dismiss()
            for worker in (*idle, *busy):
                worker.wait()


class _Worker:
    """A process that takes orders, as its employer sees it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment, self.gone = environment, False
        self.index, self.log, self.read = -1, Path(os.devnull), 0
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
            bufsize=1,
            start_new_session=True,  # Ctrl-C is for the employer, who then closes the input
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.orders: IO[str] = self.process.stdin
        self.answers: IO[str] = self.process.stdout

    def take(self, index: int, order: Order) -> None:
        """Give it an order; a worker that is not there any more is noticed by its answer."""
        self.index, self.log = index, order.log
        self.read = order.log.stat().st_size if order.log.is_file() else 0
        with suppress(BrokenPipeError):
            self.orders.write(json.dumps(asdict(order)) + "\n")
            self.orders.flush()

    def news(self) -> list[str]:
        """The whole lines that its run has said since it was last asked."""
        if not self.log.is_file():
            return []
        with open(self.log, "rb") as file:
            file.seek(self.read)
            whole = file.read().rpartition(b"\n")[0]
        self.read += len(whole) + bool(whole)
        return whole.decode("utf-8", "replace").splitlines()

    def answer(self) -> Ended:
        """How its order has ended; the end of the process is a failure."""
        line = self.answers.readline()
        if line.endswith("\n"):
            return Ended(self.index, *json.loads(line))
        self.gone = True
        self.dismiss()
        self.answers.close()
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return Ended(self.index, 1, f"its process {how}; what it said last is in {self.log}")

    def dismiss(self) -> None:
        """Let it end, or stop what it does."""
        with suppress(OSError):
            self.orders.close()

    def wait(self) -> None:
        """Wait for its end, and make one if it does not come."""
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.answers.close()


def _environments(count: int, devices: set[str]) -> list[dict[str, str]]:
    """What each worker is told by its environment: the code to run, its card and its threads."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    shared = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    if THREADS not in os.environ:
        shared[THREADS] = str(max(1, checks.cores() // count))
    cards = _cards() if devices <= {"auto", "cuda"} else []
    return [
        {**shared, VISIBLE: cards[number % len(cards)]} if len(cards) > 1 else dict(shared)
        for number in range(count)
    ]


def _cards() -> list[str]:
    """The cards that this process may use, by the names that the driver knows them by."""
    if VISIBLE in os.environ:
        return [one.strip() for one in os.environ[VISIBLE].split(",") if one.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


# --- who takes them


def _speak_to(path: Path) -> None:
    """From now on, what this process prints goes to the end of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def main() -> int:
    """Take orders until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what is printed is no answer
    orders: SimpleQueue[str | None] = SimpleQueue()
    under_way = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(line)
        orders.put(None)
        if under_way.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True).start()
    while (line := orders.get()) is not None:
        order = Order(**json.loads(line))
        try:
            _speak_to(order.log)
        except OSError as error:
            why = f"{order.log} cannot be written: {error.strerror}"
            answers.write(json.dumps([1, why]) + "\n")
            continue
        under_way.set()
        try:
            answer = order.run()
        except Stopped as ended:
            print(ended, file=sys.stderr)
            return ended.code
        under_way.clear()
        answers.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
