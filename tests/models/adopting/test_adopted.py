"""Models of others adopted: they keep our contract, show their own weights, and learn inside."""

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

from overt import measure
from overt.attention import AttentionMap, Kind, grid, words
from overt.capture.seen import Seen
from overt.data.batch import Batch
from overt.models.adopting.adopted import Adopted, Supervised, adopt, tie
from overt.models.adopting.looking import every
from overt.models.output import Model
from overt.recipes.evaluation import Judge
from overt.supervise import Loss, classification, cross_entropy
from overt.testing import CHECKS, check_model, toy_batch
from overt.train import Limits, ParameterSet, Progress, fit
from tests.models import tiny


@pytest.mark.parametrize("how", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [tiny.adopted_vit, tiny.adopted_bert])
def test_adopted_models_keep_the_contract(make: Any, how: str) -> None:
    """All checks of overt.testing, for fused attention and for softmax written out."""
    assert len(check_model(lambda: make(how), toy_batch())) == len(CHECKS) == 19
    assert isinstance(make(how), Model)


def test_every_layer_keeps_the_contract() -> None:
    assert check_model(lambda: tiny.adopted_vit(reduce=every), toy_batch())


def test_the_maps_are_the_models_own_weights() -> None:
    batch, model = toy_batch(), tiny.adopted_vit("eager").eval()
    output = model(batch)
    pixels = tiny.pixels(batch)
    own = model.model(pixels, output_attentions=True)
    row = own.attentions[-1][:, :, 0, 1:]  # from the class token to the patches
    row = row / row.sum(dim=-1, keepdim=True)
    found = output.looking_at("image")
    assert found.values.shape == (4, 1, 2, 1, 16) and found.kind is Kind.PROBABILITY
    torch.testing.assert_close(found.weights[:, 0, :, 0], row)
    torch.testing.assert_close(output.prediction, own.logits)
    assert found.keys.find("image").geometry is not None


def test_the_parameters_are_the_users_own() -> None:
    model = tiny.vit()
    adopted = adopt(model)
    assert adopted.model is model
    assert [*adopted.parameters()] == [*model.parameters()]


def test_layers_heads_and_reduce_choose_what_is_shown() -> None:
    batch = toy_batch()
    whole = tiny.adopted_vit(reduce=every).eval()(batch).attention[0]
    assert whole.values.shape == (4, 2, 2, 1, 16)
    first = tiny.adopted_vit(layers=[0], heads=[1]).eval()(batch).attention[0]
    torch.testing.assert_close(first.weights, whole.weights[:, :1, 1:])
    mine = tiny.adopted_vit(reduce=lambda seen: seen.map(0).over_heads()).eval()(batch)
    assert mine.attention[0].values.shape == (4, 1, 1, 17, 17)


def test_a_batch_may_be_keywords() -> None:
    """What loops of others pass: names and tensors, among them some that are not the model's."""
    batch, model = toy_batch(), tiny.adopted_bert().eval()
    given = {"input_ids": batch.tokens, "attention_mask": batch.token_mask.long()}
    model = adopt(model.model, layout=words(6)).eval()
    one, two = model(given), model(**given, labels=batch.labels, target=torch.zeros(4))
    assert torch.equal(one.prediction, two.prediction)
    assert torch.equal(one.attention[0].values, two.attention[0].values)


