"""Recorded steps: what may share a recording, what is refused, and that nothing changes by it."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from overt.attention import AttentionMap, Layout, Span
from overt.data.batch import Batch
from overt.errors import BadInput
from overt.geometry import PixelGeometry
from overt.supervise.loss import Loss
from overt.train import Limits, Losses, Progress, fit, loop, recording
from overt.train.recording import MOST, WARM, Recorder, form, fuse, sealed, tensors
from tests.train.toys import Numbers, make, step

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card here")


def played_again(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A stand-in for a card: a replay does the work again and writes over what was made first."""
    made = work()
    parameters = [p for one in NETS for p in one.parameters()]
    first = [p.grad for p in parameters]

    def replay() -> None:
        for parameter in parameters:
            parameter.grad = None
        again = work()
        made.copy_(again)
        for parameter, former in zip(parameters, first, strict=True):
            if former is not None and parameter.grad is not None:
                former.copy_(parameter.grad)

    return replay, made


NETS: list[nn.Module] = []


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    NETS[:] = [nn.Linear(8, 3)]
    return NETS[0]


def worked(net: nn.Module) -> Callable[[Batch], Tensor]:
    def work(batch: Batch) -> Tensor:
        assert batch.features is not None
        total = net(batch.features).square().sum()
        total.backward()
        return total.detach()

    return work


