"""Fine-tuning VL-BERT on VQA and referring expressions: networks, regions, candidates."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.data.batch import Batch
from overt.data.detections import read_detections
from overt.data.images import stretch
from overt.data.referring_expressions import refcoco, refer
from overt.data.scenes.dataset import Scenes
from overt.data.scenes.proposals import only_detected, only_true
from overt.data.scenes.referring_expressions import ReferringScenes
from overt.data.vocabulary import BEGIN, END, MASK
from overt.data.vqa import V2, Vqa
from overt.data.vqa_dataset import PhotoInput
from overt.losses import classification, soft_classification
from overt.losses.grounding import direct_supervision, region_choice
from overt.metrics.grounding import box_accuracy
from overt.nn.vlbert.caption_tokens import add_special_tokens
from overt.nn.vlbert.downstream import (
    add_boxes,
    add_grid_boxes,
    add_proposals,
    for_masked_vqa,
    for_referring_expressions,
    for_vqa,
    matching_candidates,
    target_boxes,
)
from overt.nn.vlbert.model import ClassificationHead, MaskTokenHead, RegionHead, VLBert
from overt.nn.vlbert.regions import PrecomputedRegionEncoder
from overt.testing import check_model
from tests.data import vqa_files
from tests.data.test_referring_expressions import ENTRIES, dump_json, write_refcoco
from tests.nn.vlbert.scenes import SIZES, batch, net, pairs, region_encoder, region_net

REFERRING = ReferringScenes("train", 0, 6, size=32, regions=12)


def same_trunk(one: VLBert, other: VLBert) -> bool:
    theirs = other.state_dict()
    return all(
        torch.equal(value, theirs[name])
        for name, value in one.state_dict().items()
        if not name.startswith(("answer.", "relates."))
    )


# --- networks


def test_for_masked_vqa_reads_the_answer_from_the_mask_token():
    before, some = net(), batch()
    after = for_masked_vqa(before, 7, dropout=0.0)
    assert same_trunk(before, after)
    asked = replace(some, tokens=some.tokens.clone(), target=None)
    # the last words of the second caption become the mask token, right before its end token
    places = some.token_mask.sum(dim=1) - 2
    asked.tokens[torch.arange(4), places] = MASK
    output = after(asked)
    states = output.states[torch.arange(4), places]
    torch.testing.assert_close(output.prediction, after.answer.decision(states))
    again = VLBert.from_config(after.config())
    assert isinstance(again.answer, MaskTokenHead) and again.config() == after.config()


def test_for_vqa_keeps_the_trunk_and_the_pooler():
    before = net()
    after = for_vqa(before, 7, dropout=0.0)
    assert same_trunk(before, after) and after.relations == 0
    assert after(batch()).prediction.shape == (4, 7)
    assert torch.equal(after.answer.pool.weight, before.answer.pool.weight)
    assert not torch.equal(for_vqa(region_net(), 7).answer.pool.weight, after.answer.pool.weight)
    with torch.no_grad():
        after.word.weight.zero_()
    assert before.word.weight.any()  # a copy


def test_for_referring_expressions_keeps_the_trunk_and_scores_regions():
    before = net()
    after = for_referring_expressions(before)
    assert same_trunk(before, after) and isinstance(after.answer, RegionHead)
    assert after(REFERRING.batch([0])).prediction.shape[1] == 12


@pytest.mark.parametrize(
    "make",
    [lambda: for_vqa(net(), 4), lambda: for_referring_expressions(net())],
    ids=["questions", "expressions"],
)
def test_fine_tuned_networks_pass_check_model_and_are_saved(make, tmp_path):
    def again() -> VLBert:
        torch.manual_seed(0)
        return make()

    check_model(again, replace(batch(), region_mask=None, target=None))
    model = again().eval()
    model.save_pretrained(tmp_path / "model")
    read = VLBert.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(read(batch()).prediction, model(batch()).prediction)


# --- questions


def test_questions_about_scenes_get_object_boxes(tmp_path):
    data = Scenes("train", 0, 3, size=32, cache=tmp_path, workers=1)
    indices = [2, 0]
    asked = add_special_tokens(data.batch(indices), BEGIN, END)
    one = [data.boxes(index) for index in indices]
    given = add_boxes(asked, [one[at] for at in asked.image_index])
    most = max(map(len, one))
    assert given.boxes.shape == (8, most, 4) and given.region_mask.shape == (8, most)
    for row, at in enumerate(given.image_index.tolist()):
        assert torch.equal(given.boxes[row][given.region_mask[row]], one[at])
    model = for_vqa(net(), len(data.answers))
    loss = classification(model(given).prediction, given.labels).mean()
    loss.backward()
    assert loss.isfinite() and model.word.weight.grad.any()
    with pytest.raises(ValueError, match=r"2 lists .* 8"):
        add_boxes(asked, one)


def test_grid_boxes_follow_the_geometry():
    given = add_grid_boxes(replace(pairs().batch(range(2)), boxes=None, region_mask=None), (2, 4))
    assert given.region_mask.all() and given.boxes.shape == (2, 8, 4)
    assert given.boxes[0, 0].tolist() == [0, 0, 8, 16]
    assert given.boxes[0, -1].tolist() == [24, 16, 32, 32]
    half = replace(given, geometry=given.geometry.pad(32, 0, 0, 0))
    assert add_grid_boxes(half, (2, 2)).region_mask.tolist() == [[False, False, True, True]] * 2


def test_grid_boxes_of_cached_features_need_no_images():
    words = pairs().batch(range(2))
    given = Batch(words.ids, tokens=words.tokens, token_mask=words.token_mask,
                  features=torch.randn(2, 6, 5))  # fmt: skip
    torch.manual_seed(0)
    model = for_vqa(
        VLBert(SIZES, PrecomputedRegionEncoder(5), ClassificationHead(SIZES.width, 3)), 9
    )
    assert model(add_grid_boxes(given, (2, 3))).prediction.shape == (2, 9)
    with pytest.raises(ValueError, match=r"6 cells.* 2 x 2"):
        add_grid_boxes(given, (2, 2))
    with pytest.raises(ValueError, match=r"images.*features"):
        add_grid_boxes(replace(given, features=None), (2, 3))


def write_grey_photo(path: Path, size: tuple[int, int] = (6, 8), value: int = 100) -> Path:
    """Write a photo of a uniform grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), value, dtype=np.uint8)).save(path)
    return path


