"""Training steps in CUDA graphs: shared graphs, rejected steps, equal results."""

import os
import signal
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from overt.attention import AttentionMap, Layout, Span
from overt.data.batch import Batch
from overt.errors import RunInterrupted, UserError
from overt.geometry import PixelGeometry
from overt.losses.loss import Loss
from overt.train import FitConfig, Losses, ParameterSet, Progress, cuda_graph, fit, loop
from overt.train.cuda_graph import (
    MAX_GRAPHS,
    WARMUP_CALLS,
    GraphedFunction,
    enable_fused_kernels,
    input_signature,
    iter_tensors,
    static_copy,
)
from tests.train.toys import Numbers, cross_entropy, make, step


def repeat_work(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Replace a CUDA graph: a replay calls the function and overwrites the first output."""
    output = work()
    parameters = [p for one in NETS for p in one.parameters()]
    first = [p.grad for p in parameters]

    def replay() -> None:
        for parameter in parameters:
            parameter.grad = None
        again = work()
        output.copy_(again)
        for parameter, former in zip(parameters, first, strict=True):
            if former is not None and parameter.grad is not None:
                former.copy_(parameter.grad)

    return replay, output


NETS: list[nn.Module] = []


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    NETS[:] = [nn.Linear(8, 3)]
    return NETS[0]


def make_work(net: nn.Module) -> Callable[[Batch], Tensor]:
    def work(batch: Batch) -> Tensor:
        assert batch.features is not None
        total = net(batch.features).square().sum()
        total.backward()
        return total.detach()

    return work


def clear_gradients(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.grad = None


def test_a_replay_gives_the_output_and_gradients_of_the_function(net: nn.Module) -> None:
    data, work = Numbers(40), make_work(net)
    graphed = GraphedFunction(work, list(net.parameters()), repeat_work)
    for at in range(0, 40, 4):
        batch = data.batch(range(at, at + 4))
        clear_gradients(net)
        wanted = work(batch)
        gradients = [p.grad for p in net.parameters()]
        clear_gradients(net)
        assert torch.equal(graphed(batch), wanted)
        assert all(
            torch.equal(p.grad, one)  # type: ignore[arg-type]
            for p, one in zip(net.parameters(), gradients, strict=True)
        )
    assert len(graphed) == 1


def test_each_signature_and_key_has_its_own_graph(net: nn.Module) -> None:
    data = Numbers(40)
    graphed = GraphedFunction(make_work(net), list(net.parameters()), repeat_work)
    for size, case in ((4, None), (5, None), (4, "late"), (4, None)):
        for _ in range(WARMUP_CALLS + 1):
            clear_gradients(net)
            graphed(data.batch(range(size)), case)
    assert len(graphed) == 3


def test_the_number_of_graphs_is_bounded(net: nn.Module) -> None:
    data = Numbers(4)
    graphed = GraphedFunction(make_work(net), list(net.parameters()), repeat_work)
    for case in range(MAX_GRAPHS + 3):
        for _ in range(WARMUP_CALLS + 1):
            clear_gradients(net)
            graphed(data.batch(range(4)), case)
    assert len(graphed) == MAX_GRAPHS


def full_batch() -> Batch:
    """A batch with nested tensors."""
    keys = Layout((Span("image", (2, 2), slice(0, 4)),), 4)
    return Batch(
        ids=("a", "b"),
        images=torch.zeros(2, 3, 4, 4),
        geometry=PixelGeometry.identity(2, (4, 4)),
        tokens=torch.ones(2, 3, dtype=torch.long),
        groups=("x", "y"),
        target=AttentionMap(torch.full((2, 1, 1, 1, 4), 0.25), keys),
    )


def test_static_copy_copies_every_tensor_of_a_batch() -> None:
    batch = full_batch()
    copy = static_copy(batch)
    pairs = list(zip(iter_tensors(copy), iter_tensors(batch), strict=True))
    assert len(pairs) > 4
    assert all(torch.equal(ours, theirs) and ours is not theirs for ours, theirs in pairs)
    assert input_signature(copy) == input_signature(batch) and isinstance(
        input_signature(batch), Hashable
    )


def test_the_input_signature_depends_on_shapes_dtypes_and_fields_only() -> None:
    batch = full_batch()
    assert input_signature(batch) != input_signature(
        replace(batch, tokens=torch.ones(2, 4, dtype=torch.long))
    )
    assert input_signature(batch) != input_signature(replace(batch, tokens=None))
    assert input_signature(batch) != input_signature(
        replace(batch, tokens=torch.ones(2, 3, dtype=torch.int32))
    )
    others = torch.full((2, 3), 7, dtype=torch.long)
    assert input_signature(batch) == input_signature(replace(batch, tokens=others, ids=("c", "d")))


READS: dict[str, Callable[[Batch], object]] = {
    "dict key": lambda batch: {batch.ids[0]: 1},
    "equality": lambda batch: batch.ids[0] == "a",
    "index": lambda batch: batch.ids.index("a"),
    "partition": lambda batch: batch.ids[0].partition("#"),
    "list": lambda batch: list(batch.ids[0]),
    "format": lambda batch: f"{batch.ids[0]}",
}


@pytest.mark.parametrize("read", READS)
def test_strings_of_a_static_copy_have_a_length_and_reading_them_raises(read: str) -> None:
    copy = static_copy(full_batch())
    assert len(copy) == len(copy.ids) == len(copy.groups) == 2
    with pytest.raises(UserError, match=r"train\.graph"):
        READS[read](copy)
    READS[read](full_batch())


# --- within the loop


@pytest.fixture
def capture_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Enable captures in the loop on a CPU with a replacement, and count them."""
    captures: list[int] = []

    def stand_in(
        work: Callable[[], loop._StepNumbers],
    ) -> tuple[Callable[[], None], loop._StepNumbers]:
        captures.append(1)
        parameters = [p for one in NETS for p in one.parameters()]
        state = torch.get_rng_state()  # a capture draws no random numbers
        output = work()
        torch.set_rng_state(state)
        first = [p.grad for p in parameters]

        def replay() -> None:
            for parameter in parameters:
                parameter.grad = None
            output.numbers.copy_(work().numbers)
            for parameter, former in zip(parameters, first, strict=True):
                if former is not None and parameter.grad is not None:
                    former.copy_(parameter.grad)

        return replay, output

    real = loop._FitLoop.run

    def run(self: loop._FitLoop, resume: bool) -> loop.FitResult:
        if self.config.graph:
            self.enable_cuda_graphs()
        return real(self, resume)

    class CaptureStandIn:
        """A replacement of `GraphCapture` without a GPU."""

        def capture(
            self, work: Callable[[], loop._StepNumbers]
        ) -> tuple[Callable[[], None], loop._StepNumbers]:
            return stand_in(work)

        def run_on_stream(self, work: Callable[[], loop._StepNumbers]) -> loop._StepNumbers:
            return work()

    monkeypatch.setattr(loop, "GraphCapture", CaptureStandIn)
    monkeypatch.setattr(loop._FitLoop, "run", run)
    return captures


def weights(tmp_path: Path, name: str, graph: bool, one: loop.Step = step) -> dict[str, Tensor]:
    net, sets = make()
    NETS[:] = [net]
    config = replace(FitConfig(epochs=3, batch=8), graph=graph)
    fit(net, Numbers(50), one, sets, config, out=tmp_path / name, seed=3, device="cpu")
    return net.state_dict()


def test_training_with_cuda_graphs_gives_the_same_weights_and_log(
    tmp_path: Path, capture_calls: list[int]
) -> None:
    """With dropout, two optimizers, clipping, and a smaller last batch."""
    plain = weights(tmp_path, "plain", graph=False)
    again = weights(tmp_path, "graph", graph=True)
    assert len(capture_calls) == 2
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert (tmp_path / "plain/log.jsonl").read_bytes() == (
        tmp_path / "graph/log.jsonl"
    ).read_bytes()


def test_a_step_that_reads_its_progress_raises(tmp_path: Path, capture_calls: list[int]) -> None:
    def reads_fraction(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
        assert progress.fraction >= 0
        return step(model, batch, progress)

    weights(tmp_path, "plain", graph=False, one=reads_fraction)
    with pytest.raises(UserError, match="fraction"):
        weights(tmp_path, "graph", graph=True, one=reads_fraction)


def test_a_step_that_synchronizes_raises(net: nn.Module) -> None:
    def fail_capture(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphed = GraphedFunction(make_work(net), list(net.parameters()), fail_capture)
    batch = Numbers(4).batch(range(4))
    for _ in range(WARMUP_CALLS):
        graphed(batch)
    with pytest.raises(UserError, match=r"synchronize.*train\.graph=false"):
        graphed(batch)
    assert not graphed.capturing


def test_before_step_is_called_before_every_step(tmp_path: Path) -> None:
    before_calls: list[int] = []
    step_calls: list[int] = []

    def before(progress: Progress) -> Hashable:
        assert len(before_calls) == len(step_calls)
        before_calls.append(progress.step)
        return None

    def one(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
        step_calls.append(progress.step)
        return step(model, batch, progress)

    net, sets = make()
    config = FitConfig(epochs=2, batch=25)
    fit(
        *(net, Numbers(50), one, sets, config),
        out=tmp_path,
        seed=0,
        device="cpu",
        before_step=before,
    )
    assert before_calls == step_calls == [0, 1, 2, 3]


def test_enable_fused_kernels_does_not_change_cpu_optimizers() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    enable_fused_kernels(optimizer)
    assert not optimizer.param_groups[0]["fused"]


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("bf16", [False, True])
def test_on_a_gpu_training_with_cuda_graphs_gives_the_same_weights(
    tmp_path: Path, bf16: bool
) -> None:
    found = []
    for name, graph in (("plain", False), ("graph", True)):
        net, sets = make()
        for one in sets.values():
            one.optimizer.param_groups[0]["foreach"] = False
        config = replace(FitConfig(epochs=3, batch=8), graph=graph, bf16=bf16)
        fit(net, Numbers(50), step, sets, config, out=tmp_path / name, seed=3, device="cuda")
        found.append(net.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5)


class ConvNet(nn.Module):
    """A small CNN with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 1)
        )
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean(dim=(2, 3)))


class Pictures(Numbers):
    """Random images of 8 x 8 pixels with a class each."""

    def batch(self, indices: Sequence[int]) -> Batch:
        seeds = [torch.Generator().manual_seed(int(i)) for i in indices]
        images = torch.stack([torch.rand(3, 8, 8, generator=seed) for seed in seeds])
        return replace(super().batch(indices), images=images)


def conv_step(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
    assert batch.images is not None and batch.labels is not None
    return {"model": {"task": cross_entropy(model(batch.images), batch.labels)}}


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "fused-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "fused-adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "capturable-adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=True),
}


def fit_conv_net(
    out: Path, optimizer: str, graph: bool, channels_last: bool, stop_at: int | None, resume: bool
) -> dict[str, Tensor]:
    """Train for 12 steps on a GPU; SIGTERM arrives before step `stop_at`."""
    torch.manual_seed(0)
    net = ConvNet().cuda()
    if channels_last:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sets = {"model": ParameterSet(OPTIMIZERS[optimizer](net.parameters()))}

    def before(progress: Progress) -> Hashable:
        if progress.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return None

    fit(
        net,
        Pictures(32),
        conv_step,
        sets,
        FitConfig(epochs=3, batch=8, graph=graph),
        out=out,
        seed=3,
        device="cuda",
        before_step=before,
        resume=resume,
    )
    return net.state_dict()


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "cuda-graph"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_on_a_gpu_a_stopped_run_resumes_exactly(
    tmp_path: Path, optimizer: str, graph: bool, channels_last: bool
) -> None:
    torch.use_deterministic_algorithms(True)
    given = optimizer, graph, channels_last
    uninterrupted = fit_conv_net(tmp_path / "whole", *given, stop_at=None, resume=False)
    with pytest.raises(RunInterrupted):
        fit_conv_net(tmp_path / "parts", *given, stop_at=7, resume=False)
    resumed = fit_conv_net(tmp_path / "parts", *given, stop_at=None, resume=True)
    for name, value in uninterrupted.items():
        assert torch.equal(resumed[name], value), name


@pytest.mark.gpu
def test_on_a_gpu_a_step_that_synchronizes_raises(tmp_path: Path) -> None:
    def synchronizes(model: nn.Module, batch: Batch, progress: Progress) -> Losses:
        found = step(model, batch, progress)
        loss = found["model"]["task"]
        return {**found, "model": {"task": Loss(loss.total * float(loss.count), loss.count)}}

    net, sets = make()
    config = replace(FitConfig(epochs=3, batch=8), graph=True)
    with pytest.raises(UserError, match=r"synchronize.*train\.graph=false"):
        fit(net, Numbers(50), synchronizes, sets, config, out=tmp_path, seed=3, device="cuda")


def test_the_loop_uses_the_cuda_graph_capture() -> None:
    assert loop.GraphCapture is cuda_graph.GraphCapture
