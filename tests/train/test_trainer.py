"""A loss on attention in loops of others: the same step however a batch is cut, and it arrives."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertForSequenceClassification, Trainer

from overt.capture.seen import Seen
from overt.models.adopting.adopted import adopt
from overt.supervise import Loss
from overt.train.trainer import (
    AttentionLoss,
    check_reaches,
    compute_loss,
    label_loss,
    loss_inside,
    shared_mean,
)
from tests.train.sentences import (
    LAYOUT,
    WEIGHT,
    Sentences,
    Supervised,
    arguments,
    bert,
    everything,
    evidence,
)


def by_hand(
    per_label: float = 1.0, steps: int = 2
) -> tuple[BertForSequenceClassification, list[tuple[float, float]]]:
    """The same training from the model's own eager weights, in one batch, without overt."""
    model, batch = bert("eager").train(), everything()
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
    model = bert()
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


def test_what_is_logged_is_the_mean_over_steps(tmp_path: Path) -> None:
    model = bert()
    with loss_inside(model, evidence, LAYOUT, only=["target"]):
        args = arguments(tmp_path, 4)
        args.logging_steps = 2
        data = Sentences()
        trainer = Supervised(model, args, train_dataset=data, compute_loss_func=label_loss)
        trainer.train()
    _, told = by_hand()
    log = next(one for one in trainer.state.log_history if "loss" in one)
    assert log["attention_loss"] == pytest.approx(sum(a for _, a in told) / 2, rel=1e-4)
    assert log["loss"] == pytest.approx(sum(t + a for t, a in told) / 2, rel=1e-4)


@pytest.mark.parametrize("batch", [8, 2])
def test_a_plain_trainer_divides_by_labels(batch: int, tmp_path: Path) -> None:
    model = bert()
    with loss_inside(model, evidence, LAYOUT, only=["target"]):
        args = arguments(tmp_path, batch)
        data = Sentences()
        Trainer(model, args, train_dataset=data, compute_loss_func=compute_loss).train()
    assert_same(model, by_hand(per_label=3 / 8)[0])


def test_a_trainer_that_learns_no_attention_differs(tmp_path: Path) -> None:
    """The control of the tests above."""
    model = bert()
    with pytest.raises(AssertionError):
        assert_same(by_hand(per_label=0.0)[0], by_hand()[0])
    with loss_inside(model, evidence, LAYOUT, only=["target"]):
        args = arguments(tmp_path, 4)
        Trainer(model, args, train_dataset=Sentences(), compute_loss_func=label_loss).train()
    assert_same(model, by_hand(per_label=0.0)[0])


def test_trainer_evaluates_and_saves_the_users_model(tmp_path: Path) -> None:
    model = bert()
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


def test_evaluation_may_go_without_targets(tmp_path: Path) -> None:
    model = bert()
    bare = [{n: v for n, v in Sentences()[at].items() if n != "target"} for at in range(8)]

    def judge(seen: Seen, inputs: Mapping[str, Any]) -> Loss | None:
        return evidence(seen, inputs) if "target" in inputs else None

    with loss_inside(model, judge, LAYOUT, only=["target"]):
        trainer = Supervised(model, arguments(tmp_path, 8), eval_dataset=bare)
        found = trainer.evaluate()
        with pytest.raises(ValueError, match="no loss on attention"):
            trainer.compute_loss(model.train(), everything_but_target())
    _, [(task, _)] = by_hand(steps=1)
    assert found["eval_loss"] == pytest.approx(task, rel=1e-4)


class Forgetful(AttentionLoss, Trainer):
    """Does not say which rows are supervised: all labels are taken for them."""


def test_rows_that_are_not_counted_are_an_error_and_not_a_wrong_division(tmp_path: Path) -> None:
    model = bert()
    with (
        loss_inside(model, evidence, LAYOUT, only=["target"]),
        pytest.raises(ValueError, match=r"counted 3 rows where rows\(\) had said 8.*Forgetful"),
    ):
        Forgetful(model, arguments(tmp_path, 4), train_dataset=Sentences()).train()