def test_network_trains_on_the_vqa_v2_file_format(tmp_path):
    vqa_files.write_vqa(tmp_path, write_grey_photo)
    data = Vqa(
        tmp_path, "train", replace(V2, questions={}), photo_input=PhotoInput((12, 12), stretch)
    )
    given = add_grid_boxes(add_special_tokens(data.batch(range(4)), BEGIN, END), (3, 3))
    torch.manual_seed(0)
    start = VLBert(
        replace(SIZES, vocabulary=data.reader.size),
        region_encoder(),
        ClassificationHead(SIZES.width, 3),
    )
    model = for_vqa(start, len(data.classes), dropout=0.0)
    teach = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(8):
        teach.zero_grad()
        loss = soft_classification(model(given).prediction, given.answers).mean()
        loss.backward()
        losses.append(loss.item())
        teach.step()
    assert losses[-1] < losses[0] and model.answer.decision.out_features == len(data.classes)


# --- expressions


def test_target_boxes_do_not_depend_on_the_candidates():
    every, true, found = (
        REFERRING.batch(range(6)),
        ReferringScenes("train", 0, 6, 32, 12, keep=only_true).batch(range(6)),
        ReferringScenes("train", 0, 6, 32, 12, keep=only_detected).batch(range(6)),
    )
    assert torch.equal(target_boxes(every), target_boxes(true)) and torch.equal(
        target_boxes(every), target_boxes(found)
    )
    rows = torch.arange(len(every))
    assert (
        matching_candidates(every)[rows, every.labels].all()
        and matching_candidates(true)[rows, true.labels].all()
    )
    assert not matching_candidates(found)[rows, found.labels].any()
    assert torch.equal(
        matching_candidates(true) | matching_candidates(found), matching_candidates(every)
    )
    reachable = matching_candidates(found).any(dim=-1).double().mean()
    assert 0.2 < float(reachable) < 1  # some objects have no detection with enough overlap


