"""Section 2: finding surrogates, 500 masks an image, beside a RISE-style loop and captum.

Features are cached for everybody: 14 x 14 cells of 512 numbers, a two-hop attention head, 1,000
answers. The loop builds all masked features of an image, runs the head on 100 of them at a time,
keeps every score and map, and takes the best at the end. Masks come from RISE's generator, a resize
by scikit-image a mask, and from ours. Captum leaves out one cell after the other, as ours does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from overt import measure
from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.models.output import Output
from overt.supervise.surrogate import Grids, asking, refine, search
from overt.supervise.surrogate.draws import chances, keys_of
from overt.supervise.surrogate.masks import Asked, enlarge

from .clock import Spread, race, timer
from .memory import most_alive
from .report import (
    Curve,
    Report,
    Row,
    Setting,
    absent,
    at_least,
    at_most,
    exact,
    faster,
    needs,
)

SIDE, WIDTH, ANSWERS, HOPS, MASKS = 14, 512, 1000, 2, 500
CELLS = SIDE * SIDE
RATE = 2000.0  # images a second, 500 masks each, on a data-centre GPU
PROBES = 50
CHUNK = 32  # masked samples at a time that still lie in the caches of a core
TOGETHER = 14  # cells that are left out, one each, in one call: for captum as for ours


@dataclass(frozen=True, eq=False)
class Seen:
    """Cached cells, a question, and the linear maps of the cells where somebody has made them."""

    cells: Float[Tensor, "b k d"]
    question: Float[Tensor, "b d"]
    mapped: tuple[Tensor, ...] = ()


class Hops(nn.Module):
    """Stacked attention without a bias on the cells, so that masks commute with its linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.of_cell = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(HOPS))
        self.of_question = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(HOPS))
        self.score = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(HOPS))
        self.decision = nn.Linear(WIDTH, ANSWERS)
        self.product: Callable[[Tensor, Tensor], Tensor] = torch.matmul

    def encode(self, batch: Batch) -> Seen:
        """Features that somebody has cached, the first row the question; and their linear maps."""
        assert batch.features is not None
        question, cells = batch.features[:, 0], batch.features[:, 1:]
        return Seen(cells, question, tuple(one(cells) for one in self.of_cell))

    def decide(self, features: Seen, mask: Mapping[str, Tensor] | None = None) -> Output:
        """One mask a sample."""
        whole = torch.ones_like(features.cells[..., 0])
        return self._decided(features, (mask or {"image": whole})["image"][None])

    def decide_many(self, features: Seen, mask: Mapping[str, Float[Tensor, "m b k"]]) -> Output:
        """Several masks a sample: cells are read and not copied, however many masks there are."""
        return self._decided(features, mask["image"])

    def _decided(self, features: Seen, mask: Float[Tensor, "m b k"]) -> Output:
        """The mask after the linear maps, with which one number a cell commutes."""
        cells, keep = features.cells, mask.to(features.cells)
        state = features.question[None]
        for mapped, question, score in zip(
            features.mapped, self.of_question, self.score, strict=True
        ):
            joint = torch.addcmul(question(state)[:, :, None], mapped, keep[..., None]).tanh_()
            scores = self.product(joint, score.weight[0]) + score.bias
            weights = scores.softmax(dim=-1) * keep
            state = state + torch.bmm(weights.transpose(0, 1), cells).transpose(0, 1)
        return Output(self.decision(state).flatten(0, 1), (_map(scores.flatten(0, 1)),))

    def whole(self, cells: Tensor, state: Tensor) -> Output:
        """Everything from the start, as a head that was not made to be asked again."""
        for cell, question, score in zip(self.of_cell, self.of_question, self.score, strict=True):
            scores = score(torch.tanh(cell(cells) + question(state)[:, None]))[..., 0]
            state = state + torch.bmm(scores.softmax(dim=-1)[:, None], cells)[:, 0]
        return Output(self.decision(state), (_map(scores),))


def _map(scores: Float[Tensor, "b k"]) -> AttentionMap:
    return AttentionMap.from_scores(scores[:, None, None, None], grid(SIDE, SIDE))


# --- masks


@dataclass(frozen=True)
class Drawn:
    """All masks that were drawn, those drawn twice too: what the plain loop is given."""

    count: int = MASKS
    side: int = 3
    name: str = "image"

    def __call__(self, asked: Asked) -> "Every":
        """The whole input and so many masks a sample, those of `Grids`."""
        cells = self.side * self.side
        keys = keys_of(asked.ids, 0, f"grids {self.name}")
        drawn = chances(keys, self.count * cells, 0.5).reshape(-1, self.count, cells)
        masks = torch.from_numpy(drawn)
        return Every(torch.cat([torch.ones_like(masks[:, :1]), masks], dim=1), self.side)


