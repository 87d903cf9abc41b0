"""Automatic weight of an attention loss, measured against the task loss and then frozen.

"Self Supervision for Attention Networks" adds `gamma L_att` with a gamma "which brings both the
losses to the same scale" and does not state its value. Losses on maps differ by orders of magnitude
(a CORAL of 64 cells is about 1e-6), so no constant fits all.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from overt.losses.loss import Loss


class LossBalancer(nn.Module):
    """Weight an attention loss by its ratio to the task loss over the first batches.

    This is gamma or beta of the paper. Calling it with `(task, attention)` returns the weighted
    attention loss. Until the ratio is frozen it is that of the batches so far, including the
    current one; batches without a supervised row do not count. The ratio is measured over all
    processes, which must all call it (a process without a share of a small batch counts one sample
    twice). It is part of the module state: `SupervisedModel` adds it to checkpoints, so a resumed
    run has the same weight. Use one balancer per loss.

    Args:
        batches: How many batches to measure.

    Raises:
        ValueError: `batches` is below 1.

    Example:
        >>> task, attention = (Loss(torch.tensor(x), torch.tensor(1.0)) for x in (2.0, 0.5))
        >>> LossBalancer(batches=1)(task, attention).weight
        4.0
    """

    sums: Float[Tensor, "2 2"]
    seen: Num[Tensor, ""]

    def __init__(self, batches: int = 20) -> None:
        super().__init__()
        if batches < 1:
            raise ValueError(f"batches must be at least 1, got {batches}")
        self.batches = batches
        self.register_buffer("sums", torch.zeros(2, 2, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self._frozen: float | None = None
        self.register_load_state_dict_post_hook(_reset_frozen)

    def forward(self, task: Loss, attention: Loss) -> Loss:
        """Return the weighted attention loss; update the ratio first unless it is frozen."""
        if self._frozen is None:
            self._measure(task, attention)
        return attention * self.weight

    @property
    def weight(self) -> float:
        """The current ratio; 1 before the first batch."""
        if self._frozen is not None:
            return self._frozen
        (task, tasks), (attention, rows) = self.sums.tolist()
        if attention < 0:
            raise ValueError(
                f"the attention loss is {attention / max(rows, 1.0):g} on the first batches; the "
                "ratio of a negative loss is undefined: set its weight by hand"
            )
        known = attention > 0 and tasks > 0
        found = (task / tasks) / (attention / rows) if known else 1.0
        if int(self.seen) >= self.batches:
            self._frozen = found
        return found

    @property
    def frozen(self) -> bool:
        """Whether the ratio is final; from then on nothing synchronizes the GPU."""
        return self._frozen is not None

    def log_entry(self, name: str = "scale") -> dict[str, Loss]:
        """Return the weight as a loss of weight zero, so that it appears in the training log.

        Args:
            name: The name in the log.

        Returns:
            The losses to add to those of a step.
        """
        one = torch.ones((), device=self.sums.device, dtype=self.sums.dtype)
        return {name: Loss(one * self.weight, one, weight=0.0)}

    @torch.no_grad()
    def _measure(self, task: Loss, attention: Loss) -> None:
        if int(self.seen) >= self.batches:
            return
        found = [[one.total, one.count] for one in (task, attention)]
        new = torch.stack([torch.stack([n.to(self.sums) for n in pair]) for pair in found])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(new)
        if new[1, 1] > 0 and new.isfinite().all():  # non-finite losses stop the run elsewhere
            self.sums += new
            self.seen += 1


def _reset_frozen(module: nn.Module, incompatible: object) -> None:
    """Measure again or read the loaded ratio after a state was loaded."""
    assert isinstance(module, LossBalancer)
    module._frozen = None


class SupervisedModel(nn.Module):
    """A model and its loss modules as one module, which `fit` trains, saves and resumes.

    The loss modules become attributes, and batches are passed on to the model. Only the model is
    kept after training.

    Args:
        model: The model to train.
        **loss_modules: Modules by name, such as a `LossBalancer` or a `Discriminator`.

    Raises:
        ValueError: A name is already an attribute of the module.

    Example:
        >>> net = SupervisedModel(nn.Linear(2, 2), gamma=LossBalancer())
        >>> list(net.loss_modules)
        ['gamma']
    """

    def __init__(self, model: nn.Module, **loss_modules: nn.Module) -> None:
        super().__init__()
        self.model = model
        for name, module in loss_modules.items():
            if hasattr(self, name):
                raise ValueError(
                    f"a loss module cannot be named {name!r}, which is an attribute of modules"
                )
            self.add_module(name, module)

    def forward(self, batch: object) -> object:
        """Return the output of the model for a batch."""
        return self.model(batch)

    @property
    def loss_modules(self) -> Mapping[str, nn.Module]:
        """The loss modules by name."""
        return {name: one for name, one in self.named_children() if name != "model"}
