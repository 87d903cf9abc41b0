"""A small vision-language model: prompts, answers, its loss, its maps and its files."""

from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from overt.data.scenes.dataset import Scenes
from overt.nn import keep_share
from overt.nn.token_pruning.pruned_decoder import prune_image_tokens
from overt.nn.vqa.vision_language import (
    VisionLanguageSizes,
    VisionLanguageVQA,
    hide_image_tokens,
)
from overt.testing import check_model


@pytest.fixture(scope="module")
def data() -> Scenes:
    return Scenes("train", seed=0, count=3, size=32, questions=2)


def small(data: Scenes) -> VisionLanguageVQA:
    torch.manual_seed(0)
    sizes = VisionLanguageSizes(
        data.vocabulary.words, data.answers, side=32, width=16, vision_layers=1, layers=2, heads=2
    )
    return VisionLanguageVQA(sizes).eval()


def test_it_passes_check_model(data: Scenes) -> None:
    # LLaVA reads the image encoder before its last normalization.
    unreached = ("vlm.model.vision_tower.post_layernorm.",)
    check_model(lambda: small(data), data.batch([0, 1]), unreached)


@torch.no_grad()
def test_the_processor_makes_the_prompts_of_the_model(data: Scenes) -> None:
    model, batch = small(data), data.batch([0, 1])
    prompts, processor = model.encode(batch), model.processor()
    assert batch.images is not None and batch.text is not None
    for row, image in enumerate(batch.image_index.tolist()):
        photo = Image.fromarray(batch.images[image].permute(1, 2, 0).numpy())
        text = f"<image> {batch.text.texts[row]} ?"
        given = processor(images=photo, text=text, return_tensors="pt")
        n = int(prompts.attention_mask[row].sum())
        assert given["input_ids"][0].tolist() == prompts.input_ids[row, :n].tolist()
        assert n - 1 == prompts.last[row]
        torch.testing.assert_close(given["pixel_values"][0], prompts.pixel_values[row])
        logits = model.vlm(**given).logits[0, -1]
        torch.testing.assert_close(
            logits[model.answer_ids], model.decide(prompts).prediction[row], atol=1e-5, rtol=1e-4
        )


@torch.no_grad()
def test_maps_are_the_attention_of_the_last_token_to_the_image(data: Scenes) -> None:
    model, batch = small(data), data.batch([0, 1])
    prompts = model.encode(batch)
    mean = model.decide(prompts).attention_to("image")
    _, found = model.attend(prompts)
    model.vlm.set_attn_implementation("eager")
    weights = model.vlm(**prompts.as_kwargs(), output_attentions=True).attentions
    rows = torch.stack(weights, dim=1)[torch.arange(4), :, :, prompts.last][..., 1:17]
    torch.testing.assert_close(found.weights[:, :, :, 0], rows / rows.sum(-1, keepdim=True))
    torch.testing.assert_close(mean.weights, found.weights.mean(dim=1, keepdim=True))
    assert found.keys.find("image").shape == (4, 4)
    assert found.keys.find("image").geometry is not None
    model.maps = False
    assert model.decide(prompts).attention == ()


@torch.no_grad()
def test_hidden_image_tokens_have_no_effect(data: Scenes) -> None:
    model, batch = small(data), data.batch([0])
    prompts = model.encode(batch)
    keep = torch.ones(2, 16)
    assert hide_image_tokens(prompts, None) is prompts
    assert torch.equal(model.decide(prompts, {"image": keep}).prediction, model(batch).prediction)
    found = model.decide(prompts, {"image": torch.zeros(2, 16)}).prediction
    other = model.encode(data.batch([1])).pixel_values  # another image, and the same questions
    swapped = type(prompts)(
        other, prompts.input_ids, prompts.attention_mask, prompts.last, prompts.geometry
    )
    torch.testing.assert_close(found, model.decide(swapped, {"image": keep * 0}).prediction)


def test_the_loss_is_that_of_the_answer_and_the_end_after_it(data: Scenes) -> None:
    model, batch = small(data), data.batch([0, 1])
    prompts = model.encode(batch)
    assert batch.labels is not None
    loss = model.answer_loss(prompts, batch.labels)
    taught, wanted = model.append_answers(prompts, batch.labels)
    logits = model.vlm(**taught.as_kwargs()).logits.log_softmax(-1)
    by_hand = torch.zeros(())
    for row, last in enumerate(prompts.last.tolist()):
        n = int(taught.attention_mask[row].sum())
        answer, end = taught.input_ids[row, n - 2 : n].tolist()
        word = data.answers[int(batch.labels[row])]
        assert (model.sizes.tokens[answer], model.sizes.tokens[end]) == (word, "<end>")
        assert wanted[row, last + 1 : last + 3].tolist() == [answer, end]
        by_hand = by_hand - logits[row, last, answer] - logits[row, last + 1, end]
    assert float(loss.count) == 2 * len(batch)
    torch.testing.assert_close(loss.total, by_hand)
    # the first answer is predicted without having been seen
    torch.testing.assert_close(
        F.log_softmax(model._answer_scores(prompts), -1),
        F.log_softmax(
            model.vlm(**taught.as_kwargs()).logits[torch.arange(4), prompts.last][
                :, model.answer_ids
            ],
            -1,
        ),
    )


def test_a_pruned_model_learns_from_fewer_image_tokens(data: Scenes) -> None:
    model, batch = small(data).train(), data.batch([0])
    assert batch.labels is not None
    with prune_image_tokens(model.vlm, (1,), partial(keep_share, share=0.25)) as pruned:
        loss = model.answer_loss(model.encode(batch), batch.labels)
    taught, _ = model.append_answers(model.encode(batch), batch.labels)
    assert torch.equal(pruned.steps[0].count, taught.attention_mask.sum(dim=1) - 12)
    loss.total.backward()
    assert all(p.grad is not None for p in model.vlm.model.multi_modal_projector.parameters())


def test_a_saved_model_answers_the_same(data: Scenes, tmp_path: Path) -> None:
    model, batch = small(data), data.batch([0])
    model.save_pretrained(tmp_path / "vlm")
    again = VisionLanguageVQA.from_pretrained(tmp_path / "vlm")
    assert again.sizes == model.sizes
    with torch.no_grad():
        assert torch.equal(again(batch).prediction, model(batch).prediction)


def test_sizes_that_do_not_fit_are_rejected(data: Scenes) -> None:
    with pytest.raises(ValueError, match="8 pixels.*30"):
        VisionLanguageSizes(("what",), ("red",), side=30)
    with pytest.raises(ValueError, match="4 heads.*20"):
        VisionLanguageSizes(("what",), ("red",), width=20)
    with pytest.raises(ValueError, match="images and tokens"):
        small(data).encode(type(data.batch([0]))(ids=("a",)))
