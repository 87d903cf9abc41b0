"""Attention losses in Trainer, Lightning and custom loops: steps, logs, evaluation, gradients."""

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

from overt.capture.trace import AttentionTrace
from overt.losses import Loss
from overt.nn.wrappers.wrapped_model import wrap
from overt.train.integrations import (
    AttentionLossMixin,
    add_attention_loss,
    check_gradient_flow,
    compute_loss,
    distributed_mean,
    label_loss,
)
from tests.train.sentences import (
    LAYOUT,
    WEIGHT,
    Sentences,
    Supervised,
    bert,
    full_batch,
    target_word_loss,
    training_arguments,
)


def train_manually(
    per_label: float = 1.0, steps: int = 2
) -> tuple[BertForSequenceClassification, list[tuple[float, float]]]:
    """Train with the eager attention weights of the model, in one batch, without overt."""
    model, batch = bert("eager").train(), full_batch()
    target = batch.pop("target")
    rows = target.sum(dim=-1) > 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
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
        losses.append((task.item(), attention.item()))
    return model, losses


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, one), two in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.long
@pytest.mark.parametrize("batch", [8, 4, 1])
@pytest.mark.parametrize("scaled", [True, False])
def test_trainer_takes_the_same_steps_as_a_manual_loop(
    batch: int, scaled: bool, tmp_path: Path
) -> None:
    """Accumulated batches have uneven supervised rows, some none; both losses are logged.

    `scaled`: whether the loss function divides by the accumulation steps instead of Trainer.
    """
    model = bert()
    model.accepts_loss_kwargs = scaled
    function = label_loss if scaled else None
    with add_attention_loss(model, target_word_loss, LAYOUT, only=["target"]):
        trainer = Supervised(
            model,
            training_arguments(tmp_path, batch),
            train_dataset=Sentences(),
            compute_loss_func=function,
        )
        trainer.train()
    expected, losses = train_manually()
    assert_same_weights(model, expected)
    logs = [one for one in trainer.state.log_history if "loss" in one]
    for log, (task, attention) in zip(logs, losses, strict=True):
        assert log["attention_loss"] == pytest.approx(attention, rel=1e-4)
        assert log["loss"] == pytest.approx(task + attention, rel=1e-4)


