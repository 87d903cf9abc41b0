"""Lives of a run, each in a process of its own that a test ends; and what a run leaves behind."""

import hashlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from overt.train import Fitted, Limits, ParameterSet, Reporter, fit, warm_then_cosine
from tests.train import toys

LIMITS = Limits(epochs=8, batch=4, accumulate=2, save_every=3, log_every=4)  # 200 steps


def forked(work: Callable[[], object]) -> int:
    """Do `work` in a process of its own; its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            found = work()
            code = found if isinstance(found, int) else 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return child


def outcome(child: int) -> int:
    """The exit code of a process, once it has ended; minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def ended(child: int) -> bool:
    """Whether a process is over; it can still be asked for its outcome."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_for(there: Callable[[], bool], child: int) -> bool:
    """Wait until something is there, or the process that should bring it is over."""
    while not there():
        if ended(child):
            return False
        time.sleep(0.0005)
    return True


def kill(child: int) -> bool:
    """SIGKILL a process; whether it was still alive to be killed."""
    os.kill(child, signal.SIGKILL)
    return outcome(child) == -signal.SIGKILL


class Heavy(toys.Net):
    """The toy network with ballast, so that a save takes its time."""

    def __init__(self, ballast: int) -> None:
        super().__init__()
        self.register_buffer("ballast", torch.arange(float(ballast)))


def make(ballast: int = 100_000) -> tuple[Heavy, dict[str, ParameterSet]]:
    torch.manual_seed(0)
    net = Heavy(ballast)
    own = [*net.main.parameters(), *net.head.parameters()]
    other = torch.optim.SGD(net.adversary.parameters(), lr=1e-2, momentum=0.9)
    return net, {
        "model": ParameterSet(torch.optim.AdamW(own, lr=1e-2), warm_then_cosine(), clip=1.0),
        "adversary": ParameterSet(other),
    }


def live(out: Path, limits: Limits = LIMITS, ballast: int = 100_000) -> Fitted:
    """Train to the end, or on from what an earlier life left."""
    torch.set_num_threads(1)
    net, sets = make(ballast)
    going_on, quiet = (out / "checkpoints").exists(), Reporter(enabled=False)
    return fit(
        net, toys.Numbers(200), toys.step, sets, limits,
        out=out, seed=0, device="cpu", resume=going_on, reporter=quiet,
    )  # fmt: skip


def saved(out: Path) -> list[Path]:
    """The folders of checkpoints, the oldest first."""
    return sorted((out / "checkpoints" / "train").glob("step-" + "[0-9]" * 9))


def leftovers(out: Path) -> list[Path]:
    """What a writer left that was killed at work."""
    return sorted(path for path in out.rglob(".*") if path.name.startswith((".tmp-", ".old-")))


def fingerprint(out: Path) -> dict[str, str]:
    """SHA-256 of the newest weights and optimizers and of the log: all but clock times."""
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(saved(out)[-1].iterdir())
        if path.suffix == ".safetensors" or path.name.endswith("optimizer.json")
    }
    found["log"] = hashlib.sha256((out / "log.jsonl").read_bytes()).hexdigest()
    return found | {"step": saved(out)[-1].name}


def weights(net: nn.Module) -> str:
    """SHA-256 of all weights."""
    data = b"".join(tensor.numpy().tobytes() for tensor in net.state_dict().values())
    return hashlib.sha256(data).hexdigest()