class Pooled(nn.Module):
    """Attention of PyTorch's own over rows of numbers, then their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.answer = nn.Linear(8, 3)

    def forward(self, rows: Tensor, absent: Tensor) -> Tensor:
        found, _ = self.attend(rows, rows, rows, key_padding_mask=absent, need_weights=False)
        there = ~absent[..., None]
        return self.answer((found * there).sum(dim=1) / there.sum(dim=1))


def test_a_model_of_any_make_is_called_by_call() -> None:
    """Without a layout, keys are positions; without a class token, the mean over the queries."""
    torch.manual_seed(0)
    rows = torch.randn(3, 5, 8)
    absent = torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    batch = Batch(("a", "b", "c"), features=rows, region_mask=~absent)

    def call(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch.features, ~batch.region_mask)

    inner = Pooled().eval()
    output = adopt(inner, call)(batch)
    torch.testing.assert_close(output.prediction, inner(rows, absent))
    _, weights = inner.attend(rows, rows, rows, key_padding_mask=absent, average_attn_weights=False)
    for sample, count in enumerate((5, 3, 4)):
        expected = weights[sample, :, :count].mean(dim=1)  # padding does not look
        found = output.looking_at("positions").weights[sample, 0, :, 0]
        torch.testing.assert_close(found, expected)
    assert len(check_model(lambda: adopt(Pooled(), call), batch)) == 19


def test_a_mask_of_the_users_own_takes_things_out_of_the_batch() -> None:
    batch = toy_batch()

    def remove(batch: Batch, mask: Any) -> Batch:
        kept = mask["image"].reshape(-1, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3)
        images = batch.images[batch.image_index] * kept
        return replace(batch, images=images.to(torch.uint8), image_of=None, geometry=None)

    model = tiny.adopted_vit(remove=remove).eval()
    mask = {"image": torch.zeros(4, 16)}
    black = replace(batch, images=torch.zeros_like(batch.images))
    found = model.decide(model.encode(batch), mask)
    torch.testing.assert_close(found.prediction, model(black).prediction)


def test_measures_work_on_adopted_models() -> None:
    batch, model = toy_batch(), tiny.adopted_vit().eval()
    features = model.encode(batch)
    looked = model.decide(features).looking_at("image").over_heads()
    generator = torch.Generator().manual_seed(0)
    contrast = measure.contrast(
        lambda keep: model.decide(features, {"image": keep}).prediction, looked, None, generator
    )
    assert contrast.beyond_random.isfinite().all()
    assert measure.entropy(looked).isfinite().all()


class Toys:
    """The toy batch as a data set."""

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
def test_runs_judge_and_show_adopted_models(make: Any) -> None:
    """What a report holds: the measures, and a gallery with the map over cells or words."""
    model = adopt(make(), processor=tiny.Bytes()).eval()
    batch = toy_batch()
    if make is tiny.bert:
        batch = replace(batch, images=None, image_of=None, geometry=None)
    with torch.no_grad():
        found = Judge(Toys(batch), ("one", "two", "three")).evaluate(model, torch.device("cpu"))
    assert {"accuracy", "deletion", "entropy"} <= set(found.ours)
    shown = found.gallery[1]
    if make is tiny.vit:
        assert shown.cells.shape == (4, 4) and shown.cells.sum() == pytest.approx(1, abs=1e-5)
    else:
        assert shown.word_weights.shape == (5,)
        assert shown.word_weights.sum() == pytest.approx(1, abs=1e-5)


# --- losses inside --------------------------------------------------------------------------


def look_left(seen: Seen, batch: Batch) -> Loss:
    target = torch.zeros(len(batch), 16)
    target[:, ::4] = 1
    looked = Seen([seen.calls[-1]], seen.layout).log_block("class", "image")
    return cross_entropy(looked, AttentionMap.from_cells(target, grid(4, 4)).normalize())


def test_fit_trains_an_adopted_model_by_its_own_loss(tmp_path: Path) -> None:
    batch = toy_batch()
    model = tiny.adopted_vit(loss=look_left)

    def step(model: nn.Module, batch: Batch, progress: Progress) -> Any:
        output = model(batch)
        task = classification(output.prediction, batch.labels)
        return {"model": {"task": task, "attention": output.loss}}

    before = model(batch).loss.mean()
    sets = {"model": ParameterSet(torch.optim.Adam(model.parameters(), lr=0.01))}
    limits = Limits(epochs=30, batch=4)
    fit(model, Toys(batch), step, sets, limits, out=tmp_path, seed=0, device="cpu")
    assert model(batch).loss.mean() < 0.7 * before
    assert '"attention"' in (tmp_path / "log.jsonl").read_text()


def test_the_loss_inside_is_the_loss_outside() -> None:
    batch = toy_batch()
    inside, outside = tiny.adopted_vit(loss=look_left), tiny.adopted_vit()
    output = inside(batch)
    assert isinstance(output, Supervised)
    output.loss.mean().backward()
    target = torch.zeros(4, 16)
    target[:, ::4] = 1
    wanted = AttentionMap.from_cells(target, grid(4, 4)).normalize()
    loss = cross_entropy(outside(batch).looking_at("image"), wanted)
    loss.mean().backward()
    torch.testing.assert_close(output.loss.total, loss.total)
    for one, two in zip(inside.parameters(), outside.parameters(), strict=True):
        expected = torch.zeros_like(one) if two.grad is None else two.grad
        torch.testing.assert_close(one.grad, expected)


def test_a_batch_without_a_target_has_no_loss() -> None:
    output = tiny.adopted_vit(loss=lambda seen, batch: None)(toy_batch())
    assert isinstance(output, Supervised) and output.loss is None
    leaves, shape = _pytree.tree_flatten(output)
    assert _pytree.tree_unflatten(leaves, shape).loss is None


def test_a_tie_adds_zeros_and_nothing_else() -> None:
    x, y = torch.tensor(2.0, requires_grad=True), torch.tensor([torch.inf], requires_grad=True)
    tied = tie(x * 3, y * 1)
    assert tied == 6
    tied.backward()
    assert x.grad == 3 and y.grad == 0


def test_wrappers_find_every_tensor_of_an_output() -> None:
    """`fully_shard` of older PyTorch looks for them in this way, and misses them in silence."""
    output = tiny.adopted_vit(loss=look_left)(toy_batch())
    leaves, shape = _pytree.tree_flatten(output)
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    wanted = (output.prediction, output.attention[0].values, output.loss.total, output.loss.count)
    assert all(any(one is tensor for tensor in tensors) for one in wanted)
    again = _pytree.tree_unflatten(leaves, shape)
    assert isinstance(again, Supervised) and again.loss.total is output.loss.total
    assert again.attention[0].keys is output.attention[0].keys
    assert again.loss.weight == output.loss.weight


@pytest.mark.long
def test_a_compiled_model_can_be_adopted() -> None:
    """In a process of its own: the shape checks of the tests do not compile."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.compiled"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_gradient_checkpointing_changes_no_gradient() -> None:
    batch, plain, saving = toy_batch(), tiny.vit(), tiny.vit()
    saving.gradient_checkpointing_enable({"use_reentrant": False})
    found = []
    for model in (plain, saving):
        adopted = adopt(
            model.train(), layout=tiny.image_layout, processor=tiny.Bytes(), loss=look_left
        )
        mask = {"image": torch.ones(4, 16)}
        mask["image"][:, :3] = 0
        output = adopted.decide(adopted.encode(batch), mask)
        (output.loss.mean() + output.prediction.sum()).backward()
        found.append([one.grad for one in model.parameters()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


# --- refusals -------------------------------------------------------------------------------


class DistributedDataParallel(nn.Module):
    """Looks like the wrapper of that name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lambda: adopt(DistributedDataParallel(tiny.vit())),
            "adopt the bare model first, then wrap what comes out",
        ),
        (lambda: adopt(nn.DataParallel(tiny.vit())), "DataParallel runs copies"),
        (lambda: adopt(tiny.vit())(toy_batch()), "images of the batch are bytes"),
        (lambda: adopt(tiny.vit())(torch.zeros(2)), "a batch that is a Tensor needs"),
        (
            lambda: adopt(tiny.vit(), layout=words(9), processor=tiny.Bytes())(toy_batch()),
            "the layout has 9 queries and 9 keys",
        ),
        (
            lambda: tiny.adopted_vit(reduce=lambda seen: seen.map(-1).select(torch.arange(3)))(
                toy_batch()
            ),
            "a map of 3 rows for 4 samples",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_nothing_warns_and_no_hook_stays() -> None:
    model = tiny.adopted_vit(loss=look_left)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(toy_batch())
    assert isinstance(model, Adopted)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_cannot_be_adopted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)  # as for users
    with pytest.raises(TypeError, match=r"adopt takes a torch.nn.Module, .* type str"):
        adopt("model")  # type: ignore[arg-type]
    summed = adopt(tiny.vit(), call=lambda model, batch: model(**batch).logits.sum())
    with pytest.raises(ValueError, match="one number for all samples"):
        summed({"pixel_values": tiny.pixels(toy_batch())})