@pytest.mark.long
def test_logged_losses_are_means_over_steps(tmp_path: Path) -> None:
    model = bert()
    with add_attention_loss(model, target_word_loss, LAYOUT, only=["target"]):
        args = training_arguments(tmp_path, 4)
        args.logging_steps = 2
        data = Sentences()
        trainer = Supervised(model, args, train_dataset=data, compute_loss_func=label_loss)
        trainer.train()
    _, losses = train_manually()
    log = next(one for one in trainer.state.log_history if "loss" in one)
    assert log["attention_loss"] == pytest.approx(sum(a for _, a in losses) / 2, rel=1e-4)
    assert log["loss"] == pytest.approx(sum(t + a for t, a in losses) / 2, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("batch", [8, 2])
def test_a_plain_trainer_divides_by_labels(batch: int, tmp_path: Path) -> None:
    model = bert()
    with add_attention_loss(model, target_word_loss, LAYOUT, only=["target"]):
        args = training_arguments(tmp_path, batch)
        data = Sentences()
        Trainer(model, args, train_dataset=data, compute_loss_func=compute_loss).train()
    assert_same_weights(model, train_manually(per_label=3 / 8)[0])


@pytest.mark.long
def test_a_trainer_without_the_attention_loss_differs(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Negative control of the tests above."""
    model = bert()
    with pytest.raises(AssertionError):
        assert_same_weights(train_manually(per_label=0.0)[0], train_manually()[0])
    with add_attention_loss(model, target_word_loss, LAYOUT, only=["target"]):
        args = training_arguments(tmp_path, 4)
        Trainer(model, args, train_dataset=Sentences(), compute_loss_func=label_loss).train()
    assert_same_weights(model, train_manually(per_label=0.0)[0])
    assert any("never trained" in str(one.message) for one in recwarn)


def test_trainer_evaluates_and_saves_the_users_model(tmp_path: Path) -> None:
    model = bert()
    recorded = {}

    def metrics(given: Any) -> dict[str, float]:
        recorded["predictions"] = given.predictions
        return {}

    with add_attention_loss(model, target_word_loss, LAYOUT, only=["target"]):
        trainer = Supervised(
            model,
            training_arguments(tmp_path, 8),
            train_dataset=Sentences(),
            eval_dataset=Sentences(),
            compute_metrics=metrics,
        )
        found = trainer.evaluate()
        trainer.save_model(str(tmp_path / "kept"))
    _, [(task, attention)] = train_manually(steps=1)
    assert found["eval_loss"] == pytest.approx(task, rel=1e-4)  # selects the best checkpoint
    assert found["eval_attention_loss"] == pytest.approx(attention, rel=1e-4)
    assert recorded["predictions"].shape == (8, 3)  # only the logits
    again = BertForSequenceClassification.from_pretrained(tmp_path / "kept")
    assert_same_weights(again, model)


def test_evaluation_without_targets_reports_only_the_task_loss(tmp_path: Path) -> None:
    model = bert()
    unsupervised = [{n: v for n, v in Sentences()[at].items() if n != "target"} for at in range(8)]

    def optional_loss(trace: AttentionTrace, inputs: Mapping[str, Any]) -> Loss | None:
        return target_word_loss(trace, inputs) if "target" in inputs else None

    with add_attention_loss(model, optional_loss, LAYOUT, only=["target"]):
        trainer = Supervised(model, training_arguments(tmp_path, 8), eval_dataset=unsupervised)
        found = trainer.evaluate()
        with pytest.raises(ValueError, match="no attention loss"):
            trainer.compute_loss(model.train(), full_batch_without_target())
    _, [(task, _)] = train_manually(steps=1)
    assert found["eval_loss"] == pytest.approx(task, rel=1e-4)
    assert "eval_attention_loss" not in found


def test_evaluation_losses_do_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    model = bert()
    with add_attention_loss(model, target_word_loss, LAYOUT, only=["target"]):
        args = training_arguments(tmp_path, 8, per_device_eval_batch_size=3)
        found = Supervised(model, args, eval_dataset=Sentences()).evaluate()
    _, [(task, attention)] = train_manually(steps=1)
    assert found["eval_loss"] == pytest.approx(task, rel=1e-4)
    assert found["eval_attention_loss"] == pytest.approx(attention, rel=1e-4)


def test_a_plain_trainer_evaluates_only_the_task_loss(tmp_path: Path) -> None:
    model = bert()
    with add_attention_loss(model, target_word_loss, LAYOUT, only=["target"]):
        args = training_arguments(tmp_path, 8, prediction_loss_only=True)
        trainer = Trainer(model, args, eval_dataset=Sentences(), compute_loss_func=compute_loss)
        found = trainer.evaluate()
    _, [(task, _)] = train_manually(steps=1)
    assert found["eval_loss"] == pytest.approx(task, rel=1e-4)


def test_heads_selects_the_captured_heads() -> None:
    model, batch = bert().eval(), full_batch()
    shapes = []

    def loss(trace: AttentionTrace, _: Any) -> Loss:
        shapes.append(tuple(trace.map().shape[1:3]))
        return target_word_loss(trace, batch)

    with add_attention_loss(model, loss, LAYOUT, layers=[-1], heads=[1], only=["target"]):
        model(**batch)
    assert shapes == [(1, 1)]


def test_the_best_checkpoint_has_the_lowest_task_loss(tmp_path: Path) -> None:
    """The attention loss does not take part in the choice of the best checkpoint."""
    model = bert()
    args = training_arguments(
        tmp_path, 8, eval_strategy="steps", eval_steps=1, save_steps=1,
        save_strategy="steps",
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False,
    )  # fmt: skip
    with add_attention_loss(model, target_word_loss, LAYOUT, only=["target"]):
        trainer = Supervised(model, args, train_dataset=Sentences(), eval_dataset=Sentences())
        trainer.train()
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert trainer.state.best_metric == min(losses)
    _, steps = train_manually(steps=2)
    assert losses[0] == pytest.approx(steps[1][0], rel=1e-3)


class CountsAll(AttentionLossMixin, Trainer):
    """Does not count supervised rows: all labels are counted."""


def test_a_trainer_without_a_row_count_raises(tmp_path: Path) -> None:
    model = bert()
    with (
        add_attention_loss(model, target_word_loss, LAYOUT, only=["target"]),
        pytest.raises(ValueError, match=r"3 row.*8.*CountsAll"),
    ):
        CountsAll(model, training_arguments(tmp_path, 4), train_dataset=Sentences()).train()


def test_a_batch_level_loss_raises() -> None:
    model = bert()

    def batch_level_loss(trace: AttentionTrace, inputs: Mapping[str, Any]) -> Loss:
        return replace(target_word_loss(trace, inputs), batch_level=True)

    with (
        add_attention_loss(model, batch_level_loss, LAYOUT, only=["target"]),
        pytest.raises(ValueError, match="batch-level"),
    ):
        model(**full_batch())


# --- the loss inside the model --------------------------------------------------------------


@pytest.mark.parametrize("adds", [False, True])
def test_an_attention_loss_that_is_never_trained_warns(
    adds: bool, recwarn: pytest.WarningsRecorder
) -> None:
    model, batch = bert().train(), full_batch()
    with add_attention_loss(model, target_word_loss, LAYOUT, only=["target"]):
        output = model(**batch)
        (output.loss + adds * output.attention_loss if adds else output.loss).backward()
    found = [str(one.message) for one in recwarn if "never trained" in str(one.message)]
    assert len(found) == (0 if adds else 1)
    assert adds or "AttentionLossMixin" in found[0]


def test_an_attention_loss_that_is_only_computed_does_not_warn(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model = bert()
    with add_attention_loss(model, target_word_loss, LAYOUT, only=["target"]):
        model(**full_batch())
    assert not [one for one in recwarn if "never trained" in str(one.message)]


def test_an_attention_loss_that_is_a_tensor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users

    def tensor_loss(trace: AttentionTrace, inputs: Any) -> Any:
        return trace.map().weights.sum()

    model = bert()
    message = r"Loss\(.*Tensor"
    with add_attention_loss(model, tensor_loss), pytest.raises(TypeError, match=message):
        model(**full_batch_without_target())


def test_heads_per_layer_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    model, heads = bert(), {0: [1]}
    message = r"trace\.layer\(4\)"
    context = add_attention_loss(model, target_word_loss, heads=heads)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=message), context:
        model(**full_batch_without_target())


def test_the_model_is_restored_on_exit_and_after_an_error() -> None:
    model, batch = bert(), full_batch()
    target = batch.pop("target")
    before = dict(vars(model))
    plain = model(**batch)
    with add_attention_loss(model, target_word_loss, LAYOUT, only=["target"]) as inside:
        assert inside is model
        output = model(**batch, target=target)
        assert isinstance(output, type(plain)) and torch.equal(output.logits, plain.logits)
        assert output["attention_rows"] == 3 and output.attention_loss.requires_grad
        assert model(batch["input_ids"], target=target).loss is None  # positional arguments
    with (
        pytest.raises(KeyError, match="target"),
        add_attention_loss(model, target_word_loss, LAYOUT),
    ):
        model(**batch)
    assert dict(vars(model)) == before
    assert "attention_loss" not in model(**batch)
    assert not any(len(module._forward_hooks) for module in model.modules())


def test_a_tuple_output_or_an_output_without_attention_loss_raises() -> None:
    batch = full_batch()
    model = bert()
    with (
        add_attention_loss(model, target_word_loss, LAYOUT, only=["target"]),
        pytest.raises(ValueError, match="got a tuple"),
    ):
        model(**batch, return_dict=False)
    with pytest.raises(ValueError, match="add_attention_loss"):
        compute_loss(model(**full_batch_without_target()), batch["labels"])


def full_batch_without_target() -> dict[str, Tensor]:
    batch = full_batch()
    del batch["target"]
    return batch


# --- gradient flow ------------------------------------------------------------------------


def model_and_loss() -> tuple[nn.Module, Loss]:
    model = wrap(bert(), layout=LAYOUT, loss=target_word_loss)
    return model, model(full_batch()).loss


def test_check_gradient_flow_returns_parameters_without_gradient() -> None:
    model, loss = model_and_loss()
    without_gradient = check_gradient_flow(model, loss)
    last = "model.bert.encoder.layer.1"
    assert {"model.classifier.weight", f"{last}.attention.self.value.weight"} <= set(
        without_gradient
    )
    assert f"{last}.attention.self.query.weight" not in without_gradient
    assert "model.bert.embeddings.word_embeddings.weight" not in without_gradient
    assert check_gradient_flow(model, loss) == without_gradient  # the graph is kept
    assert all(parameter.grad is None for parameter in model.parameters())
    (loss.mean() * 0.5).backward()
    reached = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == {n for n, _ in model.named_parameters()} - set(without_gradient)


def test_a_loss_without_gradient_or_rows_raises() -> None:
    model, loss = model_and_loss()
    with pytest.raises(ValueError, match="no gradient"):
        check_gradient_flow(model, loss.total.detach())
    with pytest.raises(ValueError, match=r"none of the \d+"):
        check_gradient_flow(copy.deepcopy(model), loss)
    with pytest.raises(ValueError, match="no row"):
        check_gradient_flow(model, Loss(loss.total, torch.tensor(0)))
    with pytest.raises(ValueError, match="frozen"):
        check_gradient_flow(copy.deepcopy(model).requires_grad_(False), loss)


def test_distributed_mean_of_one_process_is_the_mean_of_the_loss() -> None:
    loss = Loss(torch.tensor(6.0), torch.tensor(3), weight=0.5)
    assert distributed_mean(loss) == 1.0
    assert distributed_mean(Loss(torch.tensor(0.0), torch.tensor(0))) == 0.0


# --- the example in the documentation -------------------------------------------------------


class StandIn(nn.Module):
    """The part of a LightningModule that the example uses."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, float] = {}

    def log(self, name: str, value: Tensor) -> None:
        self.logged[name] = value.item()


def test_the_lightning_example_trains() -> None:
    """Lightning is not a dependency: the example on the page runs with a stand-in here."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "training-attention.md").read_text()
    first = page.split("```python\n")[1].split("```")[0]
    example = page.split("## Lightning")[1].split("```text\n")[1].split("```")[0]
    names: dict[str, Any] = {"lightning": SimpleNamespace(LightningModule=StandIn)}
    exec(first, names)  # noqa: S102
    exec(example, names)  # noqa: S102
    module = names["AttentionModule"](names["bert"]())
    optimizer = module.configure_optimizers()
    recorded = []
    for step in range(10):
        optimizer.zero_grad()
        module.training_step(names["batch"], step).backward()
        optimizer.step()
        recorded.append(module.logged["attention_loss"])
    assert recorded[-1] < recorded[0]
    assert check_gradient_flow(module, module.model(names["batch"]).loss)


def test_label_loss_of_a_causal_model_equals_the_loss_of_the_model() -> None:
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
def test_labels_that_are_not_class_numbers_raise_with_their_dtype(shape: tuple[int, ...]) -> None:
    outputs = {"logits": torch.randn(4, 2), "attention_loss": torch.tensor(0.0)}
    for function in (label_loss, compute_loss):
        with pytest.raises(ValueError, match="torch.float32"):
            function(outputs, torch.rand(shape))


def test_a_deepcopy_in_the_context_is_the_plain_model() -> None:
    """As for an average of weights or a teacher: separate weights and no attention loss."""
    model, batch = bert("sdpa").eval(), full_batch()
    target = batch.pop("target")
    with add_attention_loss(model, target_word_loss, LAYOUT, only=("target",)):
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
        assert (one(**batch).logits == 3).all(), "the copy has separate weights"
    assert "attention_loss" in inside and torch.equal(inside.logits, plain.logits)


def test_a_custom_forward_is_copied_with_its_model() -> None:
    model, batch = bert("sdpa").eval(), full_batch()
    batch.pop("target")
    plain = model.forward
    model.forward = plain  # set as an instance attribute, as wrappers do
    with add_attention_loss(model, target_word_loss, LAYOUT):
        other = copy.deepcopy(model)
    assert model.forward is plain
    with torch.no_grad():
        other.classifier.weight.zero_()
        other.classifier.bias.fill_(3.0)
    assert (other(**batch).logits == 3).all() and not (model(**batch).logits == 3).any()


def test_the_forward_signature_does_not_change_in_the_context() -> None:
    import inspect

    model = bert("sdpa")
    before = inspect.signature(model.forward)
    with add_attention_loss(model, target_word_loss, LAYOUT):
        assert inspect.signature(model.forward) == before
