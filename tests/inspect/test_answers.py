"""Answers of models: names, order and probabilities."""

import math
from types import SimpleNamespace

import pytest
import torch

from overt.inspect.answers import answer_note, model_answers, similarity_note, top_classes
from overt.inspect.inputs import ModelInput, PreparedCall
from overt.inspect.loaded_model import LoadedModel

PREPARED = PreparedCall({}, lambda inputs: None, ModelInput())


class Classifier(torch.nn.Module):
    config = SimpleNamespace(id2label={0: "ring", 1: "cube"})


class ToyForCausalLM(torch.nn.Module):
    config = SimpleNamespace()


def test_top_classes_are_the_five_most_probable() -> None:
    logits = torch.arange(8.0)
    found = top_classes(logits, str)
    assert [name for name, _ in found] == ["7", "6", "5", "4", "3"]
    chances = logits.softmax(-1).flip(0)[:5].tolist()
    assert [chance for _, chance in found] == pytest.approx(chances)
    assert top_classes(torch.tensor([0.0, math.nan]), str) == []


def test_a_classifier_answers_with_its_labels() -> None:
    output = SimpleNamespace(logits=torch.tensor([[0.0, math.log(3)]]))
    found = model_answers(LoadedModel("net", Classifier()), output, PREPARED)
    assert found == [("cube", pytest.approx(0.75)), ("ring", pytest.approx(0.25))]
    assert answer_note(found) == "It answers cube (75%)."
    embedding = SimpleNamespace(logits=torch.zeros(1, 7))
    assert model_answers(LoadedModel("net", Classifier()), embedding, PREPARED) == []


def test_a_language_model_answers_with_next_tokens() -> None:
    tokenizer = SimpleNamespace(decode=lambda ids: f" word{ids[0]}")
    loaded = LoadedModel("net", ToyForCausalLM(), tokenizer=tokenizer)
    output = SimpleNamespace(logits=torch.tensor([[[9.0, 0.0], [0.0, 9.0]]]))
    assert model_answers(loaded, output, PREPARED)[0][0] == "next: “word1”"


@pytest.mark.parametrize(
    ("answers", "writes", "note"),
    [
        ([], False, ""),
        ([("a dog", math.nan)], False, "It writes: a dog"),
        ([("a dog", 0.5)], True, "It writes: a dog"),
        ([(" ", math.nan)], False, "It writes an empty text."),
    ],
)
def test_notes_of_generated_text(answers: list[tuple[str, float]], writes: bool, note: str) -> None:
    assert answer_note(answers, writes) == note


def test_the_similarity_is_a_cosine() -> None:
    output = SimpleNamespace(
        image_embeds=torch.tensor([[3.0, 4.0]]), text_embeds=torch.tensor([[4.0, 3.0]])
    )
    assert "0.96" in similarity_note(output, PREPARED)
    assert similarity_note(SimpleNamespace(), PREPARED) == ""
