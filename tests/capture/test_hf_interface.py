"""`attn_implementation="overt"`: right by itself, refusing what it is not told, gone afterwards."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.attention import Kind
from overt.capture import Bias, Call, Route, UncapturedAttentionError, hf_interface, watch
from overt.capture.watch_plan import plan_watch
from tests.capture import families
from tests.capture.families import family

transformers = pytest.importorskip("transformers")
ALL = transformers.AttentionInterface._global_mapping
FLASH = "fake_flash"


class Attention(nn.Module):
    """Somebody who asks the interface."""

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.config = SimpleNamespace(_attn_implementation_internal="overt")


def by_hand(
    query: Tensor,
    key: Tensor,
    scale: float,
    allowed: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The weights, one step after the other."""
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]


def drawn(groups: int = 4, q: int = 5, k: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    shapes = [(2, 4, q, 8), (2, groups, k, 8), (2, groups, k, 8)]
    query, key, value = (torch.randn(*s, generator=make, dtype=torch.float64) for s in shapes)
    return query, key, value


# --- by itself


def test_registering_twice_is_registering_once() -> None:
    hf_interface.register_interface()
    hf_interface.register_interface()
    assert ALL["overt"] is hf_interface.overt_attention


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("masked", ["no", "bool", "float"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("more", [{}, {"softcap": 1.5}, {"s_aux": 1}, {"softcap": 1.5, "s_aux": 1}])
def test_all_that_shapes_the_scores(
    groups: int, masked: str, biased: bool, more: dict[str, Any], generator: torch.Generator
) -> None:
    query, key, value = drawn(groups)
    more = {**more}
    if "s_aux" in more:
        more["s_aux"] = torch.randn(4, generator=generator, dtype=torch.float64)
    allowed = torch.rand(2, 1, 5, 5, generator=generator) > 0.4
    allowed |= torch.eye(5, dtype=torch.bool)
    bias = torch.randn(1, 4, 5, 5, generator=generator, dtype=torch.float64) if biased else None
    mask: Tensor | None = {"no": None, "bool": allowed}.get(masked)
    if masked == "float":
        mask = torch.zeros(2, 1, 5, 5, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    output, none = hf_interface.overt_attention(
        Attention(), query, key, value, mask, scaling=0.3, position_bias=bias, **more
    )
    weights = by_hand(
        query,
        key,
        0.3,
        None if masked == "no" else allowed,
        bias,
        more.get("softcap"),
        more.get("s_aux"),
    )
    wanted = weights @ value.repeat_interleave(4 // groups, 1)
    assert none is None and output.is_contiguous()
    torch.testing.assert_close(output, wanted.transpose(1, 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("own", "given"), [(True, None), (False, True), (True, False)])
def test_causal_is_what_the_call_says_and_else_what_the_module_says(
    own: bool, given: bool | None, softcap: float | None, biased: bool
) -> None:
    query, key, value = drawn()
    bias = torch.randn(1, 4, 5, 5, dtype=torch.float64) if biased else None
    causal = own if given is None else given
    seen = torch.ones(5, 5, dtype=torch.bool).tril() if causal else None
    output, _ = hf_interface.overt_attention(
        Attention(own),
        query,
        key,
        value,
        None,
        0.3,
        0.0,
        given,
        position_bias=bias,
        softcap=softcap,
    )
    wanted = by_hand(query, key, 0.3, seen, bias, softcap) @ value
    torch.testing.assert_close(output, wanted.transpose(1, 2), rtol=0, atol=1e-12)


def test_one_query_sees_the_whole_cache() -> None:
    query, key, value = drawn(q=1)
    output, _ = hf_interface.overt_attention(Attention(True), query, key, value, None)
    wanted = by_hand(query, key, 8**-0.5) @ value
    torch.testing.assert_close(output, wanted.transpose(1, 2), rtol=0, atol=1e-12)


def test_with_no_mask_causal_starts_at_the_first_key_as_in_sdpa() -> None:
    query, key, value = drawn(q=3)
    output, _ = hf_interface.overt_attention(Attention(True), query, key, value, None)
    seen = torch.ones(3, 5, dtype=torch.bool).tril()
    wanted = by_hand(query, key, 8**-0.5, seen) @ value
    torch.testing.assert_close(output, wanted.transpose(1, 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_dropout_zeroes_weights_and_scales_the_rest(softcap: float | None) -> None:
    query, key, _ = drawn()
    value = torch.eye(5, 8, dtype=torch.float64).expand(2, 4, 5, 8)  # the output is the weights
    output, _ = hf_interface.overt_attention(
        Attention(), query, key, value, None, 0.3, dropout=0.5, softcap=softcap
    )
    found = output.transpose(1, 2)[..., :5]
    kept = found != 0
    assert 0.2 < kept.double().mean() < 0.8
    wanted = 2 * by_hand(query, key, 0.3, softcap=softcap)
    torch.testing.assert_close(found[kept], wanted[kept], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        *("Llama", "Gemma 2", "GPT-OSS", "T5", "BART"),
        *(
            pytest.param(name, marks=pytest.mark.newer("transformers>=5"))
            for name in ("Qwen2-VL", "DETR")
        ),
    ],
)
def test_with_nobody_watching_a_model_gives_what_eager_gives(name: str) -> None:
    one = family(name)
    outputs = []
    for implementation in ("eager", "overt"):
        model = one.build(implementation)
        output = model(**one.inputs())
        logits = output.logits if "logits" in output else output.last_hidden_state
        outputs.append((logits, families.gradients([logits], model)))
    for ours, theirs in zip(*outputs, strict=True):
        scale = float(theirs.detach().abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name", ["NllbMoeModel", "BigBirdPegasusModel"])
def test_models_that_cannot_be_on_sdpa(name: str) -> None:
    """One does not say that its decoder is causal; one writes the attention of its encoder out."""
    more = {"num_experts": 4, "expert_capacity": 16, "attention_type": "original_full"}
    build = families.hf(name, **families.BART, **more)
    outputs = [build(each)(**families.translation())[0] for each in ("eager", "overt")]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


# --- what it is not told


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "indices", "block_indices", "cache", "seq_idx"])
def test_a_keyword_that_could_change_scores_is_refused_by_name(name: str) -> None:
    query, key, value = drawn()
    for harmless in (None, False):
        hf_interface.overt_attention(Attention(), query, key, value, None, **{name: harmless})
    with pytest.raises(NotImplementedError, match=f"Attention.*'{name}'.*set_attn_implementation"):
        hf_interface.overt_attention(Attention(), query, key, value, None, **{name: torch.ones(2)})


def test_what_changes_no_score_is_let_through() -> None:
    query, key, value = drawn()
    more = {"position_ids": torch.arange(5), "use_cache": True, "max_length_q": 5}
    hf_interface.overt_attention(Attention(), query, key, value, None, **more)


def test_maps_are_not_promised() -> None:
    query, key, value = drawn()
    with pytest.raises(NotImplementedError, match=r"overt\.watch"):
        hf_interface.overt_attention(Attention(), query, key, value, None, output_attentions=True)


def test_a_window_that_is_not_in_a_mask_is_refused() -> None:
    query, key, value = drawn()
    hf_interface.overt_attention(Attention(), query, key, value, None, sliding_window=5)
    with pytest.raises(NotImplementedError, match=r"window.*3 .* 5 keys"):
        hf_interface.overt_attention(Attention(), query, key, value, None, sliding_window=3)


@pytest.mark.newer("transformers>=5")
def test_the_mask_is_left_out_only_where_it_cannot_be_misread() -> None:
    config = transformers.LlamaConfig()
    sizes = {"batch_size": 1, "config": config}
    assert hf_interface.overt_mask(q_length=5, kv_length=5, **sizes) is None
    assert hf_interface.overt_mask(q_length=1, kv_length=5, q_offset=4, **sizes) is None
    there = hf_interface.overt_mask(q_length=3, kv_length=5, q_offset=0, **sizes)
    assert there[0, 0].equal(torch.ones(3, 5, dtype=torch.bool).tril())
    there = hf_interface.overt_mask(q_length=3, kv_length=5, q_offset=2, **sizes)
    assert there[0, 0].equal(torch.ones(3, 5, dtype=torch.bool).tril(2))


# --- watched


@pytest.mark.parametrize("name", ["Gemma 2", "GPT-OSS"])
def test_what_no_fused_kernel_can_do_is_recorded_here(name: str) -> None:
    one = family(name)
    model = one.build("overt")
    with watch(model) as trace:
        model(**one.inputs())
    assert {call.route for call in trace} == {Route.INTERFACE}
    assert {call.kind for call in trace} == {one.kind}
    totals = trace.map().values.sum(dim=-1)
    assert bool((totals < 1).all()) is (one.kind is Kind.SUBPROBABILITY)


@pytest.mark.parametrize("name", ["Gemma 2", "GPT-OSS"])
def test_edits_reach_it(name: str) -> None:
    one = family(name)
    model, inputs = one.build("overt"), one.inputs()
    hidden = torch.zeros(7)
    hidden[1] = -torch.inf

    def hide(call: Call, weights: Tensor) -> Tensor:
        kept = weights * (hidden == 0)
        return kept / kept.sum(-1, keepdim=True)

    plain = model(**inputs).logits
    with watch(model, edit=Bias(lambda call: hidden)) as trace:
        biased = model(**inputs).logits
    assert not torch.allclose(biased, plain)
    assert all(float(call.weights()[..., 1].sum()) == 0 for call in trace)
    with watch(model, layers=[0], edit=hide):
        edited = model(**inputs).logits
    assert not torch.allclose(edited, plain)
    torch.testing.assert_close(model(**inputs).logits, plain, rtol=0, atol=0)


# --- kernels that cannot be seen


def fake_flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as flash-attention has it: padding as (b, k), causal from the last key; unseen."""
    with torch._C.DisableTorchFunction():
        q, k = query.shape[2], key.shape[2]
        allowed = torch.ones(1, 1, q, k, dtype=torch.bool)
        if module.is_causal if is_causal is None else is_causal:
            allowed = allowed.tril(k - q)
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :].bool()
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        weights = by_hand(query, key, scale, allowed)
        output = weights @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return output.transpose(1, 2).contiguous(), None


@pytest.fixture
def flash() -> Iterator[None]:
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

    transformers.AttentionInterface.register(FLASH, fake_flash)
    AttentionMaskInterface.register(FLASH, flash_attention_mask)
    yield
    del ALL[FLASH], AttentionMaskInterface._global_mapping[FLASH]


def on_flash(name: str) -> nn.Module:
    """A model on the kernel that cannot be seen, every part of it."""
    model = family(name).build("eager")
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = FLASH
    return model


def implementations(model: nn.Module) -> set[str]:
    return {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}


@pytest.mark.long
@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize(
    "name", ["BERT", "GPT-2", "Llama", "BART", "Whisper", "ViT", "CLIP", "LLaVA"]
)
def test_a_model_on_flash_is_seen_and_left_on_flash(name: str) -> None:
    one = family(name)
    model, inputs = on_flash(name), one.inputs()
    wanted = one.reference(one.build("eager"), inputs)
    before = model(**inputs)
    with watch(model) as trace:
        assert implementations(model) == {"overt"}
        during = model(**inputs)
    assert implementations(model) == {FLASH}
    for call, weights in zip(trace, wanted, strict=True):
        torch.testing.assert_close(call.weights(), weights, rtol=0, atol=1e-6)
    torch.testing.assert_close(during[0], before[0], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize(
    "name", [pytest.param("GPT-2", marks=pytest.mark.newer("transformers>=5")), "Llama"]
)
def test_flash_counts_from_the_last_key(name: str) -> None:
    """Three new words on top of four in the cache."""
    wanted = family(name).build("eager")
    model, ids = on_flash(name), family(name).inputs()["input_ids"]
    cached = wanted(ids[:, :4]).past_key_values
    said = wanted(ids[:, 4:], past_key_values=cached, output_attentions=True).attentions
    cached = model(ids[:, :4]).past_key_values
    with watch(model) as trace:
        model(ids[:, 4:], past_key_values=cached)
    for call, weights in zip(trace, said, strict=True):
        assert call.shape == (2, 4, 3, 7) and call.causal
        torch.testing.assert_close(call.weights(), weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("was", "shift"), [("flash_attention_2", 2), ("flex_attention", 0)])
def test_a_module_that_gives_no_mask_means_what_its_kernel_means(was: str, shift: int) -> None:
    query, key, value = drawn(q=3)
    module = Attention(True)
    module.config._attn_implementation_internal = was
    with hf_interface.use_interface(plan_watch(module).configs):
        output, _ = hf_interface.overt_attention(module, query, key, value, None)
    allowed = torch.ones(3, 5, dtype=torch.bool).tril(shift)
    wanted = by_hand(query, key, 8**-0.5, allowed) @ value
    torch.testing.assert_close(output, wanted.transpose(1, 2), rtol=0, atol=1e-12)


@pytest.mark.newer("transformers>=5")
@pytest.mark.usefixtures("flash")
def test_it_is_restored_after_an_error_and_by_the_last_who_leaves() -> None:
    model, inputs = on_flash("BERT"), family("BERT").inputs()
    with pytest.raises(ZeroDivisionError), watch(model):
        raise ZeroDivisionError
    assert implementations(model) == {FLASH}
    with watch(model) as outer:
        with watch(model):
            model(**inputs)
        assert implementations(model) == {"overt"}
        model(**inputs)
    assert implementations(model) == {FLASH}
    assert len(outer) == 4


@pytest.mark.newer("transformers>=5")
@pytest.mark.usefixtures("flash")
def test_two_threads_share_the_switch() -> None:
    model, inputs = on_flash("BERT"), family("BERT").inputs()
    inside, leave = threading.Event(), threading.Event()
    found: list[int] = []

    def stay() -> None:
        with watch(model) as trace:
            inside.set()
            leave.wait(600)
            model(**inputs)
        found.append(len(trace))

    thread = threading.Thread(target=stay)
    thread.start()
    assert inside.wait(600)
    with watch(model) as trace:
        model(**inputs)
    assert implementations(model) == {"overt"}
    leave.set()
    thread.join(600)
    assert found == [2] and len(trace) == 2
    assert implementations(model) == {FLASH}


@pytest.mark.parametrize(
    "implementation",
    ["eager", "sdpa", pytest.param("overt", marks=pytest.mark.newer("transformers>=5"))],
)
def test_what_can_be_seen_is_left_alone(implementation: str) -> None:
    model = family("BERT").build(implementation)
    with hf_interface.use_interface(plan_watch(model).configs):
        assert implementations(model) == {implementation}


def test_flex_attention_is_switched_too() -> None:
    one = family("Llama")
    model = one.build("eager")
    model.config._attn_implementation = "flex_attention"
    wanted = one.reference(one.build("eager"), one.inputs())
    with watch(model) as trace:
        model(**one.inputs())
    assert implementations(model) == {"flex_attention"}
    for call, weights in zip(trace, wanted, strict=True):
        torch.testing.assert_close(call.weights(), weights, rtol=0, atol=1e-6)


def test_an_implementation_of_the_users_own_is_seen_or_named_as_unseen() -> None:
    def own(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
        return (q @ k.mT).mul(0.1).softmax(-1).matmul(v).transpose(1, 2), None

    def opaque(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return own(*args, **kwargs)

    one = family("ViT")
    try:
        for name, function in (("mine", own), ("opaque", opaque)):
            transformers.AttentionInterface.register(name, function)
            model = one.build("eager")
            model.config._attn_implementation = name
            if name == "mine":
                with watch(model) as trace:
                    model(**one.inputs())
                assert implementations(model) == {"mine"} and len(trace) == 2
            else:
                with (
                    pytest.raises(
                        UncapturedAttentionError, match=r"2 of 2.*set_attn_implementation"
                    ),
                    watch(model),
                ):
                    model(**one.inputs())
    finally:
        del ALL["mine"], ALL["opaque"]


@pytest.mark.newer("transformers>=5")
def test_a_model_that_never_asks_the_interface_is_not_switched() -> None:
    """Falcon has classes of its own for each implementation, chosen when it is built."""
    model = family("Falcon").build("eager")
    model.config._attn_implementation_internal = "flash_attention_2"
    with hf_interface.use_interface(plan_watch(model).configs):
        assert model.config._attn_implementation == "flash_attention_2"


@pytest.mark.long
def test_transformers_is_not_imported_for_a_model_without_it() -> None:
    code = (
        "import sys, torch, overt\n"
        "model = torch.nn.MultiheadAttention(8, 2)\n"
        "x = torch.randn(3, 1, 8)\n"
        "with overt.capture.watch(model) as trace: model(x, x, x)\n"
        "assert len(trace) == 1 and 'transformers' not in sys.modules\n"
    )
    code = code.replace("import sys, torch, overt", "import sys, torch, overt.capture")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


# --- transformers before 5


@pytest.mark.parametrize(("keys", "skip"), [(4, True), (6, False)])
def test_old_transformers_gives_the_positions_of_the_queries(
    monkeypatch: pytest.MonkeyPatch, keys: int, skip: bool
) -> None:
    from transformers import masking_utils

    given: dict[str, Any] = {}
    monkeypatch.setattr(masking_utils, "eager_mask", lambda **options: given.update(options))
    positions = torch.arange(4)
    hf_interface.overt_mask(cache_position=positions, kv_length=keys, config=SimpleNamespace())
    assert given.pop("cache_position") is positions and "q_length" not in given
    assert given["kv_length"] == keys and given["allow_is_causal_skip"] is skip


@pytest.mark.newer("transformers>=5")
def test_masks_of_old_transformers_are_cut_off_at_the_last_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, key, value = drawn()
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool).tril()
    module = Attention()
    with pytest.raises(RuntimeError):
        hf_interface.overt_attention(module, query, key, value, mask)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.53.3"))
    hf_interface._may_have_long_masks.cache_clear()
    try:
        cut = hf_interface.overt_attention(module, query, key, value, mask)[0]
        whole = hf_interface.overt_attention(module, query, key, value, mask[..., :5])[0]
    finally:
        hf_interface._may_have_long_masks.cache_clear()
    torch.testing.assert_close(cut, whole, rtol=0, atol=0)
