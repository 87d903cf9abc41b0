"""From a recipe's plain values to data, model and stages."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from overt import models, supervise
from overt.data.batch import Batch
from overt.data.source import Source as DataSet
from overt.data.vocabulary import Reader
from overt.errors import BadInput
from overt.recipes.baselines import BaselineRecipe, Files, TextModel
from overt.recipes.evaluation import Judge, labels_of
from overt.recipes.experiment import Experiment, Source, Stage
from overt.recipes.recipe import Context, Precision, Train
from overt.recipes.scenes import Look, Model, ScenesRecipe, Target
from overt.recipes.spoken import spoken
from overt.train import (
    AttentionMonitor,
    Fitted,
    Limits,
    Losses,
    Monitor,
    ParameterSet,
    Progress,
    Reporter,
    fit,
    processes,
    warm_then_cosine,
)
from overt.train.monitor import By, Note, Rows, by_outputs

SPLITS = ("train", "val", "test")
CELL = 8  # pixels a side of what the network sees as one cell of a scene
Teach = Callable[[models.Output, Batch], dict[str, supervise.Loss]]


def nothing_more(output: models.Output, batch: Batch) -> dict[str, supervise.Loss]:
    """No loss besides that of the task."""
    return {}


def adamw(model: nn.Module, plan: Train) -> ParameterSet:
    """All parameters under AdamW, with a rate that warms up and falls along a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), plan.rate, weight_decay=plan.decay)
    return ParameterSet(optimizer, warm_then_cosine(plan.warmup), plan.clip)


def experiment(
    model: nn.Module,
    train: DataSet,
    validation: Judge | None,
    test: Judge,
    plan: Train,
    context: Context,
    teach: Teach = nothing_more,
    vary: Callable[[Batch], Batch] = lambda batch: batch,
    learn: Callable[[nn.Module, Train], ParameterSet] = adamw,
    reader: Reader | None = None,
) -> Experiment:
    """One stage that trains a classifier with cross-entropy, then a test.

    `teach` adds losses to the task's, `vary` changes each training batch, `learn` says how the
    parameters move, `reader` reads the texts. Without `validation` nothing is looked at before the
    test.
    """

    def step(net: nn.Module, batch: Batch, progress: Progress) -> Losses:
        output = net(vary(batch))
        task = supervise.classification(output.prediction, labels_of(batch))
        return {"model": {"task": task, **teach(output, batch)}}

    sets = {"model": learn(model, plan)}
    device = processes(context.device).device
    used, monitor = [train, test.data], None
    if validation is not None:
        held = validation
        used.insert(1, held.data)

        def validate(net: nn.Module) -> dict[str, float]:
            return {"accuracy": held.accuracy(cast(models.Model, net), device)}

        monitor = Monitor(validate, "accuracy")

    def run(resume: bool, reporter: Reporter) -> Fitted:
        return fit(
            model,
            train,
            step,
            sets,
            limits(plan),
            out=context.out,
            seed=context.seed,
            device=context.device,
            monitor=monitor,
            attention=watching(plan),
            resume=resume,
            reporter=reporter,
        )

    def example() -> Batch:
        return test.data.batch(range(min(8, len(test.data))))

    return Experiment(
        model=model,
        sources=[
            source(train),
            *([] if validation is None else [source(held.data)]),
            source(test.data),
        ],
        stages=[Stage("train", run)],
        evaluate=lambda reporter: test.evaluate(cast(models.Model, model), device),
        example=example,
        spoken=spoken(model, test.classes, reader, example),
        judged=test.data,
    )


Data = TypeVar("Data", bound=DataSet)


class First(Generic[Data]):
    """The first `limit` items of a data set, or all of them."""

    def __init__(self, data: Data, limit: int | None) -> None:
        self.data, self.name, self.split = data, data.name, data.split
        self.count = len(data) if limit is None else min(limit, len(data))

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Sequence[int]) -> Batch:
        """The batch of these items, which stand at the same places."""
        return self.data.batch(indices)

    def digest(self) -> str:
        """The hash of the whole."""
        return self.data.digest()


