"""Training runs in child processes that a test can kill, and the files that they write."""

import hashlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from overt.train import FitConfig, FitResult, ParameterSet, Reporter, fit, warmup_cosine
from tests.train import toys

CONFIG = FitConfig(epochs=8, batch=4, accumulate=2, save_every=3, log_every=4)  # 200 steps


def fork(work: Callable[[], object]) -> int:
    """Call `work` in a child process and return its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            found = work()
            code = found if isinstance(found, int) else 0
        except SystemExit as exit_request:
            code = (
                exit_request.code
                if isinstance(exit_request.code, int)
                else int(exit_request.code is not None)
            )
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    return child


def exit_code(child: int) -> int:
    """Wait for a process and return its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def has_exited(child: int) -> bool:
    """Whether a process has exited; its exit code can still be read."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_for(condition: Callable[[], bool], child: int) -> bool:
    """Wait until `condition` is true and return True, or False if the process exits first."""
    while not condition():
        if has_exited(child):
            return False
        time.sleep(0.0005)
    return True


def kill(child: int) -> bool:
    """Send SIGKILL to a process; return whether it was still running."""
    os.kill(child, signal.SIGKILL)
    return exit_code(child) == -signal.SIGKILL


class LargeNet(toys.Net):
    """The toy network with a large buffer, so that saving takes longer."""

    def __init__(self, buffer_size: int) -> None:
        super().__init__()
        self.register_buffer("ballast", torch.arange(float(buffer_size)))


def make(buffer_size: int = 100_000) -> tuple[LargeNet, dict[str, ParameterSet]]:
    torch.manual_seed(0)
    net = LargeNet(buffer_size)
    main_parameters = [*net.main.parameters(), *net.head.parameters()]
    adversary = torch.optim.SGD(net.adversary.parameters(), lr=1e-2, momentum=0.9)
    return net, {
        "model": ParameterSet(
            torch.optim.AdamW(main_parameters, lr=1e-2), warmup_cosine(), clip=1.0
        ),
        "adversary": ParameterSet(adversary),
    }


def train(out: Path, config: FitConfig = CONFIG, buffer_size: int = 100_000) -> FitResult:
    """Train to the end, resuming from existing checkpoints."""
    torch.set_num_threads(1)
    net, sets = make(buffer_size)
    resume, reporter = (out / "checkpoints").exists(), Reporter(enabled=False)
    return fit(
        net, toys.Numbers(200), toys.step, sets, config,
        out=out, seed=0, device="cpu", resume=resume, reporter=reporter,
    )  # fmt: skip


def checkpoint_folders(out: Path) -> list[Path]:
    """Return the checkpoint folders, oldest first."""
    return sorted((out / "checkpoints" / "train").glob("step-" + "[0-9]" * 9))


def temporary_files(out: Path) -> list[Path]:
    """Return the temporary files of writers that were killed."""
    return sorted(path for path in out.rglob(".*") if path.name.startswith((".tmp-", ".old-")))


def fingerprint(out: Path) -> dict[str, str]:
    """SHA-256 of the newest weights and optimizers and of the log, without clock times."""
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(checkpoint_folders(out)[-1].iterdir())
        if path.suffix == ".safetensors" or path.name.endswith("optimizer.json")
    }
    found["log"] = hashlib.sha256((out / "log.jsonl").read_bytes()).hexdigest()
    return found | {"step": checkpoint_folders(out)[-1].name}


def weights(net: nn.Module) -> str:
    """SHA-256 of all weights."""
    data = b"".join(tensor.numpy().tobytes() for tensor in net.state_dict().values())
    return hashlib.sha256(data).hexdigest()
