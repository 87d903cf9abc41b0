"""Pruned models: parity with the plain model, gradients, traces, errors, saving."""

import copy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.attention import Kind, Layout, Span
from overt.capture import watch
from overt.capture.call import Call
from overt.capture.edits import Bias
from overt.data.batch import Batch
from overt.errors import UserError
from overt.geometry import PixelGeometry
from overt.nn.hard_attention.selection import keep_above_uniform, keep_all, keep_share, keep_top
from overt.nn.token_pruning.merge import by_states
from overt.nn.token_pruning.pruned_model import PrunedModel, merge_tokens, prune_tokens
from overt.nn.token_pruning.selection import (
    by_class_attention,
    by_grid,
    by_presence,
    by_random,
    fuse_tokens,
)
from overt.nn.wrappers.wrapped_model import wrap
from tests.nn.token_pruning.encoders import (
    IMAGES,
    MODELS,
    bert,
    inputs,
    make_model,
    predict,
    vit,
)

HALF = partial(keep_share, share=0.5)
ADAPTIVE = partial(keep_above_uniform, temperature=3.0)


def predict_with_hidden_tokens(
    model: nn.Module, thinned: PrunedModel, given: dict[str, Tensor]
) -> Tensor:
    """Predict with all tokens, where later layers may not attend to dropped ones.

    This is equivalent for the kept tokens: a slow reference of pruning for every family.
    """
    at = {
        module: number for number, layer in enumerate(thinned.layers) for module in layer.modules()
    }

    def make(call: Call) -> Tensor | None:
        number = at.get(call.module, len(thinned.layers))  # a pooling head comes last
        gone = [one.kept.values[:, 0, 0, 0] == 0 for one in thinned.steps if one.after <= number]
        if not gone:
            return None
        return torch.zeros(gone[-1].shape).masked_fill(gone[-1], -torch.inf)[:, None, None]

    with watch(model, edit=Bias(make)):
        return predict(model, given)


# --- parity


@pytest.mark.parametrize("name", MODELS)
def test_keeping_all_tokens_equals_the_plain_model(name: str) -> None:
    model, given = make_model(name), inputs(name)
    expected = predict(model, given)
    with prune_tokens(model, (0, 1, 3), keep_all) as thinned:
        found = predict(model, given)
    if name in IMAGES:
        assert torch.equal(found, expected)
        assert len(set(thinned.lengths)) == 1
    else:  # without padding other kernels run
        torch.testing.assert_close(found, expected)
    assert torch.equal(predict(model, given), expected), "also afterwards"


@pytest.mark.parametrize("name", IMAGES)
def test_merging_no_tokens_equals_the_plain_model(name: str) -> None:
    model, given = make_model(name), inputs(name)
    expected = predict(model, given)
    with merge_tokens(model, 0):
        assert torch.equal(predict(model, given), expected)


@pytest.mark.long
@pytest.mark.parametrize("after", [(1, 3), (0, 2)])
@pytest.mark.parametrize("name", [one for one in MODELS if not one.startswith("DINOv2")])
def test_pruning_equals_hiding_the_dropped_tokens(name: str, after: tuple[int, ...]) -> None:
    model, given = make_model(name), inputs(name)
    with prune_tokens(model, after, HALF) as thinned:
        found = predict(model, given)
    assert thinned.lengths[-1] < thinned.lengths[0]
    torch.testing.assert_close(
        found, predict_with_hidden_tokens(model, thinned, given), rtol=1e-4, atol=2e-5
    )