def limits(plan: Train) -> Limits:
    """How long and in what portions, for the loop."""
    return Limits(
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
def by_decisions(net: nn.Module, rows: Rows, note: Note) -> Iterator[None]:
    """See the maps of all that a network of ours decides, whether it is called or asked in two.

    A step that encodes once and decides several times never calls the network as a whole.
    """
    told = nn.Identity()  # has outputs, which `by_outputs` reads
    decide = cast(models.Model, net).decide

    def heard(*given: Any, **more: Any) -> models.Output:
        return cast(models.Output, told(decide(*given, **more)))

    with by_outputs(told, rows, note):
        net.decide = heard  # type: ignore[assignment]
        try:
            yield
        finally:
            del net.decide  # what its class says is seen again


def watching(plan: Train, by: By = by_decisions) -> AttentionMonitor | None:
    """What the loop tells of attention on its way: nothing where `train.watch` is 0.

    `by` is how the attention of a network is seen: in what it decides, or, where a network does not
    decide but write, while it runs (`by_watching`). A network that is taught is looked at without
    what teaches it. One that does not attend is refused at the first step.
    """
    if not plan.watch:
        return None

    @contextmanager
    def seen(net: nn.Module, rows: Rows, note: Note) -> Iterator[None]:
        told: list[str] = []

        def noted(name: str, *maps: Tensor) -> None:
            told.append(name)
            note(name, *maps)

        with by(net.model if isinstance(net, supervise.Taught) else net, rows, noted):
            yield
        if not told:
            raise BadInput(
                f"train.watch={plan.watch} tells how attention does while a network trains, and "
                "this one does not attend; leave it at 0."
            )

    return AttentionMonitor(every=plan.watch, by=seen)


def source(data: DataSet) -> Source:
    """What a run says of a data set it used."""
    return Source(data.name, str(data.split), data.digest(), len(data))


def scenes(recipe: ScenesRecipe, context: Context) -> Experiment:
    """Questions about the embedded world."""
    from overt.data.scenes.questions import ALL, chance
    from overt.data.scenes.store import Scenes

    data = recipe.data
    if data.held_out is not None and data.held_out not in ALL:
        raise BadInput(f"data.held_out={data.held_out!r} is not one of {', '.join(ALL)}")
    seen = tuple(family for family in ALL if family != data.held_out)

    def part(split: str, count: int, families: tuple[str, ...]) -> Scenes:
        most = count if data.limit is None else min(count, data.limit)
        side = -(-data.size // CELL)
        cells = (side, side)
        return Scenes(split, data.world, most, size=data.size, families=families, cells=cells)

    train = part("train", data.train, seen)
    validation = Judge(part("val", data.val, seen), train.answers)
    test = Judge(part("test", data.test, ALL), train.answers, chance, data.held_out)
    model = answerer(recipe.model, train.vocabulary.size, len(train.answers))
    weight = recipe.supervise.weight

    def from_truth(output: models.Output, batch: Batch) -> dict[str, supervise.Loss]:
        assert batch.target is not None
        attention = output.looking_at("image").over_heads()
        return {"attention": weight * supervise.cross_entropy(attention, batch.target)}

    match recipe.supervise.target:
        case Target.NOTHING:
            teach: Teach = nothing_more
        case Target.TRUTH if recipe.model.look is Look.SOFT:
            teach = from_truth
        case Target.TRUTH:
            raise BadInput("supervise.target=truth needs model.look=soft: nothing else attends")
    read = train.vocabulary
    return experiment(model, train, validation, test, recipe.train, context, teach, reader=read)


def images(recipe: BaselineRecipe, context: Context) -> Experiment:
    """CIFAR-10 or CIFAR-100, with random crops and flips."""
    from overt.data import Cifar10, Cifar100, vary
    from overt.data.sets import root_of

    root = root_of(context.data_root)
    kind = Cifar10 if recipe.data.name is Files.CIFAR10 else Cifar100
    train, held, test = (First(kind(root, part), recipe.data.limit) for part in SPLITS)
    classes = train.data.classes
    model = models.SmallCNN(len(classes), recipe.model.width, recipe.model.dropout)

    def moved(batch: Batch) -> Batch:
        return vary(batch, dice(batch, recipe.train.graph))

    return experiment(
        model,
        train,
        Judge(held, classes, portion=256),
        Judge(test, classes, portion=256),
        recipe.train,
        context,
        vary=moved if recipe.data.vary else lambda batch: batch,
    )


def dice(batch: Batch, recorded: bool) -> torch.Generator:
    """What the moves of a batch are drawn from: a stream of the host, begun by torch's own.

    Steps that are recorded draw from the stream of their card: what the host has drawn would be
    recorded with them, once for all.
    """
    if recorded and batch.images is not None and batch.images.is_cuda:
        found: torch.Generator = torch.cuda.default_generators[batch.images.get_device()]
        return found
    return torch.Generator().manual_seed(int(torch.randint(2**31, ())))


def texts(recipe: BaselineRecipe, context: Context) -> Experiment:
    """TREC questions by the kind of their answer."""
    from overt.data import Trec
    from overt.data.sets import root_of

    assert isinstance(recipe.model, TextModel)
    root = root_of(context.data_root)
    train, held, test = (First(Trec(root, part), recipe.data.limit) for part in SPLITS)
    classes = train.data.classes
    plan = recipe.model
    model = models.TextClassifier(
        train.data.reader.size, len(classes), plan.width, plan.hops, plan.dropout
    )

    def spread(output: models.Output, batch: Batch) -> dict[str, supervise.Loss]:
        each = output.extras["redundancy"]
        count = torch.tensor(float(len(batch)), device=each.device)
        return {"redundancy": plan.penalty * supervise.Loss(each.sum(), count)}

    validation, final = (Judge(part, classes, portion=128) for part in (held, test))
    read = train.data.reader
    return experiment(model, train, validation, final, recipe.train, context, spread, reader=read)


def easy_questions(recipe: BaselineRecipe, context: Context) -> Experiment:
    """easy-VQA with soft attention."""
    from overt.data import EasyVqa

    train, held, test = (
        First(EasyVqa(context.data_root, part), recipe.data.limit) for part in SPLITS
    )
    classes = train.data.classes
    wanted = Model(width=recipe.model.width, dropout=recipe.model.dropout)
    model = answerer(wanted, train.data.reader.size, len(classes))
    validation, final = (Judge(part, classes, portion=128) for part in (held, test))
    read = train.data.reader
    return experiment(model, train, validation, final, recipe.train, context, reader=read)


def answerer(model: Model, vocabulary: int, answers: int) -> models.VQA:
    """A question-answering network of the width and the look asked for."""
    sizes = models.Sizes(
        vocabulary=vocabulary,
        answers=answers,
        cell=_scaled(64, model.width),
        word=_scaled(48, model.width),
        question=_scaled(96, model.width),
        hidden=_scaled(192, model.width),
        dropout=model.dropout,
    )
    match model.look:
        case Look.BLIND:
            return models.VQA(sizes, models.Blind())
        case Look.MEAN:
            return models.VQA(sizes, models.MeanPool())
        case Look.SOFT:
            hidden = _scaled(128, model.width)
            look = models.SoftAttention(sizes.seen, sizes.question, hidden, model.glimpses)
            return models.VQA(sizes, look)


def _scaled(size: int, width: float) -> int:
    return max(4, round(size * width))
