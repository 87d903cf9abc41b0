"""Wrapped third-party models: contract, maps, losses inside the forward pass, saving."""

import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from overt import metrics
from overt.attention import AttentionMap, Kind, grid, words
from overt.capture.trace import AttentionTrace
from overt.data.batch import Batch
from overt.errors import UserError
from overt.experiments.evaluate import Evaluator
from overt.losses import Loss, classification, cross_entropy
from overt.nn.output import AttentionModel
from overt.nn.wrappers.map_selection import all_layers
from overt.nn.wrappers.wrapped_model import SupervisedOutput, WrappedModel, tie_gradient, wrap
from overt.testing import CHECKS, check_model, toy_batch
from overt.train import FitConfig, ParameterSet, Progress, fit
from tests.nn import tiny


@pytest.mark.long
@pytest.mark.parametrize("how", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [tiny.wrapped_vit, tiny.wrapped_bert])
def test_wrapped_models_pass_check_model(make: Any, how: str) -> None:
    """All checks of overt.testing, for fused and for eager attention."""
    assert len(check_model(lambda: make(how), toy_batch())) == len(CHECKS) == 19
    assert isinstance(make(how), AttentionModel)


def test_model_with_all_layers_passes_check_model() -> None:
    assert check_model(lambda: tiny.wrapped_vit(reduce=all_layers), toy_batch())


def test_maps_equal_the_weights_of_the_model() -> None:
    batch, model = toy_batch(), tiny.wrapped_vit("eager").eval()
    output = model(batch)
    pixels = tiny.pixels(batch)
    own = model.model(pixels, output_attentions=True)
    row = own.attentions[-1][:, :, 0, 1:]  # from the class token to the patches
    row = row / row.sum(dim=-1, keepdim=True)
    found = output.attention_to("image")
    assert found.values.shape == (4, 1, 2, 1, 16) and found.kind is Kind.PROBABILITY
    torch.testing.assert_close(found.weights[:, 0, :, 0], row)
    torch.testing.assert_close(output.prediction, own.logits)
    assert found.keys.find("image").geometry is not None


def test_wrapping_keeps_the_parameters() -> None:
    model = tiny.vit()
    adopted = wrap(model)
    assert adopted.model is model
    assert [*adopted.parameters()] == [*model.parameters()]


def test_layers_heads_and_reduce_select_the_maps() -> None:
    batch = toy_batch()
    whole = tiny.wrapped_vit(reduce=all_layers).eval()(batch).attention[0]
    assert whole.values.shape == (4, 2, 2, 1, 16)
    first = tiny.wrapped_vit(layers=[0], heads=[1]).eval()(batch).attention[0]
    torch.testing.assert_close(first.weights, whole.weights[:, :1, 1:])
    mine = tiny.wrapped_vit(reduce=lambda trace: trace.map(0).over_heads()).eval()(batch)
    assert mine.attention[0].values.shape == (4, 1, 1, 17, 17)


def test_batch_may_be_given_as_keywords() -> None:
    """Third-party loops pass names and tensors, including some the model does not take."""
    batch, model = toy_batch(), tiny.wrapped_bert().eval()
    given = {"input_ids": batch.tokens, "attention_mask": batch.token_mask.long()}
    model = wrap(model.model, layout=words(6)).eval()
    one, two = model(given), model(**given, labels=batch.labels, target=torch.zeros(4))
    assert torch.equal(one.prediction, two.prediction)
    assert torch.equal(one.attention[0].values, two.attention[0].values)


