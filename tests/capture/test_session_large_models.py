"""Large models as they are loaded and trained: offloaded, quantized, adapted, checkpointed.

Maps are compared with those of eager attention, or of the same model on one device. Packages that
are not installed are skipped by name; a LoRA module written here is always tested.
"""

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt import losses
from overt.attribution import raw_attention, rollout
from overt.capture import attention_modules, generate, layout_of, watch
from overt.capture.discovery import without_adapter
from overt.train.integrations import add_attention_loss
from tests.capture.large_models import LAYERS, eager_weights, llama
from tests.capture.toys import FusedAttention

TOKENS = torch.tensor([[5, 9, 2, 7, 3, 8], [4, 6, 1, 2, 9, 3]])
ROWS, KEYS = torch.tensor([[4, 5], [3, 5]]), torch.tensor([[0, 1, 2], [0, 1, 2]])


def weights_of(model: nn.Module, **inputs: Any) -> Tensor:
    with torch.no_grad(), watch(model) as trace:
        model(input_ids=TOKENS, **inputs)
    assert trace.names == LAYERS
    return trace.map().weights


def attention_loss(model: nn.Module) -> Tensor:
    """A task loss and a loss on a block of all layers."""
    with watch(model) as trace:
        output = model(input_ids=TOKENS, labels=TOKENS, use_cache=False)
    block = trace.log_block(ROWS, KEYS)
    even = block.detach().weights.new_ones(2, 1, 1, 2, 3) / 3
    return output.loss - (even * block.log_weights).sum(dim=-1).mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    attention_loss(model).backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {name: grad.clone() for name, grad in found.items()}


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() and wanted
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


# --- offloading and several devices


def offloaded_to_cpu(model: nn.Module, folder: Path) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(model, execution_device="cpu")


def offloaded_to_disk(model: nn.Module, folder: Path) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    accelerate.disk_offload(model, str(folder / "disk"), execution_device="cpu")
    return model


def dispatched(model: nn.Module, folder: Path) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb"), "cpu")
    places |= {"lm_head": "cpu", "model.layers.0": "cpu"}
    places |= {"model.layers.1": "disk", "model.layers.2": "disk"}
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder))


OFFLOADS = (offloaded_to_cpu, offloaded_to_disk, dispatched)


@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda one: one.__name__)
def test_an_offloaded_model_gives_the_same_maps(
    offload: Callable[[nn.Module, Path], nn.Module], tmp_path: Path
) -> None:
    wanted = weights_of(llama())
    model = offload(llama(), tmp_path)
    assert any(one.is_meta for one in model.parameters())
    for _ in range(3):  # all operations checked; without the check; with few hooks
        assert torch.equal(weights_of(model), wanted)


@pytest.mark.long
@pytest.mark.parametrize("offload", OFFLOADS, ids=lambda one: one.__name__)
def test_an_offloaded_model_generates_the_same_rows(
    offload: Callable[[nn.Module, Path], nn.Module], tmp_path: Path
) -> None:
    model = offload(llama(), tmp_path)
    given = {"input_ids": TOKENS, "max_new_tokens": 3, "do_sample": False}
    found, plain = generate(model, **given), generate(llama(), **given)
    assert torch.equal(found.output.sequences, plain.output.sequences)
    assert torch.equal(found.attention.weights, plain.attention.weights)


@pytest.mark.long
def test_a_device_map_of_from_pretrained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    llama().save_pretrained(tmp_path / "model")
    names = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0")
    places = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk", "model.layers.2": "disk"}
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "disk"
    ).eval()
    assert torch.equal(weights_of(model), weights_of(llama()))


def test_offloaded_weights_are_not_taken_for_values(tmp_path: Path) -> None:
    """A softmax over the rows of an offloaded codebook is not attention to positions."""
    accelerate = pytest.importorskip("accelerate")

    class Codebook(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = FusedAttention()
            self.pick, self.codes = nn.Linear(16, 5), nn.Linear(5, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(x)
            return x + self.codes(self.pick(x).softmax(dim=-1))

    x = torch.randn(2, 6, 16)
    model = Codebook().eval()
    with torch.no_grad(), watch(model) as trace:
        model(x)
    wanted = trace.map().weights
    accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    with torch.no_grad(), watch(model) as trace:
        model(x)
    assert trace.names == ("attention",) and torch.equal(trace.map().weights, wanted)


@pytest.mark.newer("transformers>=5")
def test_a_model_without_values_has_maps_of_the_right_shape() -> None:
    model = llama().to("meta")
    with torch.no_grad(), watch(model) as trace:
        model(input_ids=TOKENS.to("meta"))
    assert trace.map().weights.shape == (2, 3, 4, 6, 6)
    assert trace.map().weights.is_meta
    assert any("meta device" in note for note in trace.notes)


class Spread(nn.Module):
    """Two layers on two devices."""

    def __init__(self, devices: tuple[str, str]) -> None:
        super().__init__()
        self.devices = devices
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True) for _ in devices
        )
        for layer, device in zip(self.layers, devices, strict=True):
            layer.to(device)

    def forward(self, x: Tensor) -> Tensor:
        for layer, device in zip(self.layers, self.devices, strict=True):
            x = layer(x.to(device))
        return x