@pytest.mark.long
@pytest.mark.parametrize("name", [one for one in MODELS if not one.startswith("DINOv2")])
def test_samples_with_different_numbers_of_tokens_are_independent(name: str) -> None:
    model, given = make_model(name), inputs(name)
    keep = ADAPTIVE if name in IMAGES else HALF  # texts have different lengths already
    with prune_tokens(model, (1, 2), keep) as thinned:
        found = predict(model, given)
        counts = thinned.kept.values.sum(-1)[:, -1].flatten()
        assert torch.equal(counts, thinned.steps[-1].count.float())
        assert len(set(counts.tolist())) > 1, "a ragged batch"
    slow = predict_with_hidden_tokens(model, thinned, given)
    with thinned:
        alone = [
            predict(model, {key: value[[row]] for key, value in given.items()})
            for row in range(len(found))
        ]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(found, slow, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_pruning_equals_running_the_layers_on_gathered_tokens(how: str) -> None:
    model, given = vit(how), inputs("ViT")
    with prune_tokens(model, (1, 3), HALF) as thinned:
        found = predict(model, given)
    body = model.vit
    states = body.embeddings(given["pixel_values"])
    for number, layer in enumerate(body.layers):
        if number in (1, 3):
            norms = states[:, 1:].norm(dim=-1)
            count = round((states.shape[1] - 1) / 2 + 0.01)
            best = norms.topk(count, dim=1).indices.sort(dim=1).values + 1
            chosen = torch.cat([torch.zeros_like(best[:, :1]), best], dim=1)
            states = torch.stack([one[at] for one, at in zip(states, chosen, strict=True)])
        states = layer(states)
    expected = model.classifier(body.layernorm(states)[:, 0])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert thinned.lengths == [37, 19, 19, 10]


def test_pytorch_encoder_layers_with_padding() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    states, lengths = torch.randn(2, 10, 16), (10, 7)
    padding = torch.arange(10) >= torch.tensor(lengths)[:, None]
    whole = model(states, src_key_padding_mask=padding)
    with prune_tokens(model, (1, 2), keep_all) as thinned:
        found = model(states, src_key_padding_mask=padding)
    torch.testing.assert_close(found[:, 0], whole[:, 0])
    assert thinned.steps[0].count.tolist() == [10, 7]
    with prune_tokens(model, (1, 2), HALF) as thinned:
        found = model(states, src_key_padding_mask=padding)
        assert thinned.steps[-1].count.tolist() == [4, 3]
        for row, length in enumerate(lengths):
            alone = model(states[[row], :length])
            torch.testing.assert_close(found[row, 0], alone[0, 0])


def test_fusing_dropped_tokens_follows_the_published_rule() -> None:
    model, given = vit(), inputs("ViT")
    with prune_tokens(model, (2,), partial(keep_top, count=9), by_class_attention, fuse_tokens):
        found = predict(model, given)
    body = model.vit
    with watch(model) as trace:
        predict(model, given)
    states = body.embeddings(given["pixel_values"])
    for number, layer in enumerate(body.layers):
        if number == 2:
            attention = trace.map(1).weights[:, 0, :, 0, 1:].mean(dim=1)
            order = attention.argsort(dim=1, descending=True)
            rows = []
            for one, weights, best in zip(states, attention, order, strict=True):
                cells, kept = one[1:], best[:9].sort().values
                rest = sum(weights[at] * cells[at] for at in best[9:])
                rows.append(torch.cat([one[:1], cells[kept], rest[None]]))
            states = torch.stack(rows)
        states = layer(states)
    expected = model.classifier(body.layernorm(states)[:, 0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_attention_to_merged_tokens_is_proportional_to_their_sizes() -> None:
    """Two equal tokens and their merged token give the same result."""
    model = vit()
    body = model.vit
    nn.init.zeros_(body.embeddings.position_embeddings)  # equal patches are then equal tokens
    column = torch.randn(3, 3, 24, 4)
    pixels = column.repeat(1, 1, 1, 6)  # each row of cells repeats one cell six times
    expected = predict(model, {"pixel_values": pixels})
    with merge_tokens(model, 9, after=(1, 2), metric=by_states) as thinned:
        found = predict(model, {"pixel_values": pixels})
    assert thinned.lengths == [37, 28, 19, 19]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_merging_works_for_every_family(name: str) -> None:
    model, given = make_model(name), inputs(name)
    with merge_tokens(model, 1) as thinned:
        assert predict(model, given).isfinite().all()
    n = thinned.lengths[0]
    assert thinned.lengths == [n, n - 1, n - 2, n - 3]
    present = thinned.kept.visible[:, 0]
    assert (thinned.kept.values[:, -1, 0, 0] == 1)[present].all(), "merged tokens count as kept"


def test_presence_scores_are_constant_after_post_layer_norm() -> None:
    """Presence scores suit pre-norm models, not post-norm ones such as BERT."""
    model, given = bert(), inputs("BERT")
    with prune_tokens(model, (2,), keep_all) as thinned:
        predict(model, given)
    scores = thinned.steps[0].scores
    assert scores is not None
    finite = scores[scores.isfinite()]
    assert finite.std() < 1e-3 * finite.mean(), (
        "an untrained layer norm gives all tokens equal norms"
    )


# --- gradients and training


def test_gradient_reaches_kept_tokens_only() -> None:
    model, given = vit(), inputs("ViT")
    states: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        states.append(output)

    handle = model.vit.embeddings.register_forward_hook(keep)
    with prune_tokens(model, (0,), HALF) as thinned:
        predict(model, given).sum().backward()
    handle.remove()
    kept = thinned.kept.values[:, 0, 0, 0] == 1
    assert states[0].grad is not None
    reached = states[0].grad.abs().sum(-1)
    assert (reached[~kept] == 0).all() and (reached[kept] > 0).all()


@pytest.mark.long
@pytest.mark.parametrize(
    "make_pruned",
    [
        lambda model: prune_tokens(model, (1, 2), HALF),
        lambda model: prune_tokens(model, (1, 2), ADAPTIVE),
        lambda model: prune_tokens(model, (1, 2), HALF, by_class_attention, fuse_tokens),
        lambda model: prune_tokens(
            model, (1, 2), HALF, by_random(torch.Generator().manual_seed(0))
        ),
        lambda model: prune_tokens(model, (1, 2), HALF, by_grid),
        lambda model: merge_tokens(model, 4),
    ],
)
def test_pruned_model_trains(make_pruned: Callable[[nn.Module], PrunedModel]) -> None:
    model, given = vit(initializer_range=0.05).train(), inputs("ViT", 4)
    labels = torch.tensor([0, 1, 2, 0])
    steps = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    with make_pruned(model):
        for _ in range(8):
            loss = model(**given, labels=labels).loss
            steps.zero_grad()
            loss.backward()
            steps.step()
            losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(one.grad is None or one.grad.isfinite().all() for one in model.parameters())


def test_autocast_predictions_are_close() -> None:
    model, given = vit(), inputs("ViT")
    for make_pruned in (
        prune_tokens(model, (1, 2), HALF),
        prune_tokens(model, (1,), ADAPTIVE),
        merge_tokens(model, 4),
    ):
        with make_pruned, torch.no_grad():
            exact = predict(model, given)
            with torch.autocast("cpu", torch.bfloat16):
                rough = predict(model, given)
        assert rough.isfinite().all()
        assert (
            make_pruned.steps[0].scores is None
            or make_pruned.steps[0].scores.dtype == torch.float32
        )
        assert (rough.float() - exact).abs().mean() < 0.5


@pytest.mark.long
def test_compiled_model_drops_the_same_tokens() -> None:
    """In a separate process, because the shape checks of the tests do not compile."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.nn.token_pruning.compare_compiled"],
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- maps and traces


def test_kept_tokens_form_a_binary_map_over_the_image() -> None:
    model, given = make_model("DINOv2 with registers"), inputs("ViT")
    with prune_tokens(model, (1, 3), HALF) as thinned:
        predict(model, given)
    kept = thinned.kept
    assert kept.kind is Kind.AMOUNT and kept.values.shape == (3, 2, 1, 1, 41)
    assert set(kept.values.unique().tolist()) == {0.0, 1.0}
    cells = kept.block("global", "image").values
    assert cells.sum(-1).flatten().tolist() == [18, 9] * 3
    assert (kept.block("global", "class").values == 1).all()
    assert (kept.block("global", "registers").values == 1).all()
    assert (cells[:, 0] >= cells[:, 1]).all(), "dropped tokens do not come back"
    first = thinned.steps[0]
    scores = first.scores[:, 5:]
    for row in range(3):
        best = scores[row].topk(18).indices
        assert cells[row, 0, 0, 0].nonzero().flatten().tolist() == sorted(best.tolist())


def test_watching_a_pruned_model_restores_token_positions() -> None:
    model, given = vit(), inputs("ViT")
    with prune_tokens(model, (1, 3), HALF) as thinned, watch(model) as trace:
        predict(model, given)
    stages = thinned.stages(trace)
    assert [len(one) for one in stages] == [1, 2, 1]
    for number, stage in enumerate(stages[1:]):
        shown = stage.block("class", "image")
        assert shown.keys.spans[0].shape == (6, 6)
        kept = thinned.kept.values[:, number, 0, 0, 1:] == 1
        assert torch.equal(shown.visible[:, 0], kept)
        assert (shown.weights[:, :, :, 0].permute(0, 3, 1, 2)[~kept] == 0).all()
        whole = stage.map(0).weights
        row = whole[:, 0, :, 0]
        for sample in range(3):
            places = kept[sample].nonzero().flatten()
            torch.testing.assert_close(shown.weights[sample, 0, :, 0, places], row[sample, :, 1:])


def test_order_of_watching_and_pruning_does_not_matter() -> None:
    model, given = vit(), inputs("ViT")
    with prune_tokens(model, (1,), ADAPTIVE), watch(model) as inside:
        one = predict(model, given)
    with watch(model) as outside, prune_tokens(model, (1,), ADAPTIVE):
        other = predict(model, given)
    assert torch.equal(one, other)
    for mine, theirs in zip(inside, outside, strict=True):
        torch.testing.assert_close(mine.weights(), theirs.weights())
    hidden = inside.map(2)
    assert hidden.mask is not None, "padding is hidden in the maps of a ragged batch"
    assert (hidden.weights.sum(-1) - 1).abs().max() < 1e-5


def test_layout_of_another_length_raises() -> None:
    model, given = vit(), inputs("ViT")
    with prune_tokens(model, (1,), HALF) as thinned, watch(model, layout=Layout((), 5)) as trace:
        predict(model, given)
    with pytest.raises(ValueError, match=r"5 positions.* 37"):
        thinned.stages(trace)


def test_wrapped_pruned_model_returns_the_map_of_its_last_layer() -> None:
    model = vit()
    thinned = prune_tokens(model, (1, 3), HALF)
    adopted = wrap(model, reduce=thinned.last_layer)
    geometry = PixelGeometry.identity(2, (24, 24))
    batch = Batch(("a", "b"), images=inputs("ViT", 2)["pixel_values"], geometry=geometry)
    with thinned:
        output = adopted(batch)
    (shown,) = output.attention
    assert shown.keys.find("image").shape == (6, 6)
    assert shown.keys.find("image").geometry is not None, "has the pixel geometry"
    assert torch.equal(shown.visible[:, 0], thinned.kept.values[:, 1, 0, 0, 1:] == 1)


def test_cells_masked_in_a_wrapped_model_are_not_kept() -> None:
    model = vit()
    thinned = prune_tokens(model, (1,), HALF)
    adopted = wrap(model, reduce=thinned.last_layer)
    batch = Batch(("a", "b"), images=inputs("ViT", 2)["pixel_values"])
    mask = torch.ones(2, 36)
    mask[:, ::3] = 0
    with thinned:
        adopted.decide(adopted.encode(batch), {"image": mask})
    kept = thinned.kept.values[:, 0, 0, 0, 1:]
    assert (kept[:, ::3] == 0).all()
    assert kept.sum(1).tolist() == [12, 12], "half of the remaining 24"


def test_padding_of_texts_is_never_kept() -> None:
    for how in ("sdpa", "eager"):
        model, given = bert(how), inputs("BERT")
        for after in ((0,), (2,)):
            with prune_tokens(model, after, keep_all) as thinned:
                predict(model, given)
            kept = thinned.kept.values[:, 0, 0, 0]
            assert torch.equal(kept == 1, given["attention_mask"] == 1)
            assert torch.equal(thinned.kept.visible[:, 0], given["attention_mask"] == 1)


def test_custom_layout_sets_the_tokens_always_kept() -> None:
    model, given = bert(), inputs("BERT")
    spans = (Span("special", (2,), torch.tensor([[0, 11], [0, 8], [0, 6]])),)
    with prune_tokens(model, (1,), partial(keep_top, count=1), layout=Layout(spans, 12)) as thinned:
        predict(model, given)
    kept = thinned.kept.values[:, 0, 0, 0]
    assert kept.sum(1).tolist() == [3, 3, 3]
    assert (kept.gather(1, spans[0].index) == 1).all()


def test_results_are_replaced_by_each_forward_pass() -> None:
    model = vit()
    with prune_tokens(model, (1,), HALF) as thinned:
        predict(model, inputs("ViT", 3))
        predict(model, inputs("ViT", 2))
    assert len(thinned.kept) == 2 and len(thinned.steps) == 1 and len(thinned.lengths) == 4


# --- the model is unchanged


def count_hooks(model: nn.Module) -> list[int]:
    return [
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_model_is_unchanged_after_pruning(fails: bool) -> None:
    model, given = vit(), inputs("ViT")
    model.train()
    before = count_hooks(model), {name: one.clone() for name, one in model.state_dict().items()}
    forwards = [module.forward for module in model.modules()]

    def rule(scores: Tensor) -> Tensor:
        if fails:
            raise RuntimeError("no")
        return HALF(scores)

    thinned = prune_tokens(model, (1, 2), rule)
    for _ in range(2):  # it can be used again
        try:
            with thinned:
                predict(model, given)
        except RuntimeError:
            assert fails
    assert count_hooks(model) == before[0] and model.training
    assert all(torch.equal(one, before[1][name]) for name, one in model.state_dict().items())
    assert [module.forward for module in model.modules()] == forwards


def test_a_block_inside_of_itself_raises_and_leaves_no_hook() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    pruned = prune_tokens(model, (1,), partial(keep_top, count=4))
    with pruned:
        with pytest.raises(ValueError, match="open already"), pruned:
            pass
        assert pruned(torch.rand(2, 10, 8)).shape[1] == 5
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_pruning_adds_no_parameters() -> None:
    """T-HAN-12: neither parameters nor state."""
    model = vit()
    names = list(model.state_dict())
    with prune_tokens(model, (1,), HALF):
        assert list(model.state_dict()) == names
        predict(model, inputs("ViT"))


# --- errors


def test_bad_arguments_and_unsupported_uses_raise() -> None:
    model, given = vit(), inputs("ViT")
    with pytest.raises(ValueError, match=r"4 layers.* 0 to 3"):
        prune_tokens(model, (4,), HALF)
    with pytest.raises(ValueError, match="after="):
        prune_tokens(model, (), HALF)
    with pytest.raises(ValueError, match="got -1"):
        merge_tokens(model, -1)
    with pytest.raises(ValueError, match="has not run"):
        _ = prune_tokens(model, (1,), HALF).kept
    with (
        pytest.raises(ValueError, match=r"5 tokens.* 37"),
        prune_tokens(model, (1,), HALF, layout=Layout((), 5)),
    ):
        predict(model, given)
    with (
        pytest.raises(ValueError, match="cannot be nested"),
        prune_tokens(model, (1,), HALF),
        prune_tokens(model, (2,), HALF),
    ):
        predict(model, given)
    eager = vit("eager")
    with pytest.raises(ValueError, match="metric=by_states"), merge_tokens(eager, 2):
        predict(eager, given)


def test_mean_pooling_heads_raise_for_unequal_counts() -> None:
    model, given = make_model("DINOv2 with registers"), inputs("ViT")
    with (
        pytest.raises(ValueError, match=r"averages.*keep_top"),
        prune_tokens(model, (1,), ADAPTIVE),
    ):
        predict(model, given)
    with prune_tokens(model, (1,), HALF):
        assert predict(model, given).isfinite().all()


def test_activation_checkpointing_raises() -> None:
    model = vit().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with (
        pytest.raises(NotImplementedError, match="checkpointing"),
        prune_tokens(model, (1,), HALF),
    ):
        predict(model, inputs("ViT"))


def test_fusing_tokens_with_rotary_embeddings_raises() -> None:
    model, given = make_model("DINOv3"), inputs("DINOv3")
    with (
        pytest.raises(ValueError, match="rest="),
        prune_tokens(model, (1,), HALF, by_presence, fuse_tokens),
    ):
        predict(model, given)


def test_interpolated_position_biases_raise() -> None:
    model, given = make_model("BEiT"), inputs("BEiT")
    with (
        pytest.raises(ValueError, match="interpolate_pos"),
        prune_tokens(model, (1,), HALF),
    ):
        model(**given, interpolate_pos_encoding=True)


def test_causal_decoders_raise() -> None:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=9, n_embd=8, n_layer=2, n_head=2, n_positions=8)
    model = GPT2Model(config).eval()
    with pytest.raises(ValueError, match="causal"), prune_tokens(model, (1,), HALF):
        model(input_ids=torch.randint(0, 9, (2, 6)))


@pytest.mark.long
def test_arguments_of_wrong_types_raise() -> None:
    """In a separate process without type checks, which would raise first."""
    code = """
from torch import nn
from overt.nn import keep_top, prune_tokens
layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
model = nn.TransformerEncoder(layer, 3)
for after, keep in ((2, keep_top), ((2,), 0.5)):
    try:
        prune_tokens(model, after, keep)
    except TypeError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.endswith("use after=(2,)")
    assert second.startswith("expected keep") and second.endswith("got 0.5")


# --- saving


@pytest.mark.parametrize("name", ["prune", "merge"])
def test_saved_pruned_model_gives_equal_predictions(name: str, tmp_path: Path) -> None:
    model, given = make_model("ViT"), inputs("ViT")
    if name == "prune":
        pruned = prune_tokens(
            model, (1, 2), HALF, by_class_attention, fuse_tokens, always=("class",)
        )
    else:
        pruned = merge_tokens(model, 2, metric=by_states)
    with pruned:
        expected = predict(model, given)
    pruned.save_pretrained(tmp_path / "kept")
    again = PrunedModel.from_pretrained(tmp_path / "kept")
    assert (again.after, again.always) == (pruned.after, pruned.always)
    with again:
        assert torch.equal(predict(again.model, given), expected)
    assert again.lengths == pruned.lengths
    again.save_pretrained(tmp_path / "twice")
    given_model = make_model("ViT")
    for parameter in given_model.parameters():
        parameter.data.zero_()
    with PrunedModel.from_pretrained(tmp_path / "twice", given_model) as last:
        assert torch.equal(predict(last.model, given), expected)


def test_saving_a_custom_score_raises(tmp_path: Path) -> None:
    pruned = prune_tokens(make_model("ViT"), (1,), HALF, by_random(torch.Generator()))
    with pytest.raises(UserError, match="custom score"):
        pruned.save_pretrained(tmp_path / "kept")
    with pytest.raises(UserError, match="custom reducer"):
        PrunedModel(make_model("ViT"), (1,), pruned.reducer).save_pretrained(tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_tracing_and_exporting_a_pruned_model_raise() -> None:
    """A trace would fix the tokens of its example; before, the kernel raised a TypeError."""

    class Logits(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, pixels: Tensor) -> Tensor:
            return self.inner(pixel_values=pixels).logits

    model = vit().eval()
    pixels = torch.rand(1, 3, 24, 24)
    for under in (prune_tokens(model, (1,), HALF), merge_tokens(model, 2)):
        with pytest.raises(NotImplementedError, match=r"trace.*TorchScript"), under:
            torch.jit.trace(Logits(model), (pixels,))
    for under in (prune_tokens(model, (1,), HALF), merge_tokens(model, 2)):
        with pytest.raises(NotImplementedError, match=r"torch\.export"), under:
            torch.export.export(Logits(model), (pixels,))
    with torch.no_grad(), prune_tokens(model, (1,), HALF):
        model(pixel_values=pixels)  # the model still works


# --- a pruned model as a module


@pytest.mark.parametrize("make", [partial(prune_tokens, keep=HALF), partial(merge_tokens, count=3)])
def test_calling_equals_the_block_and_leaves_the_model_unchanged(
    make: Callable[..., PrunedModel],
) -> None:
    model = vit()
    pruned, given = make(model, after=(1, 2)), inputs("CLIP")
    hooks, plain = count_hooks(model), predict(model, given)
    with pruned:
        expected = predict(model, given)
        assert torch.equal(predict(pruned, given), expected)  # also inside of the block
    lengths = list(pruned.lengths)
    pruned.lengths.clear()
    assert torch.equal(predict(pruned, given), expected) and pruned.lengths == lengths
    assert torch.equal(predict(model, given), plain) and not torch.equal(plain, expected)
    assert count_hooks(model) == hooks
    with pytest.raises(AttributeError):
        pruned(pixel_values=None)
    assert count_hooks(model) == hooks


def test_a_pruned_model_is_a_module_of_its_model() -> None:
    model = vit()
    pruned = prune_tokens(model, (1,), HALF)
    assert [id(p) for p in pruned.parameters()] == [id(p) for p in model.parameters()]
    assert {f"model.{name}" for name in model.state_dict()} == set(pruned.state_dict())
    pruned.train()
    assert model.training and not pruned.eval().model.training
    twin, given = copy.deepcopy(pruned), inputs("CLIP")
    assert torch.equal(predict(twin, given), predict(pruned, given)) and twin.model is not model


def test_a_called_pruned_model_trains_and_can_be_watched() -> None:
    torch.manual_seed(0)
    model, given = vit(), inputs("CLIP")
    pruned = prune_tokens(model, (1,), HALF).train()
    optimizer = torch.optim.SGD(pruned.parameters(), lr=0.1)
    first = None
    for _ in range(5):
        loss = pruned(**given).logits.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = first or float(loss.detach())
    assert first is not None and float(loss.detach()) < first
    with torch.no_grad(), watch(pruned.eval()) as trace:
        pruned(**given)
    counts = [stage.map().weights.shape[-1] for stage in pruned.stages(trace)]
    assert counts == sorted(set(pruned.lengths), reverse=True)