def test_masked_boxes_change_nothing_and_cannot_be_chosen():
    found = ReferringScenes("train", 0, 6, 32, 12, keep=only_detected).batch(range(6))
    model = for_referring_expressions(net()).eval()
    logits = model(found).prediction
    other = torch.where(found.region_mask[..., None], found.boxes, found.boxes.flip(-2))
    torch.testing.assert_close(model(replace(found, boxes=other)).prediction, logits)
    assert found.region_mask.gather(1, logits.argmax(dim=1, keepdim=True)).all()
    perfect = matching_candidates(found).float()
    hit = box_accuracy(perfect, found.boxes, target_boxes(found), found.region_mask)
    torch.testing.assert_close(hit, matching_candidates(found).any(dim=-1).to(hit.dtype))


def test_box_accuracy_of_true_boxes_is_at_least_choice_accuracy():
    true = ReferringScenes("train", 0, 6, 32, 12, keep=only_true).batch(range(6))
    logits = torch.randn(len(true), 12, generator=torch.Generator().manual_seed(3))
    chosen = logits.masked_fill(~true.region_mask, -torch.inf).argmax(dim=1)
    hit = box_accuracy(logits, true.boxes, target_boxes(true), true.region_mask)
    overlapping = matching_candidates(true).sum(dim=1) > 1
    right = (chosen == true.labels).to(hit.dtype)
    assert torch.equal(hit[~overlapping], right[~overlapping]) and (hit >= right).all()


def slow_proposal_target(given: Batch, detected: list, sample: int, word: int) -> list[float]:
    """Compute the target of a word over detected boxes, box by box."""
    wanted = [at for at, weight in enumerate(given.target.weights[sample, 0, 0, word].tolist())
              if weight > 0]  # fmt: skip
    fits = []
    for x0, y0, x1, y1 in detected[sample].tolist():
        best = 0.0
        for at in wanted:
            a0, b0, a1, b1 = given.boxes[sample, at].tolist()
            both = max(0, min(x1, a1) - max(x0, a0)) * max(0, min(y1, b1) - max(y0, b0))
            best = max(best, both / ((x1 - x0) * (y1 - y0) + (a1 - a0) * (b1 - b0) - both))
        fits.append(best >= 0.5)
    return [fit / max(1, sum(fits)) for fit in fits]


def test_add_proposals_replaces_true_boxes_by_detected_ones():
    given = ReferringScenes("train", 0, 3, 32, 12, keep=only_true).batch(range(3))
    generator = torch.Generator().manual_seed(1)
    detected = []
    for row in range(len(given)):
        true = given.boxes[row][given.region_mask[row]]
        noise = 3 * torch.randn(true.shape, generator=generator)
        detected.append((true + noise)[: 1 + row % 4])
    found = add_proposals(given, detected)
    assert found.boxes.shape == (len(given), 12 + 4, 4) and not found.region_mask[:, :12].any()
    assert (
        torch.equal(target_boxes(found), target_boxes(given))
        and found.target.queries is given.target.queries
    )
    found.target.check()
    for row in range(len(given)):
        count = len(detected[row])
        assert torch.equal(found.boxes[row, 12 : 12 + count], detected[row])
        assert found.region_mask[row, 12:].tolist() == [at < count for at in range(4)]
        for word in range(given.tokens.shape[1]):
            weights = found.target.weights[row, 0, 0, word]
            assert not weights[:12].any() and not weights[12 + count :].any()
            assert weights[12 : 12 + count].tolist() == pytest.approx(
                slow_proposal_target(given, detected, row, word)
            )
    model = for_referring_expressions(net())
    output = model(found)
    losses = [
        region_choice(output.prediction, matching_candidates(found), found.region_mask),
        *direct_supervision(
            output.trace.log_block, found.target, words=output.features.words
        ).values(),
    ]
    sum(loss.mean() for loss in losses).backward()
    assert model.word.weight.grad.isfinite().all()