def test_layers_on_several_devices_are_stacked_on_that_of_the_first() -> None:
    """With a device without values: what is computed is moved, nothing else."""
    model = Spread(("cpu", "cpu")).eval()
    with watch(model) as trace:
        model(torch.randn(2, 5, 8))
    calls = list(trace.calls)
    source = calls[0].source
    moved = copy.copy(source)
    for name in ("query", "key"):
        object.__setattr__(moved, name, getattr(source, name).detach().to("meta"))
    object.__setattr__(moved, "taps", None)
    object.__setattr__(calls[0], "source", moved)
    assert trace.map().weights.is_meta and trace.map(1).weights.device.type == "cpu"
    rows, keys = ROWS.clamp_max(4), KEYS
    assert trace.block(rows, keys).values.is_meta and trace.log_block(rows, keys).values.is_meta
    assert trace.reduce(lambda total, one: total + one.weights.mean(), 0).is_meta
    assert [one.weights.is_meta for one in trace.maps()] == [True, False]


@pytest.mark.gpu
def test_two_devices_give_the_maps_of_one() -> None:
    one, two = Spread(("cpu", "cpu")), Spread(("cpu", "cuda:0"))
    two.load_state_dict(one.state_dict())
    x = torch.randn(2, 6, 8)
    found = []
    for model in (one, two):
        with watch(model) as trace:
            out = model(x)
        assert trace.map().weights.device.type == "cpu"
        block = trace.log_block(ROWS, KEYS)
        assert block.values.device.type == "cpu"
        block.values.sum().backward(retain_graph=True)
        total = trace.reduce(lambda total, one: total + one.weights, 0)
        maps = [trace.map().weights, trace.block(ROWS, KEYS).values, block.values, total]
        maps += [trace.received(), trace.entropy(), trace.top_k(2).weights]
        maps += [rollout(trace).weights, raw_attention.layer_attention(trace).weights.cpu()]
        assert all(each.device.type == "cpu" for each in maps)
        gradient = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
        found.append([each.detach() for each in (*maps, *gradient, out.cpu())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_device_map_over_cpu_and_gpu(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    wanted = weights_of(llama())
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 0, "lm_head": 0}
    places |= {"model.layers.0": 0, "model.layers.1": "cpu", "model.layers.2": "disk"}
    model = accelerate.dispatch_model(llama(), places, offload_dir=str(tmp_path))
    for _ in range(3):
        torch.testing.assert_close(weights_of(model).cpu(), wanted, rtol=0, atol=1e-4)
    found = generate(model, input_ids=TOKENS.cuda(), max_new_tokens=3, do_sample=False)
    plain = generate(llama(), input_ids=TOKENS, max_new_tokens=3, do_sample=False)
    torch.testing.assert_close(
        found.attention.weights.cpu(), plain.attention.weights, rtol=0, atol=1e-4
    )


# --- quantized weights


def by_pytorch() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still used
        return torch.ao.quantization.quantize_dynamic(llama(), {nn.Linear}, dtype=torch.qint8)


def by_torchao(name: str) -> nn.Module:
    pytest.importorskip("torchao", reason="no torchao")
    from torchao import quantization

    model = llama()
    quantization.quantize_(model, getattr(quantization, name)())
    return model


def by_bitsandbytes(folder: Path, **settings: Any) -> nn.Module:
    pytest.importorskip("bitsandbytes", reason="no bitsandbytes")
    transformers = pytest.importorskip("transformers")
    llama().save_pretrained(folder)
    config = transformers.BitsAndBytesConfig(**settings)
    return transformers.LlamaForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map="cpu"
    ).eval()


QUANTIZED: dict[str, Callable[[Path], nn.Module]] = {
    "quantize_dynamic": lambda folder: by_pytorch(),
    "torchao int8": lambda folder: by_torchao("Int8WeightOnlyConfig"),
    "torchao int8, activations too": lambda folder: by_torchao(
        "Int8DynamicActivationInt8WeightConfig"
    ),
    "torchao intx": lambda folder: by_torchao("IntxWeightOnlyConfig"),
    "bitsandbytes 8 bits": lambda folder: by_bitsandbytes(folder, load_in_8bit=True),
    "bitsandbytes 4 bits": lambda folder: by_bitsandbytes(
        folder, load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("quantize_dynamic", marks=pytest.mark.newer("transformers>=5")),
        *(pytest.param(name, marks=pytest.mark.long) for name in list(QUANTIZED)[1:]),
    ],
)
def test_maps_of_quantized_weights(name: str, tmp_path: Path) -> None:
    model = QUANTIZED[name](tmp_path)
    with torch.no_grad(), watch(model) as trace:
        model(input_ids=TOKENS)
    assert trace.names == LAYERS
    for call in trace:  # by hand, from the queries and keys that the quantized layers made
        query, key = call.source.query, call.source.key
        scores = query @ key.repeat_interleave(2, dim=1).mT / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
        torch.testing.assert_close(call.weights(), scores.softmax(-1), rtol=0, atol=1e-5)
    # Activations that are quantized too round differently with another kernel.
    tolerance = 5e-2 if "activations" in name or "8 bits" in name else 1e-5
    found, wanted = trace.map().weights, eager_weights(model, input_ids=TOKENS)
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
    assert (found - weights_of(llama())).abs().max() > 1e-4, "the weights were quantized"
    again = weights_of(model)  # without the check of the first block
    torch.testing.assert_close(again, found, rtol=0, atol=tolerance)
    rows = generate(model, input_ids=TOKENS, max_new_tokens=2, do_sample=False).attention
    torch.testing.assert_close(rows.weights[:, :, :, 0], found[:, :, :, 5], rtol=0, atol=tolerance)


# --- adapters


class LoRA(nn.Module):
    """A linear layer with a low-rank update."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        draw = torch.Generator().manual_seed(1)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features, generator=draw) / 4)
        self.lora_B = nn.Parameter(torch.randn(base.out_features, rank, generator=draw) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_A.mT @ self.lora_B.mT


def adapted_by_hand() -> nn.Module:
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)
    return model


def adapted_by_peft(kind: str = "LoraConfig", **settings: Any) -> nn.Module:
    peft = pytest.importorskip("peft", reason="no peft")
    settings = settings or {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(llama(), config).eval()


@pytest.mark.parametrize("adapted", [adapted_by_hand, adapted_by_peft])
def test_an_attention_loss_trains_the_adapter_only(adapted: Callable[[], nn.Module]) -> None:
    model = adapted()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    with watch(model) as trace:
        model(input_ids=TOKENS)
    assert trace.names == LAYERS
    assert set(trace.names) == set(attention_modules(model)) == set(attention_modules(llama()))
    torch.testing.assert_close(
        trace.map().weights, eager_weights(without_adapter(model), input_ids=TOKENS)
    )
    trace.log_block(ROWS, KEYS).values.square().mean().backward()
    optimizer.step()
    changed = {
        name for name, one in model.state_dict().items() if not torch.equal(one, before[name])
    }
    assert changed and all("lora_" in name for name in changed)
    assert all(f"layers.{layer}." in " ".join(changed) for layer in range(3))


def test_a_peft_model_is_named_as_its_base_model() -> None:
    model = adapted_by_peft()
    base = model.get_base_model()
    with torch.no_grad(), watch(model, layers=[LAYERS[0], -1]) as trace:
        model(input_ids=TOKENS)
    assert trace.names == (LAYERS[0], LAYERS[2])
    with torch.no_grad(), watch(model, without=["model.layers.1.*"]) as trace:
        model(input_ids=TOKENS)
        model(input_ids=TOKENS)
    assert trace.names == (LAYERS[0], LAYERS[2]) * 2
    assert [call.step for call in trace] == [0, 0, 1, 1]
    assert repr(layout_of(model, {"input_ids": TOKENS})) == repr(
        layout_of(base, {"input_ids": TOKENS})
    )
    given = {"input_ids": TOKENS, "max_new_tokens": 3, "do_sample": False}
    found, wanted = generate(model, **given), generate(base, **given)
    assert torch.equal(found.attention.weights, wanted.attention.weights)
    with model.disable_adapter():
        torch.testing.assert_close(weights_of(model), weights_of(llama()))
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


@pytest.mark.parametrize(
    ("kind", "settings", "sizes"),
    [
        ("PromptTuningConfig", {"num_virtual_tokens": 2}, (8, 8)),
        ("PrefixTuningConfig", {"num_virtual_tokens": 2}, (6, 8)),
        ("IA3Config", {"target_modules": ["k_proj"], "feedforward_modules": []}, (6, 6)),
    ],
    ids=["prompt", "prefix", "IA3"],
)
def test_virtual_tokens_are_part_of_the_map(
    kind: str, settings: dict[str, Any], sizes: tuple[int, int]
) -> None:
    model = adapted_by_peft(kind, **settings)
    attention = weights_of(model)
    assert attention.shape == (2, 3, 4, *sizes)
    assert generate(model, input_ids=TOKENS, max_new_tokens=2).attention.shape[-1] == sizes[1]


def test_a_compiled_peft_model_keeps_the_names() -> None:
    model = adapted_by_peft()
    compiled = torch.compile(model, backend="eager")
    assert watch(compiled).unwrapped is model.get_base_model()


@pytest.mark.parametrize("adapted", [adapted_by_hand, adapted_by_peft])
def test_an_attention_loss_inside_the_forward_pass(adapted: Callable[[], nn.Module]) -> None:
    model = adapted()
    inner = without_adapter(model)

    def to_first(trace: Any, inputs: Any) -> losses.Loss:
        return losses.mse(trace.map(), trace.map().detach().normalize())

    with add_attention_loss(model, to_first):
        output = model(input_ids=TOKENS, labels=TOKENS)
    assert output.attention_rows > 0
    assert output.attention_loss.requires_grad
    assert "forward" not in vars(model) and "forward" not in vars(inner)


# --- checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("adapted", [llama, adapted_by_hand])
def test_gradients_with_checkpointing_are_those_without(
    adapted: Callable[[], nn.Module], reentrant: bool
) -> None:
    wanted = gradients(adapted().train())
    model = adapted().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    stored = model.model.layers[0]._gradient_checkpointing_func
    for _ in range(2):  # all operations checked, and not
        assert_same_gradients(gradients(model), wanted)
    assert model.model.layers[0]._gradient_checkpointing_func is stored


# --- compiled


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["plain", "disk", "quantize_dynamic", "torchao int8", "LoRA", "peft"]
)
def test_compiled_models_give_the_same_maps(name: str, tmp_path: Path) -> None:
    makes = {
        "plain": llama,
        "disk": lambda: offloaded_to_disk(llama(), tmp_path),
        "LoRA": adapted_by_hand,
        "peft": adapted_by_peft,
    }
    model = makes[name]() if name in makes else QUANTIZED[name](tmp_path)
    wanted = weights_of(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(weights_of(compiled), wanted, rtol=0, atol=1e-5)


@pytest.mark.long
def test_a_compiled_checkpointed_model_has_the_same_gradients() -> None:
    wanted = gradients(llama().train())
    torch._dynamo.reset()
    model = llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    attention_loss(torch.compile(model, backend="aot_eager")).backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert_same_gradients(found, wanted)


# --- caches


@pytest.mark.parametrize("search", [{}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_a_static_cache_gives_the_rows_of_a_dynamic_one(search: dict[str, Any]) -> None:
    model, mask = llama(), torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0  # padded on the left
    given = {"input_ids": TOKENS, "attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    dynamic = generate(model, **given, **search)
    static = generate(model, **given, **search, cache_implementation="static")
    assert torch.equal(static.output.sequences, dynamic.output.sequences)
    torch.testing.assert_close(
        static.attention.weights, dynamic.attention.weights, rtol=0, atol=1e-5
    )
    assert torch.equal(static.attention.visible, dynamic.attention.visible)


@pytest.mark.newer("transformers>=5")
def test_slots_of_a_static_cache_that_are_empty_have_no_weight() -> None:
    transformers = pytest.importorskip("transformers")
    model = llama()
    cache = transformers.StaticCache(config=model.config, max_cache_len=12)
    with torch.no_grad(), watch(model) as trace:
        for part in (TOKENS[:1], TOKENS[1:, :1]):
            model(input_ids=part, past_key_values=cache, use_cache=True)
    last = trace.at(1).map()
    with torch.no_grad(), watch(model) as whole:
        model(input_ids=torch.cat([TOKENS[:1], TOKENS[1:, :1]], dim=1), use_cache=False)
    wanted = whole.map().weights[:, :, :, 6:]
    torch.testing.assert_close(last.weights[..., :7], wanted, rtol=0, atol=1e-5)
    assert last.weights.shape[-1] == 12 and not last.weights[..., 7:].any()
    assert not last.visible[..., 7:].any()