class Pooled(nn.Module):
    """`nn.MultiheadAttention` over feature rows, then their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.answer = nn.Linear(8, 3)

    def forward(self, rows: Tensor, absent: Tensor) -> Tensor:
        found, _ = self.attend(rows, rows, rows, key_padding_mask=absent, need_weights=False)
        there = ~absent[..., None]
        return self.answer((found * there).sum(dim=1) / there.sum(dim=1))


def test_custom_model_is_run_by_the_call_function() -> None:
    """Without a layout keys are positions; without a class token queries are averaged."""
    torch.manual_seed(0)
    rows = torch.randn(3, 5, 8)
    absent = torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    batch = Batch(("a", "b", "c"), features=rows, region_mask=~absent)

    def call(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.features, ~batch.region_mask)

    inner = Pooled().eval()
    output = wrap(inner, call)(batch)
    torch.testing.assert_close(output.prediction, inner(rows, absent))
    _, weights = inner.attend(rows, rows, rows, key_padding_mask=absent, average_attn_weights=False)
    for sample, count in enumerate((5, 3, 4)):
        expected = weights[sample, :, :count].mean(dim=1)  # padding is not a query
        found = output.attention_to("positions").weights[sample, 0, :, 0]
        torch.testing.assert_close(found, expected)
    assert len(check_model(lambda: wrap(Pooled(), call), batch)) == 19


def test_call_may_return_the_model_output_or_logits() -> None:
    net = tiny.vit()
    whole = wrap(net, call=lambda model, batch: model(batch.images.float()))
    logits = wrap(net, call=lambda model, batch: model(batch.images.float()).logits)
    assert torch.equal(whole(toy_batch()).prediction, logits(toy_batch()).prediction)
    pair = wrap(net, call=lambda model, batch: (model(batch.images.float()).logits, None))
    with pytest.raises(ValueError, match=r"tuple.*logits.*pooler_output"):
        pair(toy_batch())


def test_custom_remove_function_changes_the_batch() -> None:
    batch = toy_batch()

    def remove(batch: Batch, mask: Any) -> Batch:
        kept = mask["image"].reshape(-1, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3)
        images = batch.images[batch.image_index] * kept
        return replace(batch, images=images.to(torch.uint8), image_of=None, geometry=None)

    model = tiny.wrapped_vit(remove=remove).eval()
    mask = {"image": torch.zeros(4, 16)}
    black = replace(batch, images=torch.zeros_like(batch.images))
    found = model.decide(model.encode(batch), mask)
    torch.testing.assert_close(found.prediction, model(black).prediction)


def test_metrics_work_on_wrapped_models() -> None:
    batch, model = toy_batch(), tiny.wrapped_vit().eval()
    features = model.encode(batch)
    looked = model.decide(features).attention_to("image").over_heads()
    generator = torch.Generator().manual_seed(0)
    contrast = metrics.contrast_removal(
        lambda keep: model.decide(features, {"image": keep}).prediction, looked, None, generator
    )
    assert contrast.beyond_random.isfinite().all()
    assert metrics.entropy(looked).isfinite().all()


class Toys:
    """The toy batch as a dataset."""

    name, split = "toys", "test"

    def __init__(self, whole: Batch) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(self.whole)

    def batch(self, indices: Any) -> Batch:
        return self.whole.select(torch.tensor(list(indices)))

    def digest(self) -> str:
        return "toys 1"


@pytest.mark.parametrize("make", [tiny.vit, tiny.bert])
def test_evaluator_reports_metrics_and_gallery_of_wrapped_models(make: Any) -> None:
    """The report has metrics and a gallery with maps over cells or words."""
    model = wrap(make(), processor=tiny.TinyProcessor()).eval()
    batch = toy_batch()
    if make is tiny.bert:
        batch = replace(batch, images=None, image_of=None, geometry=None)
    with torch.no_grad():
        found = Evaluator(Toys(batch), ("one", "two", "three")).evaluate(model, torch.device("cpu"))
    assert {"accuracy", "deletion", "entropy"} <= set(found.ours)
    shown = found.gallery[1]
    if make is tiny.vit:
        assert shown.cells.shape == (4, 4) and shown.cells.sum() == pytest.approx(1, abs=1e-5)
    else:
        assert shown.word_weights.shape == (5,)
        assert shown.word_weights.sum() == pytest.approx(1, abs=1e-5)


# --- losses inside --------------------------------------------------------------------------


def left_loss(trace: AttentionTrace, batch: Batch) -> Loss:
    target = torch.zeros(len(batch), 16)
    target[:, ::4] = 1
    looked = AttentionTrace([trace.calls[-1]], trace.layout).log_block("class", "image")
    return cross_entropy(looked, AttentionMap.from_cells(target, grid(4, 4)).normalize())


def test_fit_trains_a_wrapped_model_with_its_loss(tmp_path: Path) -> None:
    batch = toy_batch()
    model = tiny.wrapped_vit(loss=left_loss)

    def step(model: nn.Module, batch: Batch, progress: Progress) -> Any:
        output = model(batch)
        task = classification(output.prediction, batch.labels)
        return {"model": {"task": task, "attention": output.loss}}

    before = model(batch).loss.mean()
    sets = {"model": ParameterSet(torch.optim.Adam(model.parameters(), lr=0.01))}
    limits = FitConfig(epochs=30, batch=4)
    fit(model, Toys(batch), step, sets, limits, out=tmp_path, seed=0, device="cpu")
    assert model(batch).loss.mean() < 0.7 * before
    assert '"attention"' in (tmp_path / "log.jsonl").read_text()


def test_loss_inside_the_model_equals_the_loss_outside() -> None:
    batch = toy_batch()
    inside, outside = tiny.wrapped_vit(loss=left_loss), tiny.wrapped_vit()
    output = inside(batch)
    assert isinstance(output, SupervisedOutput)
    output.loss.mean().backward()
    target = torch.zeros(4, 16)
    target[:, ::4] = 1
    wanted = AttentionMap.from_cells(target, grid(4, 4)).normalize()
    loss = cross_entropy(outside(batch).attention_to("image"), wanted)
    loss.mean().backward()
    torch.testing.assert_close(output.loss.total, loss.total)
    for one, two in zip(inside.parameters(), outside.parameters(), strict=True):
        expected = torch.zeros_like(one) if two.grad is None else two.grad
        torch.testing.assert_close(one.grad, expected)


def test_loss_function_may_return_none() -> None:
    output = tiny.wrapped_vit(loss=lambda seen, batch: None)(toy_batch())
    assert isinstance(output, SupervisedOutput) and output.loss is None
    leaves, shape = _pytree.tree_flatten(output)
    assert _pytree.tree_unflatten(leaves, shape).loss is None


def test_tie_gradient_changes_neither_values_nor_gradients() -> None:
    x, y = torch.tensor(2.0, requires_grad=True), torch.tensor([torch.inf], requires_grad=True)
    tied = tie_gradient(x * 3, y * 1)
    assert tied == 6
    tied.backward()
    assert x.grad == 3 and y.grad == 0


def test_outputs_are_pytrees_with_all_tensors() -> None:
    """`fully_shard` of older PyTorch finds tensors this way and silently misses others."""
    output = tiny.wrapped_vit(loss=left_loss)(toy_batch())
    leaves, shape = _pytree.tree_flatten(output)
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    wanted = (output.prediction, output.attention[0].values, output.loss.total, output.loss.count)
    assert all(any(one is tensor for tensor in tensors) for one in wanted)
    again = _pytree.tree_unflatten(leaves, shape)
    assert isinstance(again, SupervisedOutput) and again.loss.total is output.loss.total
    assert again.attention[0].keys is output.attention[0].keys
    assert again.loss.weight == output.loss.weight


@pytest.mark.long
def test_compiled_model_can_be_wrapped() -> None:
    """In a separate process, because the shape checks of the tests do not compile."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.nn.compare_compiled"],
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_activation_checkpointing_changes_no_gradient() -> None:
    batch, plain, saving = toy_batch(), tiny.vit(), tiny.vit()
    saving.gradient_checkpointing_enable({"use_reentrant": False})
    found = []
    for model in (plain, saving):
        adopted = wrap(
            model.train(), layout=tiny.image_layout, processor=tiny.TinyProcessor(), loss=left_loss
        )
        mask = {"image": torch.ones(4, 16)}
        mask["image"][:, :3] = 0
        output = adopted.decide(adopted.encode(batch), mask)
        (output.loss.mean() + output.prediction.sum()).backward()
        found.append([one.grad for one in model.parameters()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


# --- errors ---------------------------------------------------------------------------------


class DistributedDataParallel(nn.Module):
    """A stand-in for the wrapper of that name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_tensor_is_the_first_argument_of_the_model() -> None:
    batch = tiny.pixels(toy_batch())
    model = wrap(tiny.vit(), layout=words(17)).eval()
    expected = model({"pixel_values": batch})
    output = model(batch)
    torch.testing.assert_close(output.prediction, expected.prediction)
    torch.testing.assert_close(output.attention[0].weights, expected.attention[0].weights)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: wrap(DistributedDataParallel(tiny.vit())),
            "bare model",
        ),
        (lambda: wrap(nn.DataParallel(tiny.vit())), "DataParallel .*copies"),
        (lambda: wrap(tiny.vit())(toy_batch()), "uint8"),
        (lambda: wrap(tiny.vit())([1.0]), "got list"),
        (
            lambda: wrap(tiny.vit(), layout=words(9), processor=tiny.TinyProcessor())(toy_batch()),
            r"\(9, 9\)",
        ),
        (
            lambda: tiny.wrapped_vit(reduce=lambda trace: trace.map(-1).select(torch.arange(3)))(
                toy_batch()
            ),
            r"3 rows .* 4",
        ),
    ],
)
def test_unsupported_models_and_inputs_raise(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_forward_gives_no_warnings_and_removes_hooks() -> None:
    model = tiny.wrapped_vit(loss=left_loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(toy_batch())
    assert isinstance(model, WrappedModel)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_bad_arguments_of_wrap_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(TypeError, match=r"nn\.Module.*got str"):
        wrap("model")  # type: ignore[arg-type]
    summed = wrap(tiny.vit(), call=lambda model, batch: model(**batch).logits.sum())
    with pytest.raises(ValueError, match="scalar"):
        summed({"pixel_values": tiny.pixels(toy_batch())})


def test_user_functions_get_one_image_per_sample() -> None:
    """With several questions per image, call, layout, remove and loss need no image_of."""
    shared = toy_batch()
    assert len(shared.images) == 3
    recorded: list[tuple[str, int]] = []

    def note(name: str, batch: Batch) -> Batch:
        recorded.append((name, len(batch.images)))
        assert batch.image_of is None
        return batch

    def call(model: nn.Module, batch: Batch) -> Tensor:
        return model(tiny.pixels(note("call", batch))).logits

    def remove(batch: Batch, mask: Any) -> Batch:
        note("remove", batch)
        cells = mask["image"].reshape(-1, 1, 4, 4)
        kept = torch.nn.functional.interpolate(cells, batch.images.shape[-2:])
        return replace(batch, images=(batch.images * kept).to(batch.images.dtype))

    def loss(trace: AttentionTrace, batch: Batch) -> None:
        note("loss", batch)

    model = wrap(tiny.vit(), call=call, remove=remove, loss=loss).eval()
    features = model.encode(shared)
    keep = torch.ones(4, 16)
    keep[0, :8] = 0
    output = model.decide(features, {"image": keep})
    assert output.prediction.shape[0] == 4 and {count for _, count in recorded} == {4}
    assert {name for name, _ in recorded} == {"call", "remove", "loss"}
    own = wrap(tiny.vit(), call=call).eval()
    torch.testing.assert_close(own(shared).prediction, own(shared.with_own_images()).prediction)


# --- saving


def test_saved_wrapped_model_gives_equal_outputs(tmp_path: Path) -> None:
    from transformers import ViTForImageClassification, ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3])
    batch = {"pixel_values": torch.rand(2, 3, 32, 32)}
    model = wrap(tiny.vit(), processor=processor).eval()
    model.save_pretrained(tmp_path / "kept")
    theirs = ViTForImageClassification.from_pretrained(tmp_path / "kept").eval()
    expected = model(batch)
    torch.testing.assert_close(theirs(**batch).logits, expected.prediction)
    kept = ViTImageProcessor.from_pretrained(tmp_path / "kept")
    assert list(kept.image_mean) == [0.1, 0.2, 0.3]
    again = WrappedModel.from_pretrained(tmp_path / "kept", processor=processor)
    assert not again.training
    found = again(batch)
    assert torch.equal(found.prediction, expected.prediction)
    assert torch.equal(found.attention[0].weights, expected.attention[0].weights)


def test_custom_module_must_be_passed_to_from_pretrained(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.look = nn.MultiheadAttention(4, 1, batch_first=True)

        def forward(self, states: Tensor) -> Tensor:
            return self.look(states, states, states)[0][:, 0]

    def call(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["states"])

    batch = {"states": torch.rand(2, 3, 4)}
    model = wrap(Net(), call).eval()
    model.save_pretrained(tmp_path / "kept")
    again = WrappedModel.from_pretrained(tmp_path / "kept", Net(), call=call)
    assert torch.equal(again(batch).prediction, model(batch).prediction)
    other = wrap(Net(), call).eval().load_pretrained(tmp_path / "kept")
    assert torch.equal(other(batch).prediction, model(batch).prediction)
    with pytest.raises(UserError, match="custom"):
        WrappedModel.from_pretrained(tmp_path / "kept", call=call)


def test_sum_of_two_losses_raises_with_the_way_to_combine_them():
    model, batch = tiny.wrapped_bert("sdpa").eval(), toy_batch()
    one = Loss(torch.tensor(4.0), torch.tensor(2))
    model.loss = lambda trace, batch: one + one
    with pytest.raises(TypeError, match=r"Tensor.*a\.count"):
        model(batch)
    model.loss = lambda trace, batch: Loss(0.5 * one.total + 0.5 * one.total, one.count)
    assert model(batch).loss.item() == 2.0
