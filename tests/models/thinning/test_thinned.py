"""A thinned model is the model on fewer tokens: nothing more, nothing less, and left as found."""

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
from overt.geometry import PixelGeometry
from overt.models.adopting.adopted import adopt
from overt.models.hard.selection import keep_above_uniform, keep_all, keep_share, keep_top
from overt.models.thinning.choosing import (
    by_chance,
    by_class_attention,
    by_grid,
    by_presence,
    fused,
)
from overt.models.thinning.merging import by_states
from overt.models.thinning.thinned import Thinned, merge, thin
from tests.models.thinning.encoders import (
    IMAGES,
    MODELS,
    answer,
    bert,
    inputs,
    made,
    vit,
)

HALF = partial(keep_share, share=0.5)
ADAPTIVE = partial(keep_above_uniform, temperature=3.0)


def hidden_instead(model: nn.Module, thinned: Thinned, given: dict[str, Tensor]) -> Tensor:
    """The answer with all tokens, when later layers may not look at those that went.

    No kept token can tell the difference: the slow copy of thinning, for every family.
    """
    at = {
        module: number for number, layer in enumerate(thinned.layers) for module in layer.modules()
    }

    def make(call: Call) -> Tensor | None:
        number = at.get(call.module, len(thinned.layers))  # a head that pools comes last
        gone = [one.kept.values[:, 0, 0, 0] == 0 for one in thinned.steps if one.after <= number]
        if not gone:
            return None
        return torch.zeros(gone[-1].shape).masked_fill(gone[-1], -torch.inf)[:, None, None]

    with watch(model, edit=Bias(make)):
        return answer(model, given)


# --- parity


@pytest.mark.parametrize("name", MODELS)
def test_keeping_all_is_the_untouched_model_exactly(name: str) -> None:
    model, given = made(name), inputs(name)
    expected = answer(model, given)
    with thin(model, (0, 1, 3), keep_all) as thinned:
        found = answer(model, given)
    if name in IMAGES:
        assert torch.equal(found, expected)
        assert len(set(thinned.lengths)) == 1
    else:  # padding is gone, so that other kernels ran
        torch.testing.assert_close(found, expected)
    assert torch.equal(answer(model, given), expected), "and afterwards, too"


@pytest.mark.parametrize("name", IMAGES)
def test_merging_none_is_the_untouched_model_exactly(name: str) -> None:
    model, given = made(name), inputs(name)
    expected = answer(model, given)
    with merge(model, 0):
        assert torch.equal(answer(model, given), expected)