def test_expressions_need_boxes_and_labels():
    given = REFERRING.batch([0])
    for less in (replace(given, boxes=None, target=None), replace(given, labels=None)):
        with pytest.raises(ValueError, match=r"boxes.*labels"):
            target_boxes(less)


def test_network_reads_refcoco_with_true_and_detected_boxes(tmp_path):
    for photo in (7, 8):
        write_grey_photo(tmp_path / "coco/train2014" / f"COCO_train2014_{photo:012d}.jpg", (8, 8))
    data = write_refcoco(tmp_path, photo_input=PhotoInput((16, 16), stretch))
    given = add_special_tokens(data.batch(range(4)), BEGIN, END)
    torch.manual_seed(0)
    model = for_referring_expressions(
        VLBert(
            replace(SIZES, vocabulary=data.reader.size),
            region_encoder(),
            ClassificationHead(SIZES.width, 3),
        )
    )
    hit = box_accuracy(model(given).prediction, given.boxes, target_boxes(given), given.region_mask)
    assert hit.shape == (4,) and hit[3] == 1  # the only box of its photo
    entries = [
        {"image_id": 7, "box": [1, 2, 3, 3.5], "score": 0.9},
        {"image_id": 7, "box": [0, 0, 1, 1], "score": 0.1},
        {"image_id": 7, "box": [4, 0, 2, 2], "score": 0.8},
    ]
    boxes = read_detections(dump_json(tmp_path / "dets.json", entries), least=0.5)
    none = torch.zeros(0, 4)
    found = add_proposals(given, [boxes.get(one.photo, none) for one in data.expressions])
    assert matching_candidates(found).any(dim=1).tolist() == [True, True, True, False]
    assert model(found).prediction.isfinite().all()
    hit = box_accuracy(
        matching_candidates(found).float(), found.boxes, target_boxes(found), found.region_mask
    )
    assert hit[:3].tolist() == [1, 1, 1] and hit[3].isnan()  # the last has no detections
    loss = region_choice(model(found).prediction, matching_candidates(found), found.region_mask)
    assert int(loss.count) == 3 and loss.total.isfinite()


def test_official_refcoco_release_and_flat_file_agree(tmp_path):
    folder = tmp_path / "refcoco" / "refcoco+"
    dump_json(folder / "instances.json", {
        "images": [{"id": 7, "file_name": "COCO_train2014_000000000007.jpg"}],
        "annotations": [{"id": 1, "image_id": 7, "bbox": ENTRIES[0]["box"], "category_id": 1},
                        {"id": 2, "image_id": 7, "bbox": ENTRIES[1]["box"], "category_id": 1}],
        "categories": [{"id": 1, "name": "person"}],
    })  # fmt: skip
    dump_json(folder / "refs(unc).json", [
        {"split": "testA", "ann_id": number, "sentences": [{"sent_id": number, "sent": text}]}
        for number, text in ((1, "the man"), (2, "tall lady left"))
    ])  # fmt: skip
    official = refer(tmp_path, "testA", "refcoco+").batch([0, 1])
    dump_json(tmp_path / "refcoco" / "refcoco+_testA.json", ENTRIES[:2])
    plain = refcoco(tmp_path, count=None).batch([0, 1])
    assert torch.equal(target_boxes(official), target_boxes(plain))
    assert torch.equal(matching_candidates(official), matching_candidates(plain))


def test_training_on_true_boxes_increases_accuracy():
    """Accuracy at an IoU of 0.5 on the training expressions increases."""
    true = ReferringScenes("train", 1, 3, 32, 12, keep=only_true).batch(range(3))
    torch.manual_seed(0)
    model = for_referring_expressions(net())

    def accuracy() -> float:
        logits = model.eval()(true).prediction
        return float(box_accuracy(logits, true.boxes, target_boxes(true), true.region_mask).mean())

    before = accuracy()
    teach = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(40):
        teach.zero_grad()
        logits = model.train()(true).prediction
        region_choice(logits, matching_candidates(true), true.region_mask).mean().backward()
        teach.step()
    assert accuracy() > before + 0.2
