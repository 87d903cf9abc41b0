"""Metrics as `torchmetrics.Metric`: updated batch by batch, synchronized between processes.

The state is one score per sample, not a sum: so the confidence interval of all batches and all
processes is that of `statistics`. TorchMetrics is imported on first use.
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from overt.errors import require_package
from overt.metrics.metric import MetricInfo
from overt.metrics.statistics import Interval, confidence_interval

if TYPE_CHECKING:
    from torchmetrics import Metric


def as_metric(metric: Callable[..., Tensor], share: bool = False, **fixed: Any) -> "Metric":
    """Make a `torchmetrics.Metric` of a metric of overt.

    `update` takes the arguments of the function, `compute` returns the mean over all samples with a
    score, NaN without any. `interval` returns the mean with its confidence interval. It works in
    `MetricCollection`, in Lightning's `self.log`, and with several processes. Its state is saved
    only after `persistent(True)`, as that of other metrics.

    Args:
        metric: A metric of `overt.metrics`, or another function with `declare_metric`.
        share: Whether all scores are 0 or 1, as of the pointing game: then Wilson's interval.
        fixed: Keyword arguments of the metric that are the same for all batches.

    Returns:
        The metric. `higher_is_better` and the bounds of plots are those of `metric.info`.

    Raises:
        ImportError: TorchMetrics is not installed.
        TypeError: The function does not declare what its scores mean.

    Example:
        >>> from overt import AttentionMap, grid
        >>> from overt.metrics import mass_inside
        >>> inside = as_metric(mass_inside)
        >>> for left in (0.25, 0.75):
        ...     weights = torch.tensor([[left, 1 - left]])
        ...     target = AttentionMap.from_cells(torch.tensor([[1.0, 0.0]]), grid(1, 2))
        ...     inside.update(AttentionMap.from_cells(weights, grid(1, 2)), target)
        >>> inside.compute(), inside.higher_is_better
        (tensor(0.5000), True)
        >>> inside.interval().count
        2
    """
    require_package("torchmetrics")
    if not isinstance(getattr(metric, "info", None), MetricInfo):
        name = getattr(metric, "__name__", type(metric).__name__)
        raise TypeError(
            f"expected a metric with its meaning in .info, got {name}: declare it with "
            "overt.metrics.declare_metric"
        )
    made: Metric = _metric_class()(metric, share, fixed)
    return made


@cache
def _metric_class() -> Any:
    """Return the class of the metrics; it can be made only when TorchMetrics is imported."""
    from torchmetrics import Metric
    from torchmetrics.utilities import dim_zero_cat

    class RunningMetric(Metric):
        """Scores per sample of all updates; see `as_metric`."""

        is_differentiable = False
        full_state_update = False

        def __init__(
            self, metric: Callable[..., Tensor], share: bool, fixed: dict[str, Any]
        ) -> None:
            super().__init__()
            self.metric, self.share, self.fixed = metric, share, fixed
            self.state = _state_name(metric, fixed)
            self.add_state(self.state, default=[], dist_reduce_fx="cat")

        @property
        def scores(self) -> Any:
            """A list of the scores of each update; one tensor while processes are synchronized."""
            return getattr(self, self.state)

        # properties: TorchMetrics does not let an instance set these
        @property
        def higher_is_better(self) -> bool | None:  # type: ignore[override]
            """Whether higher values are better; None if neither direction is."""
            return self._info.higher_is_better

        @property
        def plot_lower_bound(self) -> float | None:  # type: ignore[override]
            """The lower bound of plots, None without one."""
            return self._info.low if math.isfinite(self._info.low) else None

        @property
        def plot_upper_bound(self) -> float | None:  # type: ignore[override]
            """The upper bound of plots, None without one."""
            return self._info.high if math.isfinite(self._info.high) else None

        @property
        def _info(self) -> MetricInfo:
            info: MetricInfo = self.metric.info  # type: ignore[attr-defined]
            return info

        def update(self, *args: Any, **kwargs: Any) -> None:
            """Add the scores of a batch; the arguments are those of the metric."""
            scores = self.metric(*args, **{**self.fixed, **kwargs})
            if not isinstance(scores, Tensor) or scores.ndim != 1:
                got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                raise ValueError(f"a metric returns one score per sample (b,), got {got}")
            self.scores.append(scores.detach().float())

        def compute(self) -> Tensor:
            """Return the mean over the samples with a score, NaN without any."""
            return self._all_scores().nanmean()

        def interval(self, confidence: float = 0.95) -> Interval:
            """Return the mean and its confidence interval, over the samples of all processes.

            Args:
                confidence: Share of such intervals that cover the mean.
            """
            with self.sync_context():
                scores = self._all_scores()
            return confidence_interval(scores, confidence=confidence, share=self.share)

        def _all_scores(self) -> Tensor:
            found: Tensor = dim_zero_cat(self.scores) if len(self.scores) else torch.zeros(0)
            return found

    # found by `__getattr__` below, so that it can be sent to another process
    RunningMetric.__qualname__ = "RunningMetric"
    return RunningMetric


_numbers = count(1)


def _state_name(metric: Callable[..., Tensor], fixed: dict[str, Any]) -> str:
    """Return a name of the state that other functions and other fixed arguments do not have.

    `MetricCollection` updates only one of several metrics whose states have the same names and,
    after the first batch, the same values: two metrics of overt may well agree on a batch.
    """
    name = getattr(metric, "__qualname__", "<locals>")
    plain = all(one is None or isinstance(one, bool | int | float | str) for one in fixed.values())
    if "<locals>" in name or not plain:  # nothing else tells them apart
        return f"scores_{next(_numbers)}"
    settings = [f"{key}={value!r}" for key, value in sorted(fixed.items())]
    return "_".join(["scores", getattr(metric, "__module__", ""), name, *settings]).replace(
        ".", "_"
    )


def __getattr__(name: str) -> Any:
    if name == "RunningMetric":
        return _metric_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
