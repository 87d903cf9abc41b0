"""Parallel runs in worker processes; each worker does one run after another.

A worker reads requests from stdin, one line of JSON each, and writes one line per result. The
output of a run goes to a log file beside its folder. A worker exits when stdin is closed; a run in
progress is then stopped as by SIGTERM and saved, so no worker outlives its parent. A launcher, such
as `srun` or `ssh`, starts workers on other machines that share the folders.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, NamedTuple

from overt import system
from overt.errors import CorruptFileError, RunError, RunInterrupted, UserError, print_to_stderr
from overt.experiments import settings
from overt.experiments.recipe import Build, Recipe
from overt.experiments.recipe_file import file_errors, load_recipe_file

# Workers look up recipes by name: their entry point is in `papers`, above this package.
WORKER = "overt.papers.worker"
SHUTDOWN_TIMEOUT = 120.0  # seconds in which a run must save, before it is killed
LOG_POLL_INTERVAL = 0.3  # seconds between reads of the log files
VISIBLE, THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"


def run_or_error(
    recipe: Recipe, out: Path, build: Build, file: Path | None = None, **options: Any
) -> dict[str, Any] | Exception:
    """Return the results of a run, or its error; only `RunInterrupted` is raised.

    An error in the user's Python file names its line.
    """
    from overt.experiments import runner

    try:
        with file_errors(file):
            return runner.run(recipe, out, build, **options)
    except RunInterrupted:
        raise
    except (UserError, CorruptFileError, RunError) as error:
        return error
    except Exception as error:
        if os.environ.get("OVERT_TRACEBACK"):
            # On one line: the message is printed in tables.
            raise
        message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return RunError(f"internal error: {message} (set OVERT_TRACEBACK=1 for a traceback)")


class WorkerResult(NamedTuple):
    """The result of a request: its number, an exit code, and the reason of a failure."""

    number: int
    code: int = 0
    reason: str = ""


@dataclass(frozen=True)
class RunRequest:
    """A run for a worker: the recipe by name and class, with all of its settings.

    `file` is the FILE.py:NAME of the command line that defines the recipe, if it is not in the
    catalog.
    """

    recipe: str
    kind: str
    settings: Mapping[str, Any]
    out: str
    seed: int
    device: str
    data_root: str | None
    resume: bool
    command: Sequence[str]
    title: str | None = None
    file: str | None = None

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, out: Path, data_root: Path | None, **rest: Any
    ) -> "RunRequest":
        """Make the request for a run of a recipe."""
        root = None if data_root is None else str(data_root)
        values = settings.to_json(recipe)
        return cls(recipe.name, _recipe_type(recipe), values, str(out), data_root=root, **rest)

    @property
    def log(self) -> Path:
        """The log file, beside the run's folder."""
        return Path(f"{self.out}.log")

    def run(self, find_recipe: Callable[[str], Recipe], build: Build) -> tuple[int, str]:
        """Run in this process; return the exit code and the reason of a failure."""
        try:
            file = None if self.file is None else load_recipe_file(self.file)
            own = {} if file is None else file.recipes()
            recipe = own[self.recipe] if self.recipe in own else find_recipe(self.recipe)
        except UserError as error:
            return 2, str(error)
        # The worker finds the recipe by name, in the file or in the catalog. A recipe of the caller
        # with the same name would silently be another experiment.
        if _recipe_type(recipe) != self.kind:
            return (
                2,
                f"{self.recipe} is the name of another recipe in papers.catalog: use --jobs 1.",
            )
        recipe = settings.restore(recipe, self.settings)
        found = run_or_error(
            recipe,
            Path(self.out),
            build,
            seed=self.seed,
            device=self.device,
            data_root=None if self.data_root is None else Path(self.data_root),
            resume=self.resume,
            command=self.command,
            title=self.title,
            file=None if file is None else file.path,
        )
        if not isinstance(found, Exception):
            return 0, ""
        return 2 if isinstance(found, UserError | CorruptFileError) else 1, str(found)


def _recipe_type(recipe: Recipe) -> str:
    return f"{type(recipe).__module__}.{type(recipe).__qualname__}"


# --- the parent process


