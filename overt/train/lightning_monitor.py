"""Attention statistics in Lightning: a callback around `AttentionMonitor`.

Lightning is imported on first use.
"""

from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

from overt.errors import require_package
from overt.train.monitor import AttentionMonitor, AttentionStats

if TYPE_CHECKING:
    from lightning.pytorch import Callback


def lightning_monitor(
    monitor: AttentionMonitor | None = None, model: nn.Module | None = None
) -> "Callback":
    """Make a Lightning callback that logs attention statistics of some training steps.

    They are logged as `attention/entropy/LAYER`, as by `AttentionMonitorMixin` in Hugging Face
    Trainer, to every logger of the trainer. Only the forward pass of the step is watched, in the
    first of its accumulated batches.

    Args:
        monitor: Which steps and which statistics; by default `AttentionMonitor()`.
        model: The model to watch; by default the whole `LightningModule`.

    Returns:
        The callback, for `Trainer(callbacks=[...])`.

    Raises:
        ImportError: Lightning is not installed.

    Example:
        >>> from overt.train.monitor import AttentionMonitor
        >>> try:
        ...     callback = lightning_monitor(AttentionMonitor(every=10))
        ...     name = type(callback).__mro__[1].__name__
        ... except ImportError:  # without the package lightning
        ...     name = "Callback"
        >>> name
        'Callback'
    """
    require_package("lightning")
    made: Callback = _callback_class()(monitor or AttentionMonitor(), model)
    return made


@cache
def _callback_class() -> Any:
    """Return the class of the callbacks; it can be made only when Lightning is imported."""
    from lightning.pytorch import Callback

    class LightningMonitor(Callback):
        """See `lightning_monitor`."""

        def __init__(self, monitor: AttentionMonitor, model: nn.Module | None) -> None:
            self.monitor, self.model = monitor, model
            self.watched = ExitStack()
            self.stats: AttentionStats | None = None
            self.last_step = -1

        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            """Start to watch, if the step is due."""
            step = trainer.global_step
            if step == self.last_step or not self.monitor.due(step):
                return
            self.last_step = step
            model = pl_module if self.model is None else self.model
            self.stats = self.watched.enter_context(self.monitor.observe(model))

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            """Stop watching and log."""
            self.watched.close()
            if self.stats is None:
                return
            found, self.stats = self.stats.compute(), None
            values = {
                f"attention/{number}/{layer}": value
                for number, layers in found.items()
                for layer, value in layers.items()
            }
            # not by `self.log`, which repeats the last values in the steps that are not watched
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            """Stop watching if the step had no backward pass."""
            self.watched.close()
            self.stats = None

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            """Leave the model as it was found, without a complaint about the unfinished step."""
            self.watched.__exit__(type(exception), exception, exception.__traceback__)
            self.stats = None

    return LightningMonitor
