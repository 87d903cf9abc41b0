"""Two processes with one sample each: `torchrun -m tests.parity.distributed_halves OUT`.

Each process writes OUT/rank-N if its maps are correct.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from overt.capture import watch
from tests.capture.families import family


def main(out: Path) -> None:
    """Compare maps and task gradients with those of one process with both samples."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    one = family("BERT")
    full = one.inputs()
    model = one.build("eager")
    wrapped = DistributedDataParallel(one.build("sdpa"), find_unused_parameters=True)
    output = model(**full, output_attentions=True)
    output.last_hidden_state.square().sum().backward()
    with warnings.catch_warnings(), watch(wrapped) as trace:
        warnings.simplefilter("ignore")
        half = wrapped(**{name: value[rank : rank + 1] for name, value in full.items()})
    (2 * half.last_hidden_state.square().sum()).backward()  # DDP averages over processes
    for call, weights in zip(trace, output.attentions, strict=True):
        torch.testing.assert_close(call.weights(), weights[rank : rank + 1], rtol=0, atol=1e-6)
    ours = dict(wrapped.module.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-4, atol=1e-4)
    (out / f"rank-{rank}").write_text("equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