def split_launcher(text: str) -> tuple[str, ...]:
    """Split the command that starts workers into words, and check that it exists.

    Args:
        text: A command line, such as `srun -n 1`; it may be empty.

    Returns:
        Its words.

    Raises:
        UserError: It has an unclosed quotation mark, or its program is not installed.

    Example:
        >>> split_launcher("env -u 'A B'")
        ('env', '-u', 'A B')
    """
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"--launcher cannot be split into words: {error}, in {text!r}") from None
    if words and shutil.which(words[0]) is None:
        raise UserError(
            f"--launcher must begin with an installed program, such as srun; {words[0]!r} is not "
            "found"
        )
    return words


def run_parallel(
    requests: Sequence[RunRequest],
    jobs: int,
    on_start: Callable[[int], None] = lambda index: None,
    on_output: Callable[[int, str], None] | None = None,
    launcher: Sequence[str] = (),
) -> Generator[WorkerResult, None, None]:
    """Run all requests, `jobs` at a time, and yield each result when it is ready.

    `on_start` is called with the number of each request, `on_output` with each line of its log.
    GPUs are distributed over the workers, and so are CPU cores unless OMP_NUM_THREADS is set.
    `launcher` is a command that starts each worker, and then allocates GPUs and cores itself.
    Closing the iterator stops the runs; they save a checkpoint.
    """
    if not requests:
        return
    waiting = deque(range(len(requests)))
    devices = {request.device for request in requests}
    # One environment per worker at a time. A worker that exits gives its environment back, and with
    # it its GPU.
    unused = deque(_environments(min(jobs, len(requests)), devices, local=not launcher))
    idle: list[_Worker] = []
    busy: set[_Worker] = set()
    # A thread of each worker reads its result: Windows cannot wait for several pipes at once.
    results: SimpleQueue[tuple[_Worker, WorkerResult | Exception]] = SimpleQueue()
    try:
        while waiting or busy:
            while waiting and (idle or unused):
                worker = idle.pop() if idle else _Worker(unused.popleft(), launcher)
                busy.add(worker)
                on_start(waiting[0])
                worker.submit(waiting[0], requests[waiting.popleft()], results)
            try:
                found = results.get(timeout=LOG_POLL_INTERVAL)
            except Empty:
                found = None
            if on_output is not None:
                for one in busy:
                    for line in one.new_output():
                        on_output(one.index, line)
            if found is None:
                continue
            worker, result = found
            if isinstance(result, Exception):
                raise result
            busy.remove(worker)
            if worker.exited:
                unused.append(worker.environment)
            else:
                idle.append(worker)
            yield result
    finally:
        # Close all of them first, so that their runs save at the same time.
        for worker in (*idle, *busy):
            worker.close()
        for worker in (*idle, *busy):
            worker.wait()


