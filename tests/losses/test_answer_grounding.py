"""Boxes as targets for answer words: tiny vision-language models, padded, packed, checkpointed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.attention import Layout
from overt.capture.layouts.hf_layouts import layout_of
from overt.capture.session import watch
from overt.capture.trace import AttentionTrace
from overt.losses import ANSWER_INPUTS, Loss, answer_grounding, cross_entropy
from overt.targets import placebos
from overt.targets.answer_boxes import collate_answer_targets
from overt.train.integrations import AttentionLossMixin, add_attention_loss, supervise_answers
from tests.capture.test_session_large_models import LoRA
from tests.losses import grounded_answers as answers

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.newer("transformers>=5")
LAYERS = [-1]


def batch_of(name: str, side: str = "right") -> dict[str, Tensor]:
    return collate_answer_targets(answers.samples(name), partial(answers.pad, side=side))


def model_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name not in ANSWER_INPUTS}


def loss_of(model: nn.Module, batch: dict[str, Tensor], **settings: Any) -> Loss:
    with supervise_answers(model, **{"layers": LAYERS, **settings}):
        output = model(**batch, use_cache=False)
    return Loss(output.attention_loss, output.attention_rows)


def slow_loss(model: nn.Module, name: str, side: str, heads: list[int]) -> float:
    """KL divergence of every sample alone, from the eager weights that the model returns."""
    model.set_attn_implementation("eager")
    batch = answers.pad(answers.samples(name), side)
    with torch.no_grad():
        weights = model(**batch, output_attentions=True, use_cache=False).attentions[-1]
    total = 0.0
    for row, sample in enumerate(answers.samples(name)):
        own = sample["input_ids"]
        start = batch["input_ids"].shape[1] - len(own) if side == "left" else 0
        images = [start + at for at, token in enumerate(own) if token == 90]
        target = sample["grounded_target"][0]
        for head in heads:
            found = weights[row, head, start + len(own) - 3, images]  # it writes the last word
            logs = (found / found.sum()).log()
            there = target > 0
            total += float((target[there] * (target[there].log() - logs[there])).sum())
    return total / len(heads)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", answers.MODELS)
def test_the_loss_equals_that_of_eager_weights_in_padded_batches(name: str, side: str) -> None:
    model = answers.build(name)
    found = loss_of(model, batch_of(name, side), heads=[0, 3])
    assert int(found.count) == 2
    assert found.total.item() == pytest.approx(slow_loss(model, name, side, [0, 3]), rel=1e-3)


def test_the_targets_of_a_batch_are_on_image_tokens_and_before_answer_words() -> None:
    for side in ("left", "right"):
        batch = batch_of("LLaVA", side)
        ids, rows = batch["input_ids"], torch.arange(2)[:, None]
        assert bool((ids[rows, batch["grounded_tokens"]] == 90).all())
        assert ids[rows, batch["grounded_words"] + 1].flatten().tolist() == [21, 21]


def test_the_cells_of_a_target_are_those_under_its_boxes() -> None:
    first, second = answers.samples("LLaVA")
    grid = first["grounded_target"].reshape(4, 4)  # boxes of 8 pixels: the first row, left half
    assert grid[0].tolist() == [0.5, 0.5, 0, 0] and float(grid[1:].sum()) == 0
    grid = second["grounded_target"].reshape(4, 4)
    assert grid.count_nonzero() == 5 and float(grid[3, 0]) == pytest.approx(0.2)


def test_packed_samples_have_the_loss_of_separate_ones() -> None:
    model = answers.build("LLaVA")
    packed = collate_answer_targets(answers.samples("LLaVA"), answers.pack)
    assert len(packed["input_ids"]) == 1 and packed["grounded_words"].shape == (1, 2)
    found, separate = loss_of(model, packed), loss_of(model, batch_of("LLaVA"))
    torch.testing.assert_close(found.total, separate.total, rtol=1e-4, atol=1e-5)
    assert int(found.count) == 2


@pytest.mark.parametrize("name", answers.MODELS)
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    found = []
    for checkpointing in (False, True):
        model = answers.build(name).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss_of(model, batch_of(name)).mean().backward()
        found.append({at: one.grad for at, one in model.named_parameters() if one.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert any("q_proj" in at and bool(one.any()) for at, one in found[0].items())
    for at, one in found[0].items():
        torch.testing.assert_close(found[1][at], one, msg=at)


class Supervised(AttentionLossMixin, transformers.Trainer):
    pass


def adapt_by_hand(model: Any) -> Any:
    model.requires_grad_(False)
    for layer in model.model.language_model.layers:
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)
    return model


def adapt_by_peft(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="no peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))


def train(model: Any, items: list[answers.Sample], out: Path, steps: int, **more: Any) -> Any:
    arguments = transformers.TrainingArguments(
        str(out), per_device_train_batch_size=2, max_steps=steps, learning_rate=2e-2,
        remove_unused_columns=False, logging_steps=1, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant", **more,
    )  # fmt: skip
    collate = partial(collate_answer_targets, collate=answers.pad)
    with supervise_answers(model, layers=LAYERS):
        trainer = Supervised(model, arguments, data_collator=collate, train_dataset=items)
        trainer.train()
    return trainer


def inside_the_boxes(model: nn.Module) -> float:
    """Share of the attention on the image that is on the boxes."""
    batch = batch_of("LLaVA")
    with torch.no_grad(), watch(model.eval(), layers=LAYERS) as trace:
        model(**model_inputs(batch), use_cache=False)
    found = trace.log_block(batch["grounded_words"], batch["grounded_tokens"]).weights
    boxes = batch["grounded_target"][:, None, None] > 0
    return float((found * boxes).sum(dim=-1).mean())


@pytest.mark.long
@pytest.mark.parametrize("adapt", [None, adapt_by_hand, adapt_by_peft])
def test_trainer_moves_attention_into_the_boxes_and_with_placebos_elsewhere(
    adapt: Callable[[nn.Module], nn.Module] | None, tmp_path: Path
) -> None:
    source = partial(answers.targets, "LLaVA")
    found = {}
    for name, one in {"boxes": source, "placebo": placebos.permuted_keys(source, seed=1)}.items():
        model = answers.build("LLaVA")
        if adapt is not None:
            model = adapt(model)
        frozen = {at: w.clone() for at, w in model.named_parameters() if not w.requires_grad}
        before = inside_the_boxes(model)
        checkpointing = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
        trainer = train(
            model, answers.samples("LLaVA", one), tmp_path, 12, gradient_checkpointing=True,
            **checkpointing,
        )  # fmt: skip
        found[name] = inside_the_boxes(model) - before
        logs = [log["attention_loss"] for log in trainer.state.log_history if "loss" in log]
        assert len(logs) == 12 and logs[-1] < logs[0]
        weights = dict(model.named_parameters())
        assert all(torch.equal(weights[at], value) for at, value in frozen.items())
        assert "forward" not in vars(model)
    assert found["boxes"] > 0.1 and found["boxes"] > found["placebo"] + 0.1


def test_a_batch_without_targets_has_no_loss_and_one_without_words_counts_none() -> None:
    items = answers.samples("LLaVA")
    plain = [{name: item[name] for name in item if name not in ANSWER_INPUTS} for item in items]
    batch = collate_answer_targets(plain, answers.pad)
    assert batch["grounded_words"].tolist() == [[-1], [-1]]
    found = loss_of(answers.build("LLaVA"), batch)
    assert found.total.item() == 0 and int(found.count) == 0
    assert answer_grounding(AttentionTrace([]), {"input_ids": batch["input_ids"]}) is None


def test_a_layout_is_inferred_in_the_context_although_this_runs_the_model() -> None:
    model, batch = answers.build("LLaVA"), model_inputs(batch_of("LLaVA"))

    def on_image(trace: AttentionTrace, inputs: Any) -> Loss:
        found = trace.log_block("text", "image")
        return cross_entropy(found, found.detach())

    def measured(inputs: Any) -> Layout:
        return layout_of(model, inputs, part="language")

    with add_attention_loss(model, on_image, measured, layers=LAYERS):
        output = model(**batch, use_cache=False)
    assert int(output.attention_rows) > 0


def test_layers_that_do_not_read_the_sequence_raise() -> None:
    model, batch = answers.build("LLaVA"), batch_of("LLaVA")
    with pytest.raises(ValueError, match="tokens.*layers="):
        loss_of(model, batch, layers=[0])
    found = loss_of(
        model, batch, layers=None, compare=cross_entropy
    )  # the image encoder is left out
    assert int(found.count) == 2


def test_an_image_encoder_with_as_many_tokens_as_the_text_raises() -> None:
    """Eight tokens in both: which of them is the decoder cannot be known from lengths."""
    layers = nn.ModuleDict(
        {
            name: nn.TransformerEncoderLayer(8, 2, batch_first=True)
            for name in ("vision", "language")
        }
    )
    with watch(layers) as trace:
        for layer in layers.values():
            layer(torch.randn(1, 8, 8))
    words = {"grounded_words": torch.tensor([[7]]), "grounded_tokens": torch.tensor([[0, 1]])}
    inputs = {"input_ids": torch.zeros(1, 8), "grounded_target": torch.ones(1, 1, 2), **words}
    with pytest.raises(ValueError, match="8 tokens"):
        answer_grounding(trace, inputs)
    only = trace.where(lambda call: "language" in call.name)
    assert answer_grounding(only, inputs) is not None
