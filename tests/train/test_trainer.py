"""A loss on attention in loops of others: the same step however a batch is cut, and it arrives."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertForSequenceClassification, Trainer, TrainingArguments

from overt.attention import AttentionMap, Layout, Span, words
from overt.capture.seen import Seen
from overt.models.adopted import adopt
from overt.supervise import Loss, cross_entropy
from overt.train.trainer import (
    AttentionLoss,
    check_reaches,
    compute_loss,
    label_loss,
    loss_inside,
    shared_mean,
)
from tests.models.test_adopted import tiny_bert

WORDS = 5
LAYOUT = Layout((Span("class", (1,), slice(0, 1)), Span("text", (WORDS,), slice(1, 6))), 6)
WEIGHT = 0.7


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Eight sentences of unequal length; of three of them it is known which word counts."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(at)
        target = torch.zeros(WORDS)
        if at in (1, 2, 6):
            target[at % 3] = 1
        mask = torch.ones(6, dtype=torch.long)
        mask[6 - at % 3 :] = 0
        return {
            "input_ids": torch.randint(1, 12, (6,), generator=generator),
            "attention_mask": mask,
            "labels": torch.tensor(at % 3),
            "target": target,
        }


def everything() -> dict[str, Tensor]:
    items = [Sentences()[at] for at in range(8)]
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def evidence(seen: Seen, inputs: Mapping[str, Any]) -> Loss:
    """The last layer should look from the class token at the word that counts."""
    target = AttentionMap.from_cells(inputs["target"], words(WORDS)).normalize()
    looked = Seen([seen.calls[-1]], seen.layout).log_block("class", "text")
    return WEIGHT * cross_entropy(looked, target)


class Supervised(AttentionLoss, Trainer):
    def rows(self, inputs: Mapping[str, Any]) -> Tensor:
        return inputs["target"].any(dim=-1).sum()


def arguments(out: Path, batch: int, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        str(out), per_device_train_batch_size=batch, gradient_accumulation_steps=8 // batch,
        max_steps=2, optim="sgd", learning_rate=0.02, lr_scheduler_type="constant",
        max_grad_norm=0.0, remove_unused_columns=False, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, **more,
    )  # fmt: skip


def still(model: BertForSequenceClassification) -> BertForSequenceClassification:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.attention_probs_dropout_prob = 0.0
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.0
    return model


def by_hand(
    per_label: float = 1.0, steps: int = 2
) -> tuple[BertForSequenceClassification, list[tuple[float, float]]]:
    """The same training from the model's own eager weights, in one batch, without overt."""
    model, batch = still(tiny_bert("eager")).train(), everything()
    target = batch.pop("target")
    rows = target.sum(dim=-1) > 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    told = []
    for _ in range(steps):
        output = model(**batch, output_attentions=True)
        row = output.attentions[-1][:, :, 0, 1:]
        row = row / row.sum(dim=-1, keepdim=True)
        each = -(target[:, None] * row.clamp_min(1e-30).log()).sum(dim=-1).mean(dim=1)
        attention = WEIGHT * each[rows].mean()
        task = F.cross_entropy(output.logits, batch["labels"])
        optimizer.zero_grad()
        (task + per_label * attention).backward()
        optimizer.step()
        told.append((task.item(), attention.item()))
    return model, told


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, one), two in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize("batch", [8, 4, 1])
@pytest.mark.parametrize("scaled", [True, False])
def test_trainer_takes_the_steps_of_a_loop_by_hand(
    batch: int, scaled: bool, tmp_path: Path
) -> None:
    """Uneven supervised rows in accumulated batches, some without any; both losses are logged.

    `scaled` is whether Trainer leaves the division by accumulation steps to the loss.
    """
    model = still(tiny_bert())
    model.accepts_loss_kwargs = scaled
    function = label_loss if scaled else None
    with loss_inside(model, evidence, LAYOUT, only=["target"]):
        trainer = Supervised(
            model, arguments(tmp_path, batch), train_dataset=Sentences(), compute_loss_func=function
        )
        trainer.train()
    expected, told = by_hand()
    assert_same(model, expected)
    logs = [one for one in trainer.state.log_history if "loss" in one]
    for log, (task, attention) in zip(logs, told, strict=True):
        assert log["attention_loss"] == pytest.approx(attention, rel=1e-4)
        assert log["loss"] == pytest.approx(task + attention, rel=1e-4)


@pytest.mark.parametrize("batch", [8, 2])
def test_a_plain_trainer_divides_by_labels(batch: int, tmp_path: Path) -> None:
    model = still(tiny_bert())
    with loss_inside(model, evidence, LAYOUT, only=["target"]):
        args = arguments(tmp_path, batch)
        data = Sentences()
        Trainer(model, args, train_dataset=data, compute_loss_func=compute_loss).train()
    assert_same(model, by_hand(per_label=3 / 8)[0])