class _Worker:
    """A worker process, from the side of its parent."""

    def __init__(self, environment: dict[str, str], launcher: Sequence[str] = ()) -> None:
        self.environment, self.exited = environment, False
        self.index, self.log, self.offset = -1, Path(os.devnull), 0
        # Not the thread itself: after a signal during its start, a thread cannot be joined.
        self.read_ended = threading.Event()
        self.read_ended.set()
        # `-P`: with `-m` alone, the working directory would come first on the import path.
        command = [sys.executable, "-P", "-m", WORKER]
        if launcher:
            # A launcher need not pass on the environment and the working directory: `ssh` does not.
            changes = [f"{name}={value}" for name, value in environment.items()]
            command = [*launcher, "env", "-C", os.getcwd(), *changes, *command]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
            bufsize=1,
            start_new_session=True,  # Ctrl-C reaches the parent only, which closes stdin
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin: IO[str] = self.process.stdin
        self.stdout: IO[str] = self.process.stdout

    def submit(
        self,
        index: int,
        request: RunRequest,
        results: SimpleQueue[tuple["_Worker", WorkerResult | Exception]],
    ) -> None:
        """Send a request, and put its result on a queue when it is ready."""
        self.index, self.log = index, request.log
        self.offset = request.log.stat().st_size if request.log.is_file() else 0
        # If the worker has exited, `read_result` says how.
        with suppress(BrokenPipeError):
            self.stdin.write(json.dumps(asdict(request)) + "\n")
            self.stdin.flush()

        def read() -> None:
            try:
                results.put((self, self.read_result()))
            except Exception as error:  # raised again in the thread of the caller
                results.put((self, error))
            finally:
                self.read_ended.set()

        self.read_ended.clear()
        threading.Thread(target=read, daemon=True).start()

    def new_output(self) -> list[str]:
        """Return the complete lines of the log since the last call."""
        if not self.log.is_file():
            return []
        with open(self.log, "rb") as file:
            file.seek(self.offset)
            # The last line may be half written: it is read next time.
            lines = file.read().rpartition(b"\n")[0]
        self.offset += len(lines) + bool(lines)
        return lines.decode("utf-8", "replace").splitlines()

    def read_result(self) -> WorkerResult:
        """Read the result of the current request; if the process has exited, it failed."""
        line = self.stdout.readline()
        if line.endswith("\n"):
            # Without a whole line, the process has ended.
            return WorkerResult(self.index, *json.loads(line))
        self.exited = True
        self.close()
        self.stdout.close()
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return WorkerResult(self.index, 1, f"its process {how}; its output is in {self.log}")

    def close(self) -> None:
        """Close stdin: the worker exits, after it has saved a run in progress."""
        with suppress(OSError):
            self.stdin.close()

    def wait(self) -> None:
        """Wait for the process to exit, and kill it after `SHUTDOWN_TIMEOUT`."""
        try:
            self.process.wait(SHUTDOWN_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # Otherwise a process that the worker left behind has the pipe open.
        if self.read_ended.wait(1.0):
            self.stdout.close()


def _environments(count: int, devices: set[str], local: bool = True) -> list[dict[str, str]]:
    """Return the environment of each worker: import path and, on this machine, GPU and threads."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    shared = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    if not local:
        return [dict(shared) for _ in range(count)]
    # PyTorch would use all cores in each worker.
    if THREADS not in os.environ:
        shared[THREADS] = str(max(1, system.available_cores() // count))
    gpus = _visible_gpus() if devices <= {"auto", "cuda"} else []
    return [
        {**shared, VISIBLE: gpus[number % len(gpus)]} if len(gpus) > 1 else dict(shared)
        for number in range(count)
    ]


def _visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    # CUDA numbers devices within CUDA_VISIBLE_DEVICES, so a worker gets an entry, not a position.
    if VISIBLE in os.environ:
        return [one.strip() for one in os.environ[VISIBLE].split(",") if one.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


# --- the worker process


def _redirect_output(path: Path) -> None:
    """Append stdout and stderr of this process to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as log:
        # The file descriptors are replaced, because C libraries and child processes write to them
        # too.
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def run_worker(find_recipe: Callable[[str], Recipe], build: Build) -> int:
    """Run requests from stdin until it is closed; return the exit code."""
    # Results go to a copy of stdout. Stdout itself becomes stderr, so that a print of a library
    # cannot get between them.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keeps prints out of the results
    # A thread reads stdin, so that a closed pipe is noticed during a run too.
    requests: SimpleQueue[str | None] = SimpleQueue()
    running, parent_has_gone = threading.Event(), threading.Event()

    def read_requests() -> None:
        for line in sys.stdin:
            if line.endswith("\n"):  # else the parent ended while it wrote
                requests.put(line)
        requests.put(None)
        parent_has_gone.set()
        # Stop the run, which saves its state first.
        if running.is_set():
            system.terminate_this_process()

    threading.Thread(target=read_requests, daemon=True).start()
    while (line := requests.get()) is not None:
        request = RunRequest(**json.loads(line))
        try:
            _redirect_output(request.log)
        except OSError as error:
            reason = f"{request.log} cannot be written: {error.strerror}"
            results.write(json.dumps([1, reason]) + "\n")
            continue
        running.set()
        if parent_has_gone.is_set():  # before the run: the thread may have missed that it begins
            break
        try:
            result = request.run(find_recipe, build)
        except RunInterrupted as ended:
            print_to_stderr(str(ended))
            return ended.code
        running.clear()
        results.write(json.dumps(result) + "\n")
    return 0
