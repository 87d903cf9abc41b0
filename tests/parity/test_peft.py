"""Vision-language models that PEFT adapts: watched, placed, pruned, supervised and saved.

The reference is the same model with the adapter merged into its weights by PEFT itself.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from overt.capture import watch
from overt.capture.discovery import attention_modules, without_adapter
from overt.capture.layouts.hf_layouts import layouts_of
from overt.losses import ANSWER_INPUTS, cross_entropy
from overt.nn.token_pruning.pruned_decoder import PrunedDecoder, prune_image_tokens
from overt.targets.answer_boxes import collate_answer_targets
from overt.train.integrations import supervise_answers
from tests.capture.layouts import vision_language as families
from tests.losses import grounded_answers as answers
from tests.nn.token_pruning.small_vlm import HALF

pytest.importorskip("transformers", reason="transformers is not installed")
peft: Any = pytest.importorskip("peft", reason="PEFT is not installed: `make .venv/.apart`")
pytestmark = pytest.mark.newer("transformers>=5.17")
DECODER = r".*language_model.*\.(q_proj|v_proj)"  # not those of the image encoder


def adapted(name: str = "LLaVA") -> Any:
    """Return a model with LoRA in its decoder whose update is not zero."""
    torch.manual_seed(4)
    config = peft.LoraConfig(r=2, target_modules=DECODER, init_lora_weights=False)
    return peft.get_peft_model(answers.build(name), config).eval()


def merged(model: Any) -> Any:
    """Return a copy without an adapter that computes the same."""
    return copy.deepcopy(model).merge_and_unload().requires_grad_().eval()


def batch_of(name: str = "LLaVA") -> dict[str, Any]:
    return collate_answer_targets(answers.samples(name), partial(answers.pad, side="right"))


def inputs_of(name: str = "LLaVA") -> dict[str, Any]:
    left_out = {*ANSWER_INPUTS, "labels"}
    return {key: value for key, value in batch_of(name).items() if key not in left_out}


@torch.no_grad()
@pytest.mark.parametrize("name", answers.MODELS)
def test_names_and_maps_are_those_of_the_merged_model(name: str) -> None:
    model, given = adapted(name), inputs_of(name)
    plain = merged(model)
    assert list(attention_modules(model)) == list(attention_modules(plain))
    found = []
    for one in (model, plain):
        with watch(one, layers=[-2, -1]) as trace:
            logits = one(**given).logits
        found.append((trace.names, trace.map().weights, logits))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1:], found[1][1:], atol=1e-5, rtol=1e-4)
    with model.disable_adapter(), watch(model, layers=[-2, -1]) as trace:
        model(**given)
    assert not torch.allclose(trace.map().weights, found[0][1], atol=1e-3)


@pytest.mark.parametrize("name", answers.MODELS)
def test_layouts_are_those_of_the_base_model(name: str) -> None:
    model, processor = adapted(name), answers.MODELS[name]()[1]
    photo = families.photo(answers.SIZE, (0, 0, 16, 8))
    sample = answers.samples(name)[0]
    given = {"input_ids": torch.tensor([sample["input_ids"]]), **answers.join_media([sample])}
    given |= answers.image_types(given)
    found, wanted = (
        layouts_of(one, given, processor=processor, images=[photo])
        for one in (model, without_adapter(model))
    )
    assert repr(found) == repr(wanted)
    assert found["language"].find("image").geometry is not None


def test_supervised_answer_words_train_the_adapter_as_the_merged_weights() -> None:
    model, batch = adapted(), batch_of()
    plain = merged(model)
    totals = []
    for one in (model, plain):
        with supervise_answers(one, layers=[-1], compare=cross_entropy):
            output = one(**batch, use_cache=False)
        totals.append(output.attention_loss)
        output.attention_loss.backward()
    torch.testing.assert_close(totals[0], totals[1], atol=1e-5, rtol=1e-4)
    reached = {at for at, one in model.named_parameters() if one.grad is not None}
    assert reached and all("lora_" in at for at in reached)
    # the gradient of the update B A is that of the merged weight: through B it is scale dW A'
    own = dict(model.named_parameters())
    (at,) = [at for at in reached if ".1.self_attn.q_proj.lora_B" in at]
    layer = model.get_submodule(at.partition(".lora_B")[0])
    weight = dict(plain.named_parameters())[
        at.partition(".lora_B")[0].removeprefix("base_model.model.") + ".weight"
    ]
    wanted = layer.scaling["default"] * weight.grad @ own[at.replace("lora_B", "lora_A")].mT
    torch.testing.assert_close(own[at].grad, wanted, atol=1e-5, rtol=1e-3)


def test_pruning_an_adapted_model_equals_pruning_the_merged_one() -> None:
    model, given = adapted(), inputs_of()
    plain = merged(model)
    ours, wanted = (prune_image_tokens(one, (1,), HALF) for one in (model, plain))
    with torch.no_grad():
        torch.testing.assert_close(
            ours(**given).logits, wanted(**given).logits, atol=1e-4, rtol=1e-3
        )
        assert torch.equal(ours.kept.values, wanted.kept.values)
        one = {key: value[:1] for key, value in given.items()}
        length = int(one["attention_mask"].sum())
        one = {key: value[:, :length] if value.ndim == 2 else value for key, value in one.items()}
        new = {"max_new_tokens": 3, "do_sample": False}
        assert torch.equal(ours.generate(**one, **new), wanted.generate(**one, **new))
    labels = batch_of()["labels"]
    ours.train()(**given, labels=labels).loss.backward()
    reached = {at for at, one in model.named_parameters() if one.grad is not None}
    assert reached and all("lora_" in at for at in reached)


@torch.no_grad()
def test_a_saved_adapter_gives_the_same_maps_and_a_merged_model_keeps_its_rule(
    tmp_path: Path,
) -> None:
    model, given = adapted(), inputs_of()
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(answers.build("LLaVA"), tmp_path / "adapter").eval()
    found = []
    for one in (model, again):
        with prune_image_tokens(one, (1,), HALF), watch(one, layers=[-1]) as trace:
            logits = one(**given).logits
        found.append((trace.map().weights, logits))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    # PrunedDecoder.save_pretrained rejects an adapter and names this way
    prune_image_tokens(merged(model), (1,), HALF).save_pretrained(tmp_path / "pruned")
    loaded = PrunedDecoder.from_pretrained(tmp_path / "pruned")
    torch.testing.assert_close(loaded(**given).logits, found[0][1], atol=1e-4, rtol=1e-3)
