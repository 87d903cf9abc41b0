"""Capture is exact under checkpointing, autocast, compilation and distributed training."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overt.capture import watch
from overt.capture.call import MaterializedCall, QKCall
from tests.capture import families
from tests.capture.families import Family, family

ROOT = Path(__file__).resolve().parents[2]
VARIED = [
    pytest.param(family(name), implementation, id=f"{name}-{implementation}")
    for name, implementation in (
        ("BERT", "sdpa"),
        ("BERT", "eager"),
        ("Llama", "sdpa"),
        ("Llama", "eager"),
        ("T5", "sdpa"),
        ("BART", "sdpa"),
        ("ViT", "sdpa"),
        ("Swin", "sdpa"),
        ("CLIP", "sdpa"),
        ("GPT-OSS", "overt"),
        ("Gemma 2", "overt"),
        ("ViLT", "eager"),
        ("LXMERT", "eager"),
    )
]


# --- activation checkpointing


def enable_checkpointing(model: nn.Module, reentrant: bool = False) -> nn.Module:
    """Enable activation checkpointing of the layers, without the dropout of training mode."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert layers
    for layer in layers:
        layer.training = True
        for name in {"dropout", "activation_dropout"} & set(vars(layer)):
            setattr(layer, name, 0.0)
    return model


@pytest.mark.long
@pytest.mark.parametrize(("one", "implementation"), VARIED)
def test_maps_are_exact_with_checkpointing(one: Family, implementation: str) -> None:
    inputs = one.inputs()
    if not one.build(implementation).supports_gradient_checkpointing:
        pytest.skip(f"{one.name} has no checkpointing")
    theirs, wanted = families.look(one.build(implementation), inputs)
    ours, found = families.look(enable_checkpointing(one.build(implementation)), inputs)
    families.same(ours, theirs)
    families.close(found, wanted)


def test_maps_are_exact_with_reentrant_checkpointing() -> None:
    one = family("BERT")
    inputs = one.inputs()
    theirs, wanted = families.look(one.build("sdpa"), inputs)
    model = enable_checkpointing(one.build("sdpa"), reentrant=True)
    model.enable_input_require_grads()
    ours, found = families.look(model, inputs)
    families.same(ours, theirs)
    families.close(found, wanted)


# --- autocast


def reference_weights(source: QKCall | MaterializedCall) -> Tensor:
    """Compute the weights from the same queries and keys step by step in float64."""
    if isinstance(source, MaterializedCall):
        assert source.logits is not None
        weights = source.logits.double().softmax(-1)
        return weights[..., : weights.shape[-1] - source.dropped]
    b, h, q, k = source.shape
    key = source.key.double().repeat_interleave(h // source.key.shape[1], 1)
    scores = torch.einsum("bhqd,bhkd->bhqk", source.query.double(), key) * source.scale
    if source.softcap is not None:
        scores = source.softcap * torch.tanh(scores / source.softcap)
    if source.bias is not None:
        scores = scores + source.bias.double()
    if source.allowed is not None:
        scores = torch.where(source.allowed, scores, -torch.inf)
    if source.causal:
        scores = torch.where(torch.ones(q, k, dtype=torch.bool).tril(), scores, -torch.inf)
    if source.sinks is not None:
        sinks = source.sinks.double()[None, :, None, None].expand(b, h, q, 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :k]
    return scores.softmax(-1)


@pytest.mark.long
@pytest.mark.parametrize(("one", "implementation"), VARIED)
def test_maps_are_exact_under_bfloat16_autocast(one: Family, implementation: str) -> None:
    """The model rounds queries and keys; the weights computed from them are not rounded."""
    model = one.build(implementation)
    with torch.autocast("cpu", torch.bfloat16), watch(model) as trace:
        torch.manual_seed(5)
        model(**one.inputs())
        inside = [call.weights() for call in trace]
    for call, within in zip(trace, inside, strict=True):
        weights, exact = call.weights(), reference_weights(call.source)
        torch.testing.assert_close(within, weights, rtol=0, atol=0)
        assert call.log_weights().dtype == torch.float32
        if isinstance(call.source, QKCall):
            torch.testing.assert_close(weights.double(), exact, rtol=0, atol=1e-6)
        else:  # the weights used by the model, in its precision
            atol = 4e-3 if weights.dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(weights.double(), exact, rtol=0, atol=atol)
        positive = exact > 1e-20
        logs = call.log_weights().double()
        torch.testing.assert_close(logs[positive], exact[positive].log(), rtol=1e-5, atol=1e-5)
    assert bool(families.gradients([call.weights() for call in trace], model).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["Llama", "GPT-OSS", "Gemma 2"])
def test_maps_are_exact_in_half_precision(name: str, dtype: torch.dtype) -> None:
    one = family(name)
    model = one.build(one.implementations[-1]).to(dtype)
    with watch(model) as trace:
        model(**one.inputs())
    for call in trace:
        torch.testing.assert_close(
            call.weights().double(), reference_weights(call.source), rtol=0, atol=1e-6
        )


def test_autocast_maps_use_the_queries_of_the_kernel() -> None:
    """Llama rotates its queries and keys in float32, and SDPA gets them in bfloat16."""
    one = family("Llama")
    model = one.build("sdpa")
    with torch.autocast("cpu", torch.bfloat16), watch(model) as trace:
        model(**one.inputs())
    assert {call.source.query.dtype for call in trace} == {torch.bfloat16}


# --- compilation


def check_compiled(*words: str) -> list[str]:
    """Run compiled_models.py in a subprocess: the shape checks of the tests cannot be compiled."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.compiled_models", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout.split()


@pytest.mark.long
def test_a_compiled_model_is_captured_or_rejected() -> None:
    assert check_compiled("ViT:sdpa:aot_eager", "BERT:eager:eager") == ["equal", "rejected"]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_models_are_captured_with_each_backend(backend: str) -> None:
    ways = "BERT:sdpa Llama:overt T5:sdpa Gemma_2:overt Llama:sdpa ViT:overt CLIP:sdpa".split()
    ways = ways[:2] if backend == "inductor" else ways  # each takes a minute of compilation
    assert check_compiled(*(f"{way}:{backend}" for way in ways)) == ["equal"] * len(ways)


@pytest.mark.long
def test_a_compiled_model_with_graph_breaks_is_captured() -> None:
    """The expert of a token is not known at compile time."""
    assert check_compiled("GPT-OSS:overt:eager") == ["equal"]


# --- distributed training


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("name", "implementation"), [("BERT", "sdpa"), ("Llama", "eager"), ("GPT-OSS", "overt")]
)
def test_maps_are_exact_in_distributed_data_parallel(name: str, implementation: str) -> None:
    one = family(name)
    inputs = one.inputs()
    theirs, wanted = families.look(one.build(implementation), inputs)
    model = one.build(implementation)
    wrapped = DistributedDataParallel(model)
    with pytest.warns(UserWarning, match=r"wrap\(model, loss="):
        ours, found = families.look(wrapped, inputs, inner=model)
    families.same(ours, theirs)
    families.close(found, wanted)


@pytest.mark.long
def test_two_processes_capture_their_own_samples(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run(
        [sys.executable, *launcher, "-m", "tests.parity.distributed_halves", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=300,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1"]