def cleared(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.grad = None


def test_a_replay_gives_what_the_work_would(net: nn.Module) -> None:
    data, work = Numbers(40), worked(net)
    recorder = Recorder(work, list(net.parameters()), played_again)
    for at in range(0, 40, 4):
        batch = data.batch(range(at, at + 4))
        cleared(net)
        wanted = work(batch)
        slopes = [p.grad for p in net.parameters()]
        cleared(net)
        assert torch.equal(recorder(batch), wanted)
        assert all(
            torch.equal(p.grad, one)  # type: ignore[arg-type]
            for p, one in zip(net.parameters(), slopes, strict=True)
        )
    assert len(recorder) == 1


def test_each_form_and_each_case_has_its_own_recording(net: nn.Module) -> None:
    data = Numbers(40)
    recorder = Recorder(worked(net), list(net.parameters()), played_again)
    for size, case in ((4, None), (5, None), (4, "late"), (4, None)):
        for _ in range(WARM + 1):
            cleared(net)
            recorder(data.batch(range(size)), case)
    assert len(recorder) == 3


def test_no_more_than_so_many_are_kept(net: nn.Module) -> None:
    data = Numbers(4)
    recorder = Recorder(worked(net), list(net.parameters()), played_again)
    for case in range(MOST + 3):
        for _ in range(WARM + 1):
            cleared(net)
            recorder(data.batch(range(4)), case)
    assert len(recorder) == MOST


def full() -> Batch:
    """A batch with tensors at every depth."""
    keys = Layout((Span("image", (2, 2), slice(0, 4)),), 4)
    return Batch(
        ids=("a", "b"),
        images=torch.zeros(2, 3, 4, 4),
        geometry=PixelGeometry.identity(2, (4, 4)),
        tokens=torch.ones(2, 3, dtype=torch.long),
        groups=("x", "y"),
        target=AttentionMap(torch.full((2, 1, 1, 1, 4), 0.25), keys),
    )


def test_everything_of_a_batch_is_copied() -> None:
    batch = full()
    copy = sealed(batch)
    pairs = list(zip(tensors(copy), tensors(batch), strict=True))
    assert len(pairs) > 4
    assert all(torch.equal(ours, theirs) and ours is not theirs for ours, theirs in pairs)
    assert form(copy) == form(batch) and isinstance(form(batch), Hashable)


def test_forms_differ_in_shape_and_in_what_is_there_but_not_in_numbers_or_texts() -> None:
    batch = full()
    assert form(batch) != form(replace(batch, tokens=torch.ones(2, 4, dtype=torch.long)))
    assert form(batch) != form(replace(batch, tokens=None))
    assert form(batch) != form(replace(batch, tokens=torch.ones(2, 3, dtype=torch.int32)))
    others = torch.full((2, 3), 7, dtype=torch.long)
    assert form(batch) == form(replace(batch, tokens=others, ids=("c", "d")))


READS: dict[str, Callable[[Batch], object]] = {
    "as a key": lambda batch: {batch.ids[0]: 1},
    "compared": lambda batch: batch.ids[0] == "a",
    "found": lambda batch: batch.ids.index("a"),
    "taken apart": lambda batch: batch.ids[0].partition("#"),
    "spelled": lambda batch: list(batch.ids[0]),
    "told": lambda batch: f"{batch.ids[0]}",
}


@pytest.mark.parametrize("how", READS)
def test_texts_can_be_counted_and_not_read(how: str) -> None:
    copy = sealed(full())
    assert len(copy) == len(copy.ids) == len(copy.groups) == 2
    with pytest.raises(BadInput, match=r"set train\.graph=false"):
        READS[how](copy)
    READS[how](full())


# --- within the loop


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the loop record on a CPU, by a stand-in that does the work again; count recordings."""
    held: list[int] = []

    def stand_in(
        work: Callable[[], loop._Gradients],
    ) -> tuple[Callable[[], None], loop._Gradients]:
        held.append(1)
        parameters = [p for one in NETS for p in one.parameters()]
        state = torch.get_rng_state()  # a card draws nothing while it records
        made = work()
        torch.set_rng_state(state)
        first = [p.grad for p in parameters]

        def replay() -> None:
            for parameter in parameters:
                parameter.grad = None
            made.numbers.copy_(work().numbers)
            for parameter, former in zip(parameters, first, strict=True):
                if former is not None and parameter.grad is not None:
                    former.copy_(parameter.grad)

        return replay, made

    real = loop._Run.go

    def go(self: loop._Run, resume: bool) -> loop.Fitted:
        if self.limits.graph:
            self.record()
        return real(self, resume)

    class Still:
        """A card that there is not."""

        def record(
            self, work: Callable[[], loop._Gradients]
        ) -> tuple[Callable[[], None], loop._Gradients]:
            return stand_in(work)

        def beside(self, work: Callable[[], loop._Gradients]) -> loop._Gradients:
            return work()

    monkeypatch.setattr(loop, "Card", Still)
    monkeypatch.setattr(loop._Run, "go", go)
    return held


def weights(tmp_path: Path, name: str, graph: bool, one: loop.Step = step) -> dict[str, Tensor]:
    net, sets = make()
    NETS[:] = [net]
    limits = replace(Limits(epochs=3, batch=8), graph=graph)
    fit(net, Numbers(50), one, sets, limits, out=tmp_path / name, seed=3, device="cpu")
    return net.state_dict()


def test_a_recorded_run_is_the_same_run(tmp_path: Path, recorded: list[int]) -> None:
    """Dropout, two optimizers, clipping, and a last batch of an epoch that is smaller."""
    plain = weights(tmp_path, "plain", graph=False)
    again = weights(tmp_path, "graph", graph=True)
    assert len(recorded) == 2
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert (tmp_path / "plain/log.jsonl").read_bytes() == (
        tmp_path / "graph/log.jsonl"
    ).read_bytes()


def test_a_step_that_reads_its_progress_is_refused(tmp_path: Path, recorded: list[int]) -> None:
    def curious(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
        assert progress.fraction >= 0
        return step(model, batch, progress)

    weights(tmp_path, "plain", graph=False, one=curious)
    with pytest.raises(BadInput, match=r"reads its progress \(fraction\)"):
        weights(tmp_path, "graph", graph=True, one=curious)


def test_a_step_that_waits_for_the_card_is_told_so(net: nn.Module) -> None:
    def refuses(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    recorder = Recorder(worked(net), list(net.parameters()), refuses)
    batch = Numbers(4).batch(range(4))
    for _ in range(WARM):
        recorder(batch)
    with pytest.raises(BadInput, match="waits for the card"):
        recorder(batch)
    assert not recorder.recording


def test_before_is_asked_ahead_of_every_step(tmp_path: Path) -> None:
    told: list[int] = []
    seen: list[int] = []

    def before(progress: Progress) -> Hashable:
        assert len(told) == len(seen)
        told.append(progress.step)
        return None

    def one(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
        seen.append(progress.step)
        return step(model, batch, progress)

    net, sets = make()
    limits = Limits(epochs=2, batch=25)
    fit(
        *(net, Numbers(50), one, sets, limits),
        out=tmp_path,
        seed=0,
        device="cpu",
        before=before,
    )
    assert told == seen == [0, 1, 2, 3]


def test_fusing_leaves_optimizers_off_the_card_alone() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    fuse(optimizer)
    assert not optimizer.param_groups[0]["fused"]


# --- on a card


@cuda
@pytest.mark.parametrize("bf16", [False, True])
def test_on_a_card_a_recorded_run_is_the_same_run(tmp_path: Path, bf16: bool) -> None:
    found = []
    for name, graph in (("plain", False), ("graph", True)):
        net, sets = make()
        for one in sets.values():
            one.optimizer.param_groups[0]["foreach"] = False
        limits = replace(Limits(epochs=3, batch=8), graph=graph, bf16=bf16)
        fit(net, Numbers(50), step, sets, limits, out=tmp_path / name, seed=3, device="cuda")
        found.append(net.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5)


@cuda
def test_on_a_card_a_step_that_waits_is_refused(tmp_path: Path) -> None:
    def waits(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
        found = step(model, batch, progress)
        loss = found["model"]["task"]
        return {**found, "model": {"task": Loss(loss.total * float(loss.count), loss.count)}}

    net, sets = make()
    limits = replace(Limits(epochs=3, batch=8), graph=True)
    with pytest.raises(BadInput, match="waits for the card"):
        fit(net, Numbers(50), waits, sets, limits, out=tmp_path, seed=3, device="cuda")


def test_the_loop_records_on_a_card() -> None:
    assert loop.Card is recording.Card