def test_a_trainer_that_learns_no_attention_differs(tmp_path: Path) -> None:
    """The control of the tests above."""
    model = still(tiny_bert())
    with pytest.raises(AssertionError):
        assert_same(by_hand(per_label=0.0)[0], by_hand()[0])
    with loss_inside(model, evidence, LAYOUT, only=["target"]):
        args = arguments(tmp_path, 4)
        Trainer(model, args, train_dataset=Sentences(), compute_loss_func=label_loss).train()
    assert_same(model, by_hand(per_label=0.0)[0])


def test_trainer_evaluates_and_saves_the_users_model(tmp_path: Path) -> None:
    model = still(tiny_bert())
    seen = {}

    def metrics(given: Any) -> dict[str, float]:
        seen["predictions"] = given.predictions
        return {}

    with loss_inside(model, evidence, LAYOUT, only=["target"]):
        trainer = Supervised(
            model, arguments(tmp_path, 8), train_dataset=Sentences(), eval_dataset=Sentences(),
            compute_metrics=metrics,
        )  # fmt: skip
        found = trainer.evaluate()
        trainer.save_model(str(tmp_path / "kept"))
    _, [(task, attention)] = by_hand(steps=1)
    assert found["eval_loss"] == pytest.approx(task + attention, rel=1e-4)
    assert seen["predictions"].shape == (8, 3)  # logits and nothing else
    again = BertForSequenceClassification.from_pretrained(tmp_path / "kept")
    assert_same(again, model)


# --- the loss inside the model --------------------------------------------------------------


def test_the_model_is_left_as_found_also_after_an_error() -> None:
    model, batch = still(tiny_bert()), everything()
    target = batch.pop("target")
    before = dict(vars(model))
    plain = model(**batch)
    with loss_inside(model, evidence, LAYOUT, only=["target"]) as inside:
        assert inside is model
        output = model(**batch, target=target)
        assert isinstance(output, type(plain)) and torch.equal(output.logits, plain.logits)
        assert output["attention_rows"] == 3 and output.attention_loss.requires_grad
        assert model(batch["input_ids"], target=target).loss is None  # by place
    with pytest.raises(KeyError, match="target"), loss_inside(model, evidence, LAYOUT):
        model(**batch)
    assert dict(vars(model)) == before
    assert "attention_loss" not in model(**batch)
    assert not any(len(module._forward_hooks) for module in model.modules())


def test_an_output_without_room_is_refused() -> None:
    batch = everything()
    model = still(tiny_bert())
    with (
        loss_inside(model, evidence, LAYOUT, only=["target"]),
        pytest.raises(ValueError, match="returned a tuple, which has no room for a loss"),
    ):
        model(**batch, return_dict=False)
    with pytest.raises(ValueError, match="no loss on attention; train inside"):
        compute_loss(model(**everything_but_target()), batch["labels"])


def everything_but_target() -> dict[str, Tensor]:
    batch = everything()
    del batch["target"]
    return batch


# --- does it arrive? ------------------------------------------------------------------------


def judged() -> tuple[nn.Module, Loss]:
    model = adopt(still(tiny_bert()), layout=LAYOUT, loss=evidence)
    return model, model(everything()).loss


def test_what_a_loss_does_not_reach_is_named() -> None:
    model, loss = judged()
    silent = check_reaches(model, loss)
    last = "model.bert.encoder.layer.1"
    assert {"model.classifier.weight", f"{last}.attention.self.value.weight"} <= set(silent)
    assert f"{last}.attention.self.query.weight" not in silent
    assert "model.bert.embeddings.word_embeddings.weight" not in silent
    assert check_reaches(model, loss) == silent  # the graph is kept
    assert all(parameter.grad is None for parameter in model.parameters())
    (loss.mean() * 0.5).backward()
    reached = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == {n for n, _ in model.named_parameters()} - set(silent)


def test_a_loss_that_reaches_nothing_is_an_error() -> None:
    model, loss = judged()
    with pytest.raises(ValueError, match="no gradient at all: was it computed under no_grad"):
        check_reaches(model, loss.total.detach())
    with pytest.raises(ValueError, match=r"reaches none of the \d+ parameters"):
        check_reaches(copy.deepcopy(model), loss)
    with pytest.raises(ValueError, match="no row of this batch is supervised"):
        check_reaches(model, Loss(loss.total, torch.tensor(0)))
    with pytest.raises(ValueError, match="every parameter of the model is frozen"):
        check_reaches(copy.deepcopy(model).requires_grad_(False), loss)


def test_one_process_shares_with_itself() -> None:
    loss = Loss(torch.tensor(6.0), torch.tensor(3), weight=0.5)
    assert shared_mean(loss) == 1.0
    assert shared_mean(Loss(torch.tensor(0.0), torch.tensor(0))) == 0.0