@pytest.mark.parametrize("after", [(1, 3), (0, 2)])
@pytest.mark.parametrize("name", [one for one in MODELS if not one.startswith("DINOv2")])
def test_thinning_is_hiding_what_went(name: str, after: tuple[int, ...]) -> None:
    model, given = made(name), inputs(name)
    with thin(model, after, HALF) as thinned:
        found = answer(model, given)
    assert thinned.lengths[-1] < thinned.lengths[0]
    torch.testing.assert_close(found, hidden_instead(model, thinned, given), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", [one for one in MODELS if not one.startswith("DINOv2")])
def test_samples_that_keep_different_numbers_do_not_touch_each_other(name: str) -> None:
    model, given = made(name), inputs(name)
    keep = ADAPTIVE if name in IMAGES else HALF  # texts are of different lengths to begin with
    with thin(model, (1, 2), keep) as thinned:
        found = answer(model, given)
        counts = thinned.kept.values.sum(-1)[:, -1].flatten()
        assert torch.equal(counts, thinned.steps[-1].count.float())
        assert len(set(counts.tolist())) > 1, "a ragged batch"
    slow = hidden_instead(model, thinned, given)
    with thinned:
        alone = [
            answer(model, {key: value[[row]] for key, value in given.items()})
            for row in range(len(found))
        ]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(found, slow, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_thinning_is_running_the_layers_by_hand_on_gathered_tokens(how: str) -> None:
    model, given = vit(how), inputs("ViT")
    with thin(model, (1, 3), HALF) as thinned:
        found = answer(model, given)
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


def test_layers_of_pytorch_itself_and_their_padding() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    states, lengths = torch.randn(2, 10, 16), (10, 7)
    padding = torch.arange(10) >= torch.tensor(lengths)[:, None]
    whole = model(states, src_key_padding_mask=padding)
    with thin(model, (1, 2), keep_all) as thinned:
        found = model(states, src_key_padding_mask=padding)
    torch.testing.assert_close(found[:, 0], whole[:, 0])
    assert thinned.steps[0].count.tolist() == [10, 7]
    with thin(model, (1, 2), HALF) as thinned:
        found = model(states, src_key_padding_mask=padding)
        assert thinned.steps[-1].count.tolist() == [4, 3]
        for row, length in enumerate(lengths):
            alone = model(states[[row], :length])
            torch.testing.assert_close(found[row, 0], alone[0, 0])


def test_fusing_the_rest_is_the_published_rule_by_hand() -> None:
    model, given = vit(), inputs("ViT")
    with thin(model, (2,), partial(keep_top, count=9), by_class_attention, fused):
        found = answer(model, given)
    body = model.vit
    with watch(model) as seen:
        answer(model, given)
    states = body.embeddings(given["pixel_values"])
    for number, layer in enumerate(body.layers):
        if number == 2:
            attention = seen.map(1).weights[:, 0, :, 0, 1:].mean(dim=1)
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


def test_merged_tokens_count_by_their_sizes_in_later_attention() -> None:
    """Proportional attention: two equal tokens and their merged one cannot be told apart."""
    model = vit()
    body = model.vit
    nn.init.zeros_(body.embeddings.position_embeddings)  # equal patches are then equal tokens
    column = torch.randn(3, 3, 24, 4)
    pixels = column.repeat(1, 1, 1, 6)  # every row of cells is six times the same
    expected = answer(model, {"pixel_values": pixels})
    with merge(model, 9, after=(1, 2), metric=by_states) as thinned:
        found = answer(model, {"pixel_values": pixels})
    assert thinned.lengths == [37, 28, 19, 19]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_merging_runs_in_every_family(name: str) -> None:
    model, given = made(name), inputs(name)
    with merge(model, 1) as thinned:
        assert answer(model, given).isfinite().all()
    n = thinned.lengths[0]
    assert thinned.lengths == [n, n - 1, n - 2, n - 3]
    present = thinned.kept.visible[:, 0]
    assert (thinned.kept.values[:, -1, 0, 0] == 1)[present].all(), "merged is not gone"


def test_norms_of_normed_states_say_nothing() -> None:
    """Why hard attention by presence is for models that norm before attention, not after (BERT)."""
    model, given = bert(), inputs("BERT")
    with thin(model, (2,), keep_all) as thinned:
        answer(model, given)
    scores = thinned.steps[0].scores
    assert scores is not None
    finite = scores[scores.isfinite()]
    assert finite.std() < 1e-3 * finite.mean(), "a fresh layer norm makes all tokens as long"


# --- gradients and training


def test_the_gradient_reaches_kept_tokens_only() -> None:
    model, given = vit(), inputs("ViT")
    states: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        states.append(output)

    handle = model.vit.embeddings.register_forward_hook(keep)
    with thin(model, (0,), HALF) as thinned:
        answer(model, given).sum().backward()
    handle.remove()
    kept = thinned.kept.values[:, 0, 0, 0] == 1
    assert states[0].grad is not None
    reached = states[0].grad.abs().sum(-1)
    assert (reached[~kept] == 0).all() and (reached[kept] > 0).all()


@pytest.mark.parametrize(
    "opened",
    [
        lambda model: thin(model, (1, 2), HALF),
        lambda model: thin(model, (1, 2), ADAPTIVE),
        lambda model: thin(model, (1, 2), HALF, by_class_attention, fused),
        lambda model: thin(model, (1, 2), HALF, by_chance(torch.Generator().manual_seed(0))),
        lambda model: thin(model, (1, 2), HALF, by_grid),
        lambda model: merge(model, 4),
    ],
)
def test_a_thinned_model_learns(opened: Callable[[nn.Module], Thinned]) -> None:
    model, given = vit(initializer_range=0.05).train(), inputs("ViT", 4)
    labels = torch.tensor([0, 1, 2, 0])
    steps = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    with opened(model):
        for _ in range(8):
            loss = model(**given, labels=labels).loss
            steps.zero_grad()
            loss.backward()
            steps.step()
            losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert all(one.grad is None or one.grad.isfinite().all() for one in model.parameters())


def test_autocast_chooses_and_answers_nearly_the_same() -> None:
    model, given = vit(), inputs("ViT")
    for opened in (thin(model, (1, 2), HALF), thin(model, (1,), ADAPTIVE), merge(model, 4)):
        with opened, torch.no_grad():
            exact = answer(model, given)
            with torch.autocast("cpu", torch.bfloat16):
                rough = answer(model, given)
        assert rough.isfinite().all()
        assert opened.steps[0].scores is None or opened.steps[0].scores.dtype == torch.float32
        assert (rough.float() - exact).abs().mean() < 0.5


@pytest.mark.long
def test_a_compiled_model_loses_the_same_tokens() -> None:
    """In a process of its own: the shape checks of the tests do not compile."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.thinning.compiled"],
        cwd=Path(__file__).resolve().parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- what is told


def test_kept_tokens_are_a_hard_map_over_the_picture() -> None:
    model, given = made("DINOv2 with registers"), inputs("ViT")
    with thin(model, (1, 3), HALF) as thinned:
        answer(model, given)
    kept = thinned.kept
    assert kept.kind is Kind.AMOUNT and kept.values.shape == (3, 2, 1, 1, 41)
    assert set(kept.values.unique().tolist()) == {0.0, 1.0}
    cells = kept.block("global", "image").values
    assert cells.sum(-1).flatten().tolist() == [18, 9] * 3
    assert (kept.block("global", "class").values == 1).all()
    assert (kept.block("global", "registers").values == 1).all()
    assert (cells[:, 0] >= cells[:, 1]).all(), "what is gone does not come back"
    first = thinned.steps[0]
    scores = first.scores[:, 5:]
    for row in range(3):
        best = scores[row].topk(18).indices
        assert cells[row, 0, 0, 0].nonzero().flatten().tolist() == sorted(best.tolist())


def test_watching_at_the_same_time_sees_where_each_token_stood() -> None:
    model, given = vit(), inputs("ViT")
    with thin(model, (1, 3), HALF) as thinned, watch(model) as seen:
        answer(model, given)
    stages = thinned.stages(seen)
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


def test_the_order_of_watching_and_thinning_does_not_matter() -> None:
    model, given = vit(), inputs("ViT")
    with thin(model, (1,), ADAPTIVE), watch(model) as inside:
        one = answer(model, given)
    with watch(model) as outside, thin(model, (1,), ADAPTIVE):
        other = answer(model, given)
    assert torch.equal(one, other)
    for mine, theirs in zip(inside, outside, strict=True):
        torch.testing.assert_close(mine.weights(), theirs.weights())
    hidden = inside.map(2)
    assert hidden.mask is not None, "padding is hidden in the maps of a ragged batch"
    assert (hidden.weights.sum(-1) - 1).abs().max() < 1e-5


def test_a_layout_of_something_else_is_refused() -> None:
    model, given = vit(), inputs("ViT")
    with thin(model, (1,), HALF) as thinned, watch(model, layout=Layout((), 5)) as seen:
        answer(model, given)
    with pytest.raises(ValueError, match="5 positions, and the model began with 37"):
        thinned.stages(seen)


def test_an_adopted_model_shows_what_its_last_layer_sees() -> None:
    model = vit()
    thinned = thin(model, (1, 3), HALF)
    adopted = adopt(model, reduce=thinned.last)
    geometry = PixelGeometry.identity(2, (24, 24))
    batch = Batch(("a", "b"), images=inputs("ViT", 2)["pixel_values"], geometry=geometry)
    with thinned:
        output = adopted(batch)
    (shown,) = output.attention
    assert shown.keys.find("image").shape == (6, 6)
    assert shown.keys.find("image").geometry is not None, "leads back to pixels"
    assert torch.equal(shown.visible[:, 0], thinned.kept.values[:, 1, 0, 0, 1:] == 1)


def test_what_an_adopted_model_hides_is_not_kept() -> None:
    model = vit()
    thinned = thin(model, (1,), HALF)
    adopted = adopt(model, reduce=thinned.last)
    batch = Batch(("a", "b"), images=inputs("ViT", 2)["pixel_values"])
    mask = torch.ones(2, 36)
    mask[:, ::3] = 0
    with thinned:
        adopted.decide(adopted.encode(batch), {"image": mask})
    kept = thinned.kept.values[:, 0, 0, 0, 1:]
    assert (kept[:, ::3] == 0).all()
    assert kept.sum(1).tolist() == [12, 12], "half of the 24 that are left"


def test_padding_of_texts_is_never_kept() -> None:
    for how in ("sdpa", "eager"):
        model, given = bert(how), inputs("BERT")
        for after in ((0,), (2,)):
            with thin(model, after, keep_all) as thinned:
                answer(model, given)
            kept = thinned.kept.values[:, 0, 0, 0]
            assert torch.equal(kept == 1, given["attention_mask"] == 1)
            assert torch.equal(thinned.kept.visible[:, 0], given["attention_mask"] == 1)


def test_a_layout_of_ones_own_says_what_stays() -> None:
    model, given = bert(), inputs("BERT")
    spans = (Span("special", (2,), torch.tensor([[0, 11], [0, 8], [0, 6]])),)
    with thin(model, (1,), partial(keep_top, count=1), layout=Layout(spans, 12)) as thinned:
        answer(model, given)
    kept = thinned.kept.values[:, 0, 0, 0]
    assert kept.sum(1).tolist() == [3, 3, 3]
    assert (kept.gather(1, spans[0].index) == 1).all()


def test_each_pass_is_told_anew() -> None:
    model = vit()
    with thin(model, (1,), HALF) as thinned:
        answer(model, inputs("ViT", 3))
        answer(model, inputs("ViT", 2))
    assert len(thinned.kept) == 2 and len(thinned.steps) == 1 and len(thinned.lengths) == 4


# --- the model is left as found


def hooks(model: nn.Module) -> list[int]:
    return [
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_found(fails: bool) -> None:
    model, given = vit(), inputs("ViT")
    model.train()
    before = hooks(model), {name: one.clone() for name, one in model.state_dict().items()}
    forwards = [module.forward for module in model.modules()]

    def rule(scores: Tensor) -> Tensor:
        if fails:
            raise RuntimeError("no")
        return HALF(scores)

    thinned = thin(model, (1, 2), rule)
    for _ in range(2):  # it can be used again
        try:
            with thinned:
                answer(model, given)
        except RuntimeError:
            assert fails
    assert hooks(model) == before[0] and model.training
    assert all(torch.equal(one, before[1][name]) for name, one in model.state_dict().items())
    assert [module.forward for module in model.modules()] == forwards


def test_nothing_to_learn_is_added() -> None:
    """T-HAN-12: neither parameters nor state."""
    model = vit()
    names = list(model.state_dict())
    with thin(model, (1,), HALF):
        assert list(model.state_dict()) == names
        answer(model, inputs("ViT"))


# --- sentences


def test_what_cannot_be_done_is_said() -> None:
    model, given = vit(), inputs("ViT")
    with pytest.raises(ValueError, match="4 layers, so tokens can go after 0 to 3"):
        thin(model, (4,), HALF)
    with pytest.raises(ValueError, match="after="):
        thin(model, (), HALF)
    with pytest.raises(ValueError, match="not negative"):
        merge(model, -1)
    with pytest.raises(ValueError, match="has not run"):
        _ = thin(model, (1,), HALF).kept
    with (
        pytest.raises(ValueError, match="layout has 5 tokens, and the model 37"),
        thin(model, (1,), HALF, layout=Layout((), 5)),
    ):
        answer(model, given)
    with (
        pytest.raises(ValueError, match="cannot be nested"),
        thin(model, (1,), HALF),
        thin(model, (2,), HALF),
    ):
        answer(model, given)
    eager = vit("eager")
    with pytest.raises(ValueError, match="metric=by_states"), merge(eager, 2):
        answer(eager, given)


def test_averaging_heads_are_refused_when_samples_differ() -> None:
    model, given = made("DINOv2 with registers"), inputs("ViT")
    with (
        pytest.raises(ValueError, match=r"averages all tokens.*keep_top"),
        thin(model, (1,), ADAPTIVE),
    ):
        answer(model, given)
    with thin(model, (1,), HALF):
        assert answer(model, given).isfinite().all()


def test_checkpointing_is_refused() -> None:
    model = vit().train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with (
        pytest.raises(NotImplementedError, match="switch checkpointing off"),
        thin(model, (1,), HALF),
    ):
        answer(model, inputs("ViT"))


def test_tokens_that_are_turned_by_their_place_cannot_be_fused() -> None:
    model, given = made("DINOv3"), inputs("DINOv3")
    with (
        pytest.raises(ValueError, match="leave out rest="),
        thin(model, (1,), HALF, by_presence, fused),
    ):
        answer(model, given)


def test_position_biases_that_stretch_are_refused() -> None:
    model, given = made("BEiT"), inputs("BEiT")
    with pytest.raises(ValueError, match="pictures of its own size"), thin(model, (1,), HALF):
        model(**given, interpolate_pos_encoding=True)


def test_decoders_are_refused() -> None:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=9, n_embd=8, n_layer=2, n_head=2, n_positions=8)
    model = GPT2Model(config).eval()
    with pytest.raises(ValueError, match="causal"), thin(model, (1,), HALF):
        model(input_ids=torch.randint(0, 9, (2, 6)))


def test_wrong_kinds_of_argument_get_a_sentence() -> None:
    """In a process that checks no types, which would refuse them first."""
    code = """
from torch import nn
from overt.models import keep_top, thin
layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
model = nn.TransformerEncoder(layer, 3)
for after, keep in ((2, keep_top), ((2,), 0.5)):
    try:
        thin(model, after, keep)
    except TypeError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "after is a list of layers, also of one: after=(2,)"
    assert second.startswith("keep is a rule of scores") and second.endswith("not 0.5")