def test_a_loss_of_whole_batches_is_refused() -> None:
    model = bert()

    def whole(seen: Seen, inputs: Mapping[str, Any]) -> Loss:
        return replace(evidence(seen, inputs), batch_level=True)

    with (
        loss_inside(model, whole, LAYOUT, only=["target"]),
        pytest.raises(ValueError, match="compares whole batches"),
    ):
        model(**everything())


# --- the loss inside the model --------------------------------------------------------------


def test_the_model_is_left_as_found_also_after_an_error() -> None:
    model, batch = bert(), everything()
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
    model = bert()
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
    model = adopt(bert(), layout=LAYOUT, loss=evidence)
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


# --- the example of the documentation -------------------------------------------------------


class StandIn(nn.Module):
    """What the example needs of a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, float] = {}

    def log(self, name: str, value: Tensor) -> None:
        self.logged[name] = value.item()


def test_the_lightning_example_learns() -> None:
    """It is text on its page, for Lightning is no dependency; here it runs with a stand-in."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "training-attention.md").read_text()
    first = page.split("```python\n")[1].split("```")[0]
    example = page.split("## Lightning")[1].split("```text\n")[1].split("```")[0]
    names: dict[str, Any] = {"lightning": SimpleNamespace(LightningModule=StandIn)}
    exec(first, names)  # noqa: S102
    exec(example, names)  # noqa: S102
    module = names["Looking"](names["bert"]())
    optimizer = module.configure_optimizers()
    seen = []
    for step in range(10):
        optimizer.zero_grad()
        module.training_step(names["batch"], step).backward()
        optimizer.step()
        seen.append(module.logged["attention_loss"])
    assert seen[-1] < seen[0]
    assert check_reaches(module, module.model(names["batch"]).loss)


def test_the_label_loss_of_a_causal_model_is_that_of_the_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 11}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    words = torch.randint(0, 11, (2, 6))
    labels = words.masked_fill(torch.arange(6) < 2, -100)
    outputs = model(input_ids=words, labels=labels)
    torch.testing.assert_close(label_loss(outputs, labels), outputs.loss)


@pytest.mark.parametrize("shape", [(4,), (4, 2)])
def test_labels_that_are_no_class_numbers_are_refused_in_a_sentence(shape: tuple[int, ...]) -> None:
    outputs = {"logits": torch.randn(4, 2), "attention_loss": torch.tensor(0.0)}
    for function in (label_loss, compute_loss):
        with pytest.raises(ValueError, match=r"class numbers, and these labels are torch.float32"):
            function(outputs, torch.rand(shape))


def test_a_copy_made_inside_is_of_the_plain_model() -> None:
    """An average of weights, or a teacher: it has weights of its own and no loss on attention."""
    model, batch = bert("sdpa").eval(), everything()
    target = batch.pop("target")
    with loss_inside(model, evidence, LAYOUT, only=("target",)):
        other = copy.deepcopy(model)
        again = copy.deepcopy(other)
        inside = model(**batch, target=target)
    plain = model(**batch)
    for one in (other, again):
        assert "attention_loss" not in one(**batch)
        assert torch.equal(one(**batch).logits, plain.logits)
        with torch.no_grad():
            one.classifier.weight.zero_()
            one.classifier.bias.fill_(3.0)
        assert (one(**batch).logits == 3).all(), "it runs on weights of its own"
    assert "attention_loss" in inside and torch.equal(inside.logits, plain.logits)


def test_a_forward_of_the_users_own_is_copied_with_its_model() -> None:
    model, batch = bert("sdpa").eval(), everything()
    batch.pop("target")
    plain = model.forward
    model.forward = plain  # set on the model itself, as wrappers do
    with loss_inside(model, evidence, LAYOUT):
        other = copy.deepcopy(model)
    assert model.forward is plain
    with torch.no_grad():
        other.classifier.weight.zero_()
        other.classifier.bias.fill_(3.0)
    assert (other(**batch).logits == 3).all() and not (model(**batch).logits == 3).any()


def test_inside_the_signature_is_the_users() -> None:
    import inspect

    model = bert("sdpa")
    before = inspect.signature(model.forward)
    with loss_inside(model, evidence, LAYOUT):
        assert inspect.signature(model.forward) == before
