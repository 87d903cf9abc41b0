"""Image tokens are removed as if they had never been there, and the rest keeps its place."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import overt
from overt.capture import Bias
from overt.errors import UserError
from overt.nn import by_grid, by_random, keep_above_uniform, keep_share, keep_top
from overt.nn.token_pruning import pruned_decoder
from overt.nn.token_pruning.image_token_scores import by_centre, by_image_encoder, by_last_query
from overt.nn.token_pruning.merge import by_keys
from overt.nn.token_pruning.pruned_decoder import (
    PrunedDecoder,
    merge_image_tokens,
    prune_image_tokens,
    zip_image_tokens,
)
from tests.capture.layouts import vision_language as families
from tests.nn.token_pruning.small_vlm import HALF, QUARTER, kept_positions, prompts, small_vlm


def last_logits(logits: Tensor, given: dict[str, Any]) -> Tensor:
    mask = given["attention_mask"]
    last = mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
    return logits[torch.arange(len(mask)), last]


# --- slow copies


def removed_by_hand(model: Any, given: dict[str, Any], kept: dict[int, list[list[int]]]) -> Tensor:
    """Compute the last logits sample by sample, without padding, a mask or a hook.

    `kept[layer]` are the positions of each sample that reach a layer and all later ones. Removed
    tokens are cut out of the hidden states, and the others carry explicit positions.
    """
    embedded, text = model.get_input_embeddings()(given["input_ids"]), model.model.language_model
    images = model.get_image_features(
        given["pixel_values"], vision_feature_layer=-1, vision_feature_select_strategy="full"
    ).pooler_output
    found = []
    for row, mask in enumerate(given["attention_mask"].bool()):
        states = embedded[row : row + 1].clone()
        states[0, given["input_ids"][row] == families.IMAGE] = images[row]
        places = mask.nonzero()[:, 0]
        states = states[:, places]
        for at, layer in enumerate(text.layers):
            if at in kept:
                stays = torch.isin(places, torch.tensor(kept[at][row]))
                states, places = states[:, stays], places[stays]
            tables = text.rotary_emb(states, places[None])
            seen = torch.ones(len(places), len(places), dtype=torch.bool).tril()
            states = layer(states, attention_mask=seen[None, None], position_embeddings=tables)
        found.append(model.lm_head(text.norm(states))[0, -1])
    return torch.stack(found)


RULES: dict[str, Callable[[Any], PrunedDecoder]] = {
    "FastV": lambda m: prune_image_tokens(m, (2,), QUARTER),
    "PyramidDrop": lambda m: prune_image_tokens(m, (1, 2, 3), HALF),
    "image encoder": lambda m: prune_image_tokens(m, (0,), HALF, by_image_encoder, -1),
    "AdaHAN": lambda m: prune_image_tokens(m, (1,), keep_above_uniform),
    "random": lambda m: prune_image_tokens(
        m, (1,), QUARTER, by_random(torch.Generator().manual_seed(0)), capture=False
    ),
    "grid": lambda m: prune_image_tokens(m, (0, 2), HALF, by_grid, capture=False),
    "centre": lambda m: prune_image_tokens(m, (1,), QUARTER, by_centre, capture=False),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_pruning_equals_removing_tokens_by_hand(rule: str, side: str) -> None:
    model, given = small_vlm(), prompts(side=side)
    pruned = RULES[rule](model)
    found = last_logits(pruned(**given, position_ids=torch.arange(23)[None]).logits, given)
    torch.testing.assert_close(found, removed_by_hand(model, given, kept_positions(pruned)))
    assert not torch.allclose(found, last_logits(model(**given).logits, given), rtol=1e-4)
    assert pruned.lengths[-1] < pruned.lengths[0] or 0 in pruned.after


@torch.no_grad()
def test_keeping_every_token_changes_nothing() -> None:
    model, given = small_vlm(), prompts((4, 4))
    pruned = prune_image_tokens(model, (0, 2), partial(keep_share, share=1.0), by_grid)
    assert torch.equal(pruned(**given).logits, model(**given).logits)


# --- masked runs, in other families


def masked_logits(model: Any, given: dict[str, Any], kept: dict[int, list[list[int]]]) -> Tensor:
    """Run the whole prompt, with dropped tokens hidden from all queries of later layers."""
    n = given["input_ids"].shape[1]

    def hide(call: Any) -> Tensor | None:
        layer = getattr(call.module, "layer_idx", None)
        steps = [] if layer is None or call.cross else [at for at in kept if at <= layer]
        if not steps or call.shape[-1] < n:
            return None
        bias = torch.full((call.shape[0], call.shape[-1]), -torch.inf)
        bias[:, n:] = 0
        for row, places in enumerate(kept[max(steps)]):
            bias[row, places] = 0
        # a dropped token sees itself: its row would be empty otherwise, and nobody reads it
        own = torch.arange(call.shape[-2])[:, None] == torch.arange(call.shape[-1])
        return torch.where(own, 0, bias[:, None, None]).to(torch.float64)

    with overt.watch(model, edit=Bias(hide)):
        return model(**given).logits


NAMES = ("LLaVA", "LLaVA-NeXT", "LLaVA-OneVision", "Qwen2-VL", "Qwen2.5-VL", "GLM-4V", "InternVL",
         "Aya Vision", "Idefics 3", "SmolVLM", "Pixtral", "Mistral 3")  # fmt: skip


@pytest.mark.parametrize(
    "name", [*NAMES[:1], *(pytest.param(one, marks=pytest.mark.long) for one in NAMES[1:])]
)
@torch.no_grad()
def test_pruning_equals_a_masked_run_in_every_family(name: str) -> None:
    family = families.family(name)
    model, images = family.build()
    model = model.double()
    given = families.batch(
        family, model, images, [[families.photo((40, 50))], [families.photo((60, 30))]]
    )
    given = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    given["use_cache"] = False
    pruned = prune_image_tokens(model, (1,), HALF)
    found = last_logits(pruned(**given).logits, given)
    assert pruned.lengths[1] < pruned.lengths[0]
    expected = masked_logits(model, given, kept_positions(pruned))
    torch.testing.assert_close(found, last_logits(expected, given))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Qwen3-VL", "deepstack"),
        ("Mllama", "cross-attention"),
    ],
)
def test_models_that_need_every_token_are_refused(name: str, message: str) -> None:
    model, _ = families.family(name).build()
    with pytest.raises(ValueError, match=message):
        prune_image_tokens(model, (1,), HALF)


# --- generation

# a model with random weights may write an image token
GREEDY = {"do_sample": False, "suppress_tokens": [families.IMAGE]}


@pytest.mark.parametrize("rule", ["FastV", "image encoder", "AdaHAN"])
@torch.no_grad()
def test_generated_tokens_equal_those_of_a_masked_run(rule: str) -> None:
    model, given = small_vlm(), prompts()
    settings = {**GREEDY, "max_new_tokens": 4, "min_new_tokens": 4}
    pruned = RULES[rule](model)
    written = pruned.generate(**given, **settings, return_dict_in_generate=True, output_logits=True)
    text, kept = given, kept_positions(pruned)
    for step, logits in enumerate(written.logits):
        places = text["attention_mask"].cumsum(1).sub(1).clamp_min(0)
        whole = masked_logits(model, {**text, "position_ids": places}, kept)[:, -1]
        torch.testing.assert_close(logits.double(), whole, atol=1e-5, rtol=1e-4)
        new = written.sequences[:, given["input_ids"].shape[1] + step, None]
        text = {
            **text,
            "input_ids": torch.cat([text["input_ids"], new], dim=1),
            "attention_mask": torch.cat([text["attention_mask"], torch.ones_like(new)], dim=1),
        }
        kept = {at: [[*row, places.shape[1]] for row in rows] for at, rows in kept.items()}


@torch.no_grad()
def test_later_layers_cache_fewer_keys_and_positions_go_on() -> None:
    model, given = small_vlm(), prompts((5,))
    written = prune_image_tokens(model, (2,), QUARTER).generate(
        **given, max_new_tokens=3, min_new_tokens=3, do_sample=False, return_dict_in_generate=True
    )
    cache = written.past_key_values
    assert [layer.keys.shape[2] for layer in cache.layers] == [25, 25, 13, 13]
    assert cache.get_seq_length() == 25


@torch.no_grad()
def test_beams_carry_the_positions_of_their_sample() -> None:
    model, given = small_vlm(), prompts()
    settings = {**GREEDY, "max_new_tokens": 4, "min_new_tokens": 4, "num_beams": 3}
    both = RULES["AdaHAN"](model).generate(**given, **settings)
    ends = [len(row) - int(row.sum()) for row in given["attention_mask"]]
    for row, start in enumerate(ends):
        alone = {
            name: value[row : row + 1, start:] if value.ndim == 2 else value[row : row + 1]
            for name, value in given.items()
        }
        one = RULES["AdaHAN"](model).generate(**alone, **settings)
        assert torch.equal(both[row, start:], one[0])


# --- merging


def slow_merged(states: Tensor, groups: list[list[int]]) -> Tensor:
    return torch.stack([states[group].mean(dim=0) for group in groups])


@torch.no_grad()
def test_merged_tokens_are_means_that_count_by_their_number() -> None:
    """Before the decoder: the same as repeating each mean, at one position."""
    model, given = small_vlm(), prompts((4,))
    merged = merge_image_tokens(model, (0,), 6)
    found = last_logits(merged(**given).logits, given)
    slots = merged.steps[0].slots[0]
    groups = [(slots == at).nonzero()[:, 0].tolist() for at in range(int(slots.max()) + 1)]
    assert merged.lengths[0] == len(groups) == 22 - 6
    step_places = [group for group in groups if len(group) > 1]
    assert step_places and all(min(group) >= 2 and max(group) < 18 for group in step_places)
    embedded = model.get_input_embeddings()(given["input_ids"])[0].clone()
    embedded[2:18] = model.get_image_features(
        given["pixel_values"], vision_feature_layer=-1, vision_feature_select_strategy="full"
    ).pooler_output[0]
    means = slow_merged(embedded, groups)
    targets = _targets(model, given, 6)
    places = [next(i for i in group if i in targets) for group in groups]
    repeated = torch.tensor([at for at, group in enumerate(groups) for _ in group])
    text = model.model.language_model
    states, positions = means[repeated][None], torch.tensor(places)[repeated][None]
    order = repeated[:, None] >= repeated[None]  # copies of one token see each other
    tables = text.rotary_emb(states, positions)
    for layer in text.layers:
        states = layer(states, attention_mask=order[None, None], position_embeddings=tables)
    torch.testing.assert_close(
        found[0], model.lm_head(text.norm(states))[0, -1], atol=1e-6, rtol=1e-5
    )


def _targets(model: Any, given: dict[str, Any], count: int) -> set[int]:
    """Positions that no token was merged away from."""
    seen: list[Any] = []

    def note(tokens: Any) -> Any:
        step = merge_image_tokens(model, (0,), count).reducer(tokens)
        seen.append(step.places[0].tolist())
        return step

    PrunedDecoder(model, (0,), note)(**given)
    return set(seen[0])


@torch.no_grad()
def test_tokens_that_are_not_kept_are_merged_into_a_few() -> None:
    model, given = small_vlm(), prompts()
    keep = partial(keep_top, count=4)
    zipped = zip_image_tokens(model, (0,), keep, by_image_encoder, context=3, vision_layer=-1)
    zipped(**given)
    step = zipped.steps[0]
    assert step.count.tolist() == [5 + 4 + 3, 7 + 4 + 3]
    cells = zipped.kept.block("global", "image").values
    assert (cells == 1).all()  # each lives on, alone or merged
    groups = step.slots[:, given["input_ids"].shape[1] - 21 + 2 :]
    assert all(len(set(row.tolist())) <= 7 + 5 for row in groups)
    by_layer = merge_image_tokens(model, (1, 2), 4, by_keys)
    by_layer(**given)
    assert by_layer.lengths == [23, 19, 15, 15]


# --- training


def labelled(given: dict[str, Any], tail: int) -> Tensor:
    labels = torch.full_like(given["input_ids"], -100)
    labels[:, -tail:] = given["input_ids"][:, -tail:]
    return labels


def test_the_loss_in_training_equals_that_of_a_masked_run() -> None:
    model, given = small_vlm().train(), prompts(tail=2)
    labels = labelled(given, 2)
    pruned = prune_image_tokens(model, (2,), QUARTER)
    output = pruned(**given, labels=labels, use_cache=False)
    output.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits = masked_logits(model, {**given, "use_cache": False}, kept_positions(pruned))
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100
    )
    torch.testing.assert_close(output.loss, loss, rtol=1e-5, atol=1e-6, check_dtype=False)
    loss.backward()
    for name, parameter in model.named_parameters():
        if name in grads:
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_the_answer_does_not_choose_the_tokens_that_it_is_predicted_from() -> None:
    model, given = small_vlm().train(), prompts(tail=2)
    labels = labelled(given, 2)
    pruned = prune_image_tokens(model, (1,), QUARTER)
    pruned(**given, labels=labels)
    first = kept_positions(pruned)
    other = {**given, "input_ids": given["input_ids"].clone()}
    other["input_ids"][:, -2:] = torch.tensor([50, 51])
    pruned(**other, labels=labels)
    assert kept_positions(pruned) == first


@torch.no_grad()
def test_an_adapted_model_is_pruned_inside_a_block_and_left_as_it_was() -> None:
    model, given = small_vlm(), prompts()
    before = model(**given).logits
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    with prune_image_tokens(model, (1,), QUARTER) as pruned:
        inside = model(**given).logits
        text = model(input_ids=torch.tensor([[5, 6, 7]])).logits  # no image: nothing is pruned
    assert pruned.lengths == [23, 11, 11, 11]
    assert set(pruned.state_dict()) == {f"model.{name}" for name in model.state_dict()}
    assert not torch.equal(inside, before)
    assert torch.equal(model(**given).logits, before)
    assert torch.equal(model(input_ids=torch.tensor([[5, 6, 7]])).logits, text)
    after = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    assert hooks == after


# --- a model left as it was


def count_hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@torch.no_grad()
def test_a_block_inside_of_a_block_raises_and_leaves_no_hook() -> None:
    model, given = small_vlm(), prompts()
    model(**given)
    hooks, pruned = count_hooks(model), prune_image_tokens(model, (1,), HALF)
    for other in (pruned, prune_image_tokens(model, (2,), HALF)):
        with pruned:
            with pytest.raises(ValueError, match="already"), other:
                pass
            pruned(**given)
        assert count_hooks(model) == hooks and pruned.lengths[-1] < pruned.lengths[0]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@torch.no_grad()
def test_a_pass_after_an_error_is_pruned_anew(error: type[BaseException]) -> None:
    def stop(*_: Any) -> None:
        raise error

    model, given = small_vlm(), prompts((2, 2))
    pruned = prune_image_tokens(model, (1,), HALF)
    expected = pruned(**given).logits
    with pruned:
        handle = model.model.language_model.layers[2].register_forward_pre_hook(stop)
        with pytest.raises(error):
            model(**prompts())
        handle.remove()
        assert torch.equal(model(**given).logits, expected)


@torch.no_grad()
def test_a_decoder_that_runs_without_its_model_raises() -> None:
    """Otherwise it would run with all tokens, in silence."""
    model, given = small_vlm(), prompts()
    pruned = prune_image_tokens(model, (1,), HALF, by_grid, capture=False)
    with pruned, pytest.raises(ValueError, match="whole model"):
        model.model(**given)
    family = families.family("BLIP-2")  # its `generate` passes embeddings to its decoder
    blip, images = family.build()
    inputs = families.batch(family, blip, images, [[families.photo((40, 50))]])
    pruned = prune_image_tokens(blip, (1,), HALF)
    pruned(**inputs)
    assert pruned.lengths[1] < pruned.lengths[0]
    with pytest.raises(ValueError, match="generate"):
        pruned.generate(**inputs, max_new_tokens=2)


@torch.no_grad()
def test_a_cache_of_a_pruned_prompt_needs_the_pruned_model() -> None:
    """Without a mask, the sizes of merged tokens would be lost in silence."""
    model, given = small_vlm(), prompts((3,))
    merged, word = merge_image_tokens(model, (1,), 6), torch.tensor([[9]])
    cache = merged(**given, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="not pruned"):
        model(input_ids=word, past_key_values=copy.deepcopy(cache))
    assert merged(input_ids=word, past_key_values=cache).logits.shape[1] == 1


# --- input that cannot be pruned


def test_rejected_input_is_named() -> None:
    model, given = small_vlm(), prompts()
    pruned = prune_image_tokens(model, (1,), HALF)
    with pytest.raises(ValueError, match="inputs_embeds"):
        pruned(inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="-100"):
        pruned(**given, labels=given["input_ids"])
    with pytest.raises(ValueError, match="DynamicCache"):
        pruned.generate(**given, max_new_tokens=2, cache_implementation="static")
    for setting in ({"use_cache": False}, {"prefill_chunk_size": 21}):
        with pytest.raises(ValueError, match=next(iter(setting))):
            pruned.generate(**given, max_new_tokens=2, **setting)
    with pytest.raises(ValueError, match="0 to 3"):
        prune_image_tokens(model, (4,), HALF)
    with pytest.raises(ValueError, match="vision_layer=-9"):
        prune_image_tokens(model, (1,), HALF, by_image_encoder, vision_layer=-9)
    with pytest.raises(ValueError, match="3 x 3"):
        prune_image_tokens(model, (1,), HALF, by_last_query, grid=(3, 3))(**given)
    flash = torch.nn.Module()
    flash.config = SimpleNamespace(_attn_implementation="flash_attention_2")  # type: ignore[assignment]
    with pytest.raises(NotImplementedError, match="flash_attention_2"):
        pruned_decoder._check_implementation(flash)
    model.train()
    model.gradient_checkpointing_enable()
    with pytest.raises(NotImplementedError, match="checkpointing"):
        pruned(**given, labels=labelled(prompts(), 1), use_cache=False)


@torch.no_grad()
def test_image_tokens_that_the_last_token_does_not_see_are_not_ranked() -> None:
    model, given = small_vlm(), prompts((3, 3))
    pruned = prune_image_tokens(model, (1,), HALF)
    n = given["input_ids"].shape[1]
    packed = {
        "input_ids": given["input_ids"].reshape(1, -1),
        "position_ids": torch.arange(n).repeat(2)[None],
        "pixel_values": given["pixel_values"],
        "use_cache": False,
    }
    with pytest.raises(ValueError, match="packed samples"):
        pruned(**packed)
    seen = torch.ones(n, n, dtype=torch.bool).tril()[None, None].expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match="number per token"):  # where a sample ends is unknown
        pruned(**{**given, "attention_mask": seen})
    control = prune_image_tokens(model, (1,), HALF, by_grid, capture=False)
    found = control(**{**given, "attention_mask": seen}).logits
    torch.testing.assert_close(found, control(**given).logits)


def test_layers_with_a_state_are_refused() -> None:
    class Recurrent(torch.nn.Module):
        layer_idx = 1

    model = small_vlm()
    model.model.language_model.layers[1].self_attn = Recurrent()
    with pytest.raises(ValueError, match="without softmax"):
        prune_image_tokens(model, (1,), HALF)


# --- on disk

SAVED: dict[str, Callable[[Any], PrunedDecoder]] = {
    "FastV": lambda m: prune_image_tokens(m, (2,), QUARTER),
    "image encoder": lambda m: prune_image_tokens(m, (0,), HALF, by_image_encoder, -1, (2, 8)),
    "centre": lambda m: prune_image_tokens(m, (1, 3), QUARTER, by_centre, capture=False),
    "ToMe": lambda m: merge_image_tokens(m, (1, 2), 3, by_keys),
    "VisionZip": lambda m: zip_image_tokens(m, (0,), HALF, by_image_encoder, 2, vision_layer=-1),
}


@pytest.mark.parametrize("rule", SAVED)
@torch.no_grad()
def test_a_loaded_pruned_model_computes_the_same(rule: str, tmp_path: Path) -> None:
    pruned, given = SAVED[rule](small_vlm().float()), prompts()
    given["pixel_values"] = given["pixel_values"].float()
    expected = pruned(**given).logits
    pruned.save_pretrained(tmp_path / "pruned")
    again = PrunedDecoder.from_pretrained(tmp_path / "pruned")
    assert not again.training
    assert torch.equal(again(**given).logits, expected)
    assert (again.after, again.grid, again.lengths) == (pruned.after, pruned.grid, pruned.lengths)
    assert torch.equal(again.kept.values, pruned.kept.values)
    again.save_pretrained(tmp_path / "twice")
    into = small_vlm().float()
    for parameter in into.parameters():
        parameter.zero_()
    last = PrunedDecoder.from_pretrained(tmp_path / "twice", into)
    assert last.inner is into and torch.equal(last(**given).logits, expected)


def test_custom_rules_and_other_folders_raise(tmp_path: Path) -> None:
    model = small_vlm()
    random = prune_image_tokens(model, (1,), HALF, by_random(torch.Generator()), capture=False)
    with pytest.raises(UserError, match="custom score"):
        random.save_pretrained(tmp_path / "pruned")
    with pytest.raises(UserError, match="custom reducer"):
        PrunedDecoder(model, (1,), random.reducer).save_pretrained(tmp_path / "pruned")
    with pytest.raises(UserError, match=r"image_pruning\.json"):
        PrunedDecoder.from_pretrained(tmp_path)
    assert not (tmp_path / "pruned").exists()


def test_saving_with_an_adapter_raises(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="no peft")
    adapted = peft.get_peft_model(small_vlm(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UserError, match="merge_and_unload"):
        prune_image_tokens(adapted, (1,), HALF).save_pretrained(tmp_path / "pruned")
