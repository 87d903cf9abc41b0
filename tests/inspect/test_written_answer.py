"""The answer of a vision-language model: its tokens, probabilities and maps, word by word.

The model is tiny and has random weights.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from overt.attribution import attention_rollout, gradients, value_weighted
from overt.capture import watch
from overt.inspect.inputs import ModelInput, WrittenAnswer, cover_removed
from overt.inspect.load_model import load_model
from overt.inspect.loaded_model import LoadedModel
from overt.inspect.look import ModelView, ViewOptions, view_model
from overt.inspect.written_answer import (
    answer_layout,
    append_tokens,
    generate_answer,
    prepare_written_call,
    token_scores,
    word_probabilities,
)
from overt.viz.panel import grid_spans
from tests.experiments import foreign

TEXT = "what is this"
PHOTO = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
GIVEN = ModelInput(TEXT, PHOTO)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(foreign.Shelf(tmp_path_factory.mktemp("models"))["llava"])


@pytest.fixture(scope="module")
def viewed(loaded: LoadedModel) -> ModelView:
    return view_model(loaded, GIVEN)


def test_the_answer_is_that_of_generate_and_is_read_after_the_prompt(loaded: LoadedModel) -> None:
    prepared = prepare_written_call(loaded, GIVEN)
    assert prepared.prompt is not None and prepared.answer is not None
    prompt = prepared.prompt["input_ids"]
    wanted = loaded.model.generate(
        **prepared.prompt, max_new_tokens=32, do_sample=False, suppress_tokens=[4]
    )
    new = wanted[0, prompt.shape[1] :]
    assert torch.equal(prepared.answer.ids, new)
    assert torch.equal(prepared.inputs["input_ids"], wanted[:, :-1])
    assert prepared.inputs["attention_mask"].shape == wanted[:, :-1].shape
    assert prepared.generated == " ".join(prepared.answer.words)
    # Read at once, every token is the most probable one at the position before it.
    with torch.no_grad():
        logits = prepared.call(prepared.inputs).logits[0, -len(new) :]
    logits[:, 4] = -torch.inf
    assert torch.equal(logits.argmax(dim=-1), new)


def test_tokens_of_images_are_not_written(loaded: LoadedModel) -> None:
    head = loaded.model.lm_head
    prompt = prepare_written_call(loaded, GIVEN).prompt
    assert prompt is not None
    always = replace(loaded, model=loaded.model)
    bias = head.register_forward_hook(
        lambda module, given, out: out + 1e4 * (torch.arange(out.shape[-1]) == 4)
    )
    try:
        assert 4 not in generate_answer(always, prompt).ids.tolist()
    finally:
        bias.remove()


def test_inputs_that_describe_tokens_grow_with_them() -> None:
    prompt = {
        "input_ids": torch.tensor([[5, 4, 4]]),
        "attention_mask": torch.ones(1, 3).long(),
        "token_type_ids": torch.tensor([[0, 1, 1]]),
        "cross_attention_mask": torch.tensor([[[0], [1], [1]]]),
        "pixel_values": torch.zeros(1, 3, 8, 8),
    }
    grown = append_tokens(prompt, torch.tensor([7, 8]))
    assert grown["input_ids"].tolist() == [[5, 4, 4, 7, 8]]
    assert grown["attention_mask"].tolist() == [[1] * 5]
    assert grown["token_type_ids"].tolist() == [[0, 1, 1, 0, 0]]
    assert grown["cross_attention_mask"].tolist() == [[[0], [1], [1], [1], [1]]]
    assert grown["pixel_values"] is prompt["pixel_values"]


def test_the_probability_of_a_word_is_the_product_over_its_tokens() -> None:
    answer = WrittenAnswer(torch.arange(4), ("grassland", "dog"), torch.tensor([0, 0, -1, 1]))
    found = word_probabilities(torch.tensor([0.5, 0.5, 0.1, 0.25]).log(), answer)
    assert found == pytest.approx((0.25, 0.25))
    (span,) = answer_layout(answer).spans
    assert span.geometry.tokens(0) == ["grassland", "dog"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=[] if name == "attention" else pytest.mark.long)
        for name in ("attention", "values", "gradient", "rollout", "relevance")
    ],
)
def test_rows_of_words_are_those_of_the_positions_that_predict_them(
    loaded: LoadedModel, method: str
) -> None:
    shown = view_model(loaded, GIVEN, ViewOptions(method=method)).panels[0]
    prepared = prepare_written_call(loaded, GIVEN)
    answer = prepared.answer
    assert answer is not None and shown.queries == answer.words
    with watch(loaded.model) as trace:
        output = prepared.call(prepared.inputs)
    text = trace.where(lambda call: "language_model" in call.name)
    scores = token_scores(output, answer)
    assert shown.chances == pytest.approx(word_probabilities(scores, answer))
    first = prepared.inputs["input_ids"].shape[1] - len(answer.ids)
    for word in (0, 3):
        (at,) = (answer.word_of_token == word).nonzero()[:, 0].tolist()
        rows = torch.tensor([[first + at]])
        wanted = {
            "attention": lambda rows=rows: text.map().weights[:, :, :, rows[0]],
            "values": lambda rows=rows: (
                value_weighted.value_norms(
                    text, rows, value_weighted.find_output_projection(loaded.model)
                ).weights
            ),
            "gradient": lambda rows=rows, at=at: gradients.gradient_attention(
                text, scores[at], rows
            ).values.clamp_min(0),
            "rollout": lambda rows=rows: attention_rollout.rollout(text, rows).weights,
            "relevance": lambda rows=rows, at=at: (
                gradients.relevance(text, scores[at], rows).weights
            ),
        }[method]()
        torch.testing.assert_close(
            shown.attention.weights[0, :, :, word], wanted[0, :, :, 0].detach()
        )


def test_the_panel_has_the_image_the_prompt_and_the_answer_as_keys(viewed: ModelView) -> None:
    shown = viewed.panels[0]
    assert shown.title == "the answer, word by word"
    (image,) = grid_spans(shown.attention.keys)
    assert image.geometry is not None and shown.photos["image"] is PHOTO
    assert shown.keys[:1] == ("image 0,0",) and shown.keys[16:19] == ("what", "is", "this")
    assert shown.attention.keys.find("answer").shape == (len(shown.keys) - 19,)
    weights = shown.attention.weights[0]
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]))
    assert viewed.answers[0][0] == " ".join(shown.queries)


def test_a_removal_changes_the_probabilities_of_the_same_words(
    loaded: LoadedModel, viewed: ModelView
) -> None:
    given = replace(GIVEN, removed_boxes=((0.2, 0.1, 0.6, 0.9),))
    found = view_model(loaded, given)
    before, after = viewed.panels[0], found.panels[0]
    assert after.queries == before.queries and after.before == pytest.approx(before.chances)
    assert after.chances != pytest.approx(after.before)
    # The same words on the covered photo, by hand.
    covered, _ = cover_removed(loaded, given)
    answer = prepare_written_call(loaded, GIVEN).answer
    prepared = prepare_written_call(loaded, covered, answer=answer)
    with torch.no_grad():
        scores = token_scores(prepared.call(prepared.inputs), answer)
    assert after.chances == pytest.approx(word_probabilities(scores, answer))
    # The answer is the one that the model writes now.
    now = prepare_written_call(loaded, covered).answer
    assert now is not None and found.answers[0][0] == now.text


def test_a_model_that_writes_nothing_says_so(loaded: LoadedModel) -> None:
    stop = loaded.model.lm_head.register_forward_hook(
        lambda module, given, out: out + 1e4 * (torch.arange(out.shape[-1]) == 3)  # [SEP]
    )
    try:
        found = view_model(loaded, GIVEN)
    finally:
        stop.remove()
    assert "It writes an empty text." in found.notes
    assert not any(shown.chances for shown in found.panels)
