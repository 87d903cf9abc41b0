"""How much a loss on attention should count: as much as the task, measured and then left alone.

"Self Supervision for Attention Networks" adds `gamma L_att` with a gamma "which brings both the
losses to the same scale" and does not say which. Losses on maps differ by orders of magnitude (a
CORAL of 64 cells is a millionth), so no number is right for all.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from overt.supervise.loss import Loss


class Scale(nn.Module):
    """The ratio of two losses over the first `batches`, then frozen (gamma or beta of the paper).

    `scale(task, attention)` is the attention loss with that weight. Until it is frozen the ratio is
    that of the batches so far, the present one included; batches without a supervised row do not
    count. It is measured over all processes, which must all ask (one without a share of a small
    batch counts a sample again), and lies in the state of the module: `Taught` puts it into the
    checkpoints of a run, so a run that was stopped goes on with the very same weight. One `Scale`
    a loss.
    """

    sums: Float[Tensor, "2 2"]
    seen: Num[Tensor, ""]

    def __init__(self, batches: int = 20) -> None:
        super().__init__()
        if batches < 1:
            raise ValueError(f"a scale is measured on one batch or more, not {batches}")
        self.batches = batches
        self.register_buffer("sums", torch.zeros(2, 2, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self._frozen: float | None = None
        self.register_load_state_dict_post_hook(_forget)

    def forward(self, task: Loss, attention: Loss) -> Loss:
        """The attention loss, weighed; while measuring, this batch is measured first."""
        if self._frozen is None:
            self._measure(task, attention)
        return attention * self.weight

    @property
    def weight(self) -> float:
        """The ratio as it stands; 1 before there is anything to compare."""
        if self._frozen is not None:
            return self._frozen
        (task, tasks), (attention, rows) = self.sums.tolist()
        if attention < 0:
            raise ValueError(
                f"the attention loss came to {attention / max(rows, 1.0):g} on the first batches; "
                "no weight brings a loss below zero to the scale of the task: give it one yourself"
            )
        known = attention > 0 and tasks > 0
        found = (task / tasks) / (attention / rows) if known else 1.0
        if int(self.seen) >= self.batches:
            self._frozen = found
        return found

    @property
    def frozen(self) -> bool:
        """Whether the ratio has been measured: from then on nothing is read from the device."""
        return self._frozen is not None

    def noted(self, name: str = "scale") -> dict[str, Loss]:
        """The weight as a loss that pulls nowhere, so that the log of a run holds it."""
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
        if new[1, 1] > 0 and new.isfinite().all():  # what is not finite ends the run elsewhere
            self.sums += new
            self.seen += 1


def _forget(module: nn.Module, incompatible: object) -> None:
    """What was loaded decides, not what was measured before."""
    assert isinstance(module, Scale)
    module._frozen = None


class Taught(nn.Module):
    """A model and what teaches it, as one module: what `fit` trains, saves and resumes.

    Teachers are modules by name, a `Scale` or a `Discriminator`: `Taught(net, gamma=Scale())` has
    them as attributes and passes batches on to the model. Only the model is kept in the end.
    """

    def __init__(self, model: nn.Module, **teachers: nn.Module) -> None:
        super().__init__()
        self.model = model
        for name, teacher in teachers.items():
            if hasattr(self, name):
                raise ValueError(f"a teacher cannot be called {name!r}, which a module already has")
            self.add_module(name, teacher)

    def forward(self, batch: object) -> object:
        """What the model makes of a batch."""
        return self.model(batch)

    @property
    def teachers(self) -> Mapping[str, nn.Module]:
        """The teachers by name."""
        return {name: one for name, one in self.named_children() if name != "model"}
