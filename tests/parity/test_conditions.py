"""What is seen stays exact under checkpointing, autocast, compilation and many processes."""

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
from overt.capture.call import Projected, Written
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


def checkpointed(model: nn.Module, reentrant: bool = False) -> nn.Module:
    """Layers that compute themselves twice, without the dropout that goes with training."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    assert layers
    for layer in layers:
        layer.training = True
        for name in {"dropout", "activation_dropout"} & set(vars(layer)):
            setattr(layer, name, 0.0)
    return model


@pytest.mark.parametrize(("one", "implementation"), VARIED)
def test_checkpointing(one: Family, implementation: str) -> None:
    inputs = one.inputs()
    if not one.build(implementation).supports_gradient_checkpointing:
        pytest.skip(f"{one.name} has no checkpointing")
    theirs, wanted = families.look(one.build(implementation), inputs)
    ours, found = families.look(checkpointed(one.build(implementation)), inputs)
    families.same(ours, theirs)
    families.close(found, wanted)


def test_reentrant_checkpointing_is_refused_in_a_sentence() -> None:
    one = family("BERT")
    model = checkpointed(one.build("sdpa"), reentrant=True)
    model.enable_input_require_grads()
    with pytest.raises(NotImplementedError, match="use_reentrant"), watch(model):
        model(**one.inputs())


# --- autocast


def oracle(source: Projected | Written) -> Tensor:
    """The weights from the same queries and keys, in double precision, one step after another."""
    if isinstance(source, Written):
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


@pytest.mark.parametrize(("one", "implementation"), VARIED)
def test_bfloat16_autocast(one: Family, implementation: str) -> None:
    """Queries and keys are rounded by the model; what is made of them is not."""
    model = one.build(implementation)
    with torch.autocast("cpu", torch.bfloat16), watch(model) as seen:
        torch.manual_seed(5)
        model(**one.inputs())
        inside = [call.weights() for call in seen]
    for call, within in zip(seen, inside, strict=True):
        weights, exact = call.weights(), oracle(call.source)
        torch.testing.assert_close(within, weights, rtol=0, atol=0)
        assert call.log_weights().dtype == torch.float32
        if isinstance(call.source, Projected):
            torch.testing.assert_close(weights.double(), exact, rtol=0, atol=1e-6)
        else:  # what the model itself used, in its own precision
            atol = 4e-3 if weights.dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(weights.double(), exact, rtol=0, atol=atol)
        there = exact > 1e-20
        logs = call.log_weights().double()
        torch.testing.assert_close(logs[there], exact[there].log(), rtol=1e-5, atol=1e-5)
    assert bool(families.gradients([call.weights() for call in seen], model).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["Llama", "GPT-OSS", "Gemma 2"])
def test_models_in_half_precision(name: str, dtype: torch.dtype) -> None:
    one = family(name)
    model = one.build(one.implementations[-1]).to(dtype)
    with watch(model) as seen:
        model(**one.inputs())
    for call in seen:
        torch.testing.assert_close(call.weights().double(), oracle(call.source), rtol=0, atol=1e-6)


def test_under_autocast_the_maps_are_of_what_the_kernel_got() -> None:
    """Llama turns its queries and keys in float32, and SDPA takes them in bfloat16."""
    one = family("Llama")
    model = one.build("sdpa")
    with torch.autocast("cpu", torch.bfloat16), watch(model) as seen:
        model(**one.inputs())
    assert {call.source.query.dtype for call in seen} == {torch.bfloat16}


# --- compilation


def run(*words: str) -> list[str]:
    """In a process of its own: the shape checks of these tests cannot be compiled."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity.compiled", *words],
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
def test_compiled() -> None:
    assert run("ViT:sdpa:aot_eager", "BERT:eager:eager") == ["equal", "refused"]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_in_every_way(backend: str) -> None:
    ways = "BERT:sdpa Llama:overt T5:sdpa Gemma_2:overt Llama:sdpa ViT:overt CLIP:sdpa".split()
    ways = ways[:2] if backend == "inductor" else ways  # each takes the C++ compiler a minute
    assert run(*(f"{way}:{backend}" for way in ways)) == ["equal"] * len(ways)


@pytest.mark.long
def test_compiled_with_breaks_between_graphs() -> None:
    """Which expert a word goes to is not known when the model is compiled."""
    assert run("GPT-OSS:overt:eager") == ["equal"]


# --- many processes


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "implementation"), [("BERT", "sdpa"), ("Llama", "eager"), ("GPT-OSS", "overt")]
)
def test_distributed_data_parallel(name: str, implementation: str) -> None:
    one = family(name)
    inputs = one.inputs()
    theirs, wanted = families.look(one.build(implementation), inputs)
    model = one.build(implementation)
    wrapped = DistributedDataParallel(model)
    with pytest.warns(UserWarning, match=r"overt\.adopt\(model, loss=\.\.\.\)"):
        ours, found = families.look(wrapped, inputs, inner=model)
    families.same(ours, theirs)
    families.close(found, wanted)


@pytest.mark.long
def test_two_processes_see_each_their_half(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    subprocess.run(
        [sys.executable, *launcher, "-m", "tests.parity.halves", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=300,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1"]