@dataclass(frozen=True, eq=False)
class Every:
    """Grids by number."""

    grids: Tensor
    side: int
    name: str = "image"

    @property
    def counts(self) -> Int[Tensor, " b"]:
        """As many for each."""
        return torch.full((len(self.grids),), self.grids.shape[1])

    @property
    def sizes(self) -> Int[Tensor, " b"]:
        """A bit a cell of the grid."""
        return torch.full((len(self.grids),), self.grids.shape[2])

    def bits(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Grids by number."""
        return self.grids[rows, numbers]

    def draw(self, rows: Tensor, bits: Tensor) -> Tensor:
        """Masks of any grids, made where the grids are."""
        return enlarge(bits.unflatten(1, (self.side, self.side)), (SIDE, SIDE)).flatten(1)

    def take(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Masks by number."""
        return self.draw(rows, self.bits(rows, numbers))


def rise_generator(count: int, cells: int, size: int, drawn: np.random.Generator) -> np.ndarray:
    """RISE's masks: one resize and one crop after the other."""
    from skimage.transform import resize

    step = int(np.ceil(size / cells))
    grids = (drawn.random((count, cells, cells)) < 0.5).astype("float32")
    found = np.empty((count, size, size))
    for number in range(count):
        y, x = drawn.integers(0, step, 2)
        large = resize(
            grids[number], ((cells + 1) * step,) * 2, order=1, mode="reflect", anti_aliasing=False
        )
        found[number] = large[y : y + size, x : x + size]
    return found


def our_masks(cells: int, size: int, key: np.ndarray) -> Tensor:
    """As many of ours, for one image."""
    drawn = chances(key, MASKS * cells * cells, 0.5).reshape(MASKS, cells, cells)
    return enlarge(torch.from_numpy(drawn), (size, size))


# --- searching


class Case:
    """A head, and images that it finds neither easy nor impossible."""

    def __init__(self, images: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = Hops().eval().to(device, dtype)
        features = 3 * torch.randn(images, 1 + CELLS, WIDTH)  # every cell says something else
        ids = tuple(f"image-{row}" for row in range(images))
        none = torch.zeros(images, dtype=torch.long)
        self.batch = Batch(ids, features=features.to(dtype), labels=none).to(device)
        with torch.no_grad():  # answers of middling chance: some masks help and some hurt
            order = self.model.decide(self.model.encode(self.batch)).prediction.argsort(dim=-1)
        self.batch = replace(self.batch, labels=order[:, ANSWERS // 2])
        self.chunk = CHUNK if device == "cpu" else 8192

    def ours(self, masks: Any, find: Callable[..., Any] = search) -> Callable[[], Any]:
        """A search of the library."""

        def run() -> Any:
            with asking(self.model, self.batch, ["image"]) as look:
                return find(look, masks, chunk=self.chunk)

        return run

    def drawn(self, count: int = MASKS) -> Tensor:
        """All masks of all images."""
        with asking(self.model, self.batch, ["image"]) as look:
            every = Drawn(count)(look)
        rows = torch.arange(len(self.batch.ids))
        found = [every.take(rows, torch.full_like(rows, n)) for n in range(count + 1)]
        return torch.stack(found, dim=1)

    @torch.no_grad()
    def loop(self, masks: Float[Tensor, "b m k"]) -> tuple[Tensor, Tensor]:
        """RISE-style: all masked features of an image, all scores and maps, then the best."""
        batch = self.batch
        assert batch.labels is not None and batch.features is not None
        masks = masks.to(self.device)
        chosen, maps = [], []
        for row, label in enumerate(batch.labels.tolist()):
            stack = masks[row][..., None] * batch.features[row, 1:]
            scores, seen = [], []
            for start in range(0, len(stack), 100):
                part = stack[start : start + 100]
                output = self.model.whole(part, batch.features[row, 0].expand(len(part), -1))
                scores.append(output.prediction.softmax(dim=-1)[:, label])
                seen.append(output.attention[0].weights[:, 0, 0, 0])
            best = int(torch.cat(scores).argmax())
            chosen.append(masks[row, best])
            maps.append(torch.cat(seen)[best])
        return torch.stack(chosen).cpu(), torch.stack(maps).cpu()


def searching(setting: Setting, report: Report) -> None:
    """The best of all masks: the same one, sooner."""
    count = setting.some(MASKS, 60)
    case = Case(setting.some(32, 2) if setting.gpu else 2, setting.device)
    masks, distinct = case.drawn(count), Grids(count, grid=(3, 3))
    chosen, maps = case.loop(masks)
    other = 0
    for found in (case.ours(Drawn(count))(), case.ours(distinct)()):
        other += int((found.masks["image"] != chosen).any(dim=1).sum())
        off = float((found.maps["image"].weights[:, 0, 0, 0] - maps).abs().max())
        assert off < 1e-4, f"the map of the chosen mask is {off} off"
    assert not other, f"{other} searches end with another mask than the loop"
    report.add(exact("masks other than those of the loop", "images", other, at_most(0)))
    times = race(
        {
            "loop": lambda: case.loop(masks),
            "search": case.ours(Drawn(count)),
            "search, no repeats": case.ours(distinct),
            "search, 2 x 2": case.ours(Grids(count, grid=(2, 2))),
            "refine": case.ours(distinct, refine),
        },
        min(5, setting.rounds),
        timer(setting.device),
        limit=40.0,
    )
    name = f"{count} masks of 3 x 3"
    report.add(
        faster(name, times, "search", "loop", at_least(3.0)),
        faster(f"{name}, each once", times, "search, no repeats", "loop", at_least(4.5)),
        faster("2 x 2, which are enumerated", times, "search, 2 x 2", "loop"),
        faster(f"refine, {PROBES} probes", times, "refine", "loop"),
    )


def better(setting: Setting, report: Report) -> None:
    """Fewer probes, and at least as good a mask: grids of 4 x 4, of which there are 65,536."""
    case = Case(setting.some(6, 1), setting.device)
    masks = Grids(setting.some(MASKS, 60), grid=(4, 4))
    random, few = case.ours(masks)(), case.ours(masks, refine)()
    assert int(few.probes.max()) <= PROBES, "refine asks more often than it says"
    beyond = float((few.best - random.best).mean())
    report.facts["probes"] = {
        "random": float(random.probes.float().mean()),
        "refine": float(few.probes.float().mean()),
    }
    report.add(
        exact(
            f"refine, {PROBES} probes, over {MASKS} random masks",
            "mean log-probability",
            beyond,
            at_least(0.0),
            "a head with random weights; trained ones are in benchmarks/ssa/search.json",
        )
    )


def memory(setting: Setting, report: Report) -> None:
    """What a search holds at once, whatever the number of masks."""
    case = Case(1, setting.device)
    case.chunk = CHUNK  # fewer at a time than the fewest masks: else a chunk is all of them
    counts = (20, 60) if setting.quick else (100, 500, 2000)
    ours = [most_alive(case.ours(Grids(n, grid=(6, 6))), setting.device) / 2**20 for n in counts]
    loops = []
    for n in counts:
        masks = case.drawn(n)
        loops.append(most_alive(lambda masks=masks: case.loop(masks), setting.device) / 2**20)
    report.add(
        exact(
            f"memory at {counts[-1]} masks over that at {counts[1]}",
            "ratio",
            ours[-1] / ours[1],
            at_most(1.1),
        )
    )
    report.curves.append(
        Curve(
            "Memory of a search, one image",
            "masks",
            "MiB at once",
            list(map(float, counts)),
            {"search": ours, "RISE-style loop": loops},
        )
    )


def making(setting: Setting, report: Report) -> None:
    """Masks themselves, beside RISE's generator."""
    drawn, key = np.random.default_rng(0), keys_of(["image"], 0)
    count = setting.some(MASKS, 20)
    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: our_masks(3, SIDE, key),
        "RISE's generator": lambda: rise_generator(count, 3, SIDE, drawn),
    }
    goal = None if setting.quick else at_least(30.0)
    times = race(ways, setting.rounds)
    report.add(faster(f"{count} masks of 14 x 14", times, "ours", "RISE's generator", goal))


def rate(setting: Setting, report: Report) -> None:
    """Images a second on a card, 500 distinct masks each."""
    what = f"images a second, {MASKS} masks each"
    if not setting.gpu:
        report.add(needs(what, at_least(RATE, "cuda")))
        return
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(setting.some(512, 8), setting.device, dtype)
        told = f"{what}, {str(dtype).removeprefix('torch.')}"
        report.add(_a_second(told, case, case.ours(Grids(MASKS, grid=(3, 3))), setting))


def compiled_rate(setting: Setting, report: Report) -> None:
    """The same with a head that its user has compiled: what is done to a cell is done in one go."""
    torch.compiler.reset()
    case, masks = Case(setting.some(512, 8), setting.device), Grids(MASKS, grid=(3, 3))
    plain = case.ours(masks)()
    case.model.product = lambda joint, weight: (joint * weight).sum(dim=-1)  # as one kernel
    compiled = torch.compile(case.model.decide_many, dynamic=True)
    case.model.decide_many = compiled  # type: ignore[method-assign]
    run = case.ours(masks)
    other = (run().masks["image"] != plain.masks["image"]).any(dim=1).float().mean()
    report.facts["masks that compiling changes"] = float(other)
    what = f"images a second, {MASKS} masks each, float32, compiled"
    report.add(_a_second(what, case, run, setting))
    torch.compiler.reset()


def _a_second(what: str, case: Case, run: Callable[[], Any], setting: Setting) -> Row:
    images = len(case.batch)
    found = race({"search": run}, setting.rounds, timer(setting.device)).of("search")
    value = Spread(images / found.median, images / found.high, images / found.low)
    return Row(what, "search", "", "images / s", value, at_least(RATE, "cuda"), found)


# --- one cell after the other


def leaving_out(setting: Setting, report: Report) -> None:
    """What each cell does to the answer, beside captum's two ways to say it."""
    try:
        from captum.attr import FeatureAblation, Occlusion
    except ImportError:
        report.add(absent("leaving out each cell", "captum is not installed"))
        return
    case = Case(setting.some(32 if setting.gpu else 2, 1), setting.device)
    batch, model = case.batch, case.model
    assert batch.features is not None
    b = len(batch.ids)
    with torch.no_grad():
        seen = model.encode(batch)
        answers = model.decide(seen).prediction.argmax(dim=-1)

    def of_answer(logits: Tensor) -> Tensor:
        """Two classes, the answer and the rest: then its probability is all that moves."""
        logs = logits.log_softmax(dim=-1).gather(1, answers[:, None].repeat(len(logits) // b, 1))
        return torch.cat([logs, torch.log1p(-logs.exp())], dim=-1)

    def decide(keep: Tensor) -> Tensor:
        many = {"image": keep.unflatten(0, (-1, b))}
        return of_answer(model.decide_many(seen, many).prediction)

    like = _map(torch.zeros(b, CELLS, device=case.device))

    @torch.no_grad()
    def ours() -> Tensor:
        return measure.leave_one_out(decide, like, at_once=TOGETHER).values

    question = batch.features[:, 0]

    @torch.no_grad()
    def chance(cells: Tensor) -> Tensor:
        many = len(cells) // b
        return of_answer(model.whole(cells, question.repeat(many, 1)).prediction).exp()[:, 0]

    numbers = torch.arange(CELLS, device=case.device)[None, :, None].expand(1, CELLS, WIDTH)
    cells = batch.features[:, 1:].contiguous()

    def ablation() -> Tensor:
        found = FeatureAblation(chance).attribute(
            cells, baselines=0.0, feature_mask=numbers, perturbations_per_eval=TOGETHER
        )
        return found[..., 0]

    def occlusion() -> Tensor:
        found = Occlusion(chance).attribute(
            cells, sliding_window_shapes=(1, WIDTH), baselines=0.0, perturbations_per_eval=TOGETHER
        )
        return found[..., 0]

    for theirs in (ablation, occlusion):
        apart = float((ours()[:, 0, 0, 0].float() - theirs().abs()).abs().max())
        assert apart < 1e-5, f"captum has other effects, by {apart}"
    ways = {
        "leave_one_out": ours,
        "captum FeatureAblation": ablation,
        "captum Occlusion": occlusion,
    }
    times = race(ways, min(5, setting.rounds), timer(setting.device))
    what = f"leaving out each of {CELLS} cells"
    for theirs in ("captum FeatureAblation", "captum Occlusion"):
        report.add(faster(what, times, "leave_one_out", theirs, at_least(1.0)))


def growth(setting: Setting) -> Curve:
    """Time of a search as masks grow."""
    case = Case(1, setting.device)
    counts = (10, 40) if setting.quick else (50, 100, 250, 500, 1000)
    lines: dict[str, list[float]] = {}
    for n in counts:
        masks = case.drawn(n)
        ways = {
            "RISE-style loop": lambda masks=masks: case.loop(masks),
            "search": case.ours(Drawn(n)),
            "search, no repeats": case.ours(Grids(n, grid=(3, 3))),
        }
        times = race(ways, 3, timer(setting.device), limit=8.0)
        for name in ways:
            lines.setdefault(name, []).append(times.of(name).median)
    return Curve("A search, one image, grids of 3 x 3", "masks", "seconds",
                 list(map(float, counts)), lines)  # fmt: skip


def section(setting: Setting, report: Report) -> None:
    """Searching, masks, memory, leaving out. What uses no card is measured on a CPU."""
    torch.set_num_threads(1)
    report.part("searching", partial(searching, setting, report))
    report.part("images a second", partial(rate, setting, report))
    report.part("fewer probes", partial(better, setting, report))
    report.part("memory of a search", partial(memory, setting, report))
    if not setting.gpu:
        report.part("masks", partial(making, setting, report))
    report.part("leaving out each cell", partial(leaving_out, setting, report))
    report.part("growth", lambda: report.curves.append(growth(setting)))
    if setting.gpu:
        report.part("images a second, compiled", partial(compiled_rate, setting, report))
