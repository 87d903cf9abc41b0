"""Questions and referring expressions after training: networks, regions and candidates for them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from overt.data.asked import Look
from overt.data.batch import Batch
from overt.data.detections import read_detections
from overt.data.images import stretch
from overt.data.phrases import refcoco, refer
from overt.data.scenes.proposals import only_detected, only_true
from overt.data.scenes.referring import ReferringScenes
from overt.data.scenes.store import Scenes
from overt.data.vocabulary import BEGIN, END
from overt.data.vqa import V2, Vqa
from overt.measure import located
from overt.models.vlbert.downstream import (
    boxed,
    fitting,
    for_expressions,
    for_questions,
    gridded,
    meant,
    proposed,
)
from overt.models.vlbert.marks import marked
from overt.models.vlbert.model import Classify, Point, VLBert
from overt.models.vlbert.regions import GivenRegions
from overt.supervise import classification, soft_classification
from overt.supervise.grounding import choice, direct
from overt.testing import check_model
from tests.data import vqa_files
from tests.data.test_phrases import ENTRIES, dump, flat
from tests.models.vlbert.scenes import SIZES, batch, eye, net, pairs, pointing

REFERRING = ReferringScenes("train", 0, 6, size=32, regions=12)


def same_trunk(one: VLBert, other: VLBert) -> bool:
    theirs = other.state_dict()
    return all(
        torch.equal(value, theirs[name])
        for name, value in one.state_dict().items()
        if not name.startswith(("answer.", "relates."))
    )


# --- networks


def test_questions_keep_the_trunk_and_the_pooled_class_token():
    before = net()
    after = for_questions(before, 7, dropout=0.0)
    assert same_trunk(before, after) and after.relations == 0
    assert after(batch()).prediction.shape == (4, 7)
    assert torch.equal(after.answer.pool.weight, before.answer.pool.weight)
    assert not torch.equal(
        for_questions(pointing(), 7).answer.pool.weight, after.answer.pool.weight
    )
    with torch.no_grad():
        after.word.weight.zero_()
    assert before.word.weight.any()  # a copy


def test_expressions_keep_the_trunk_and_choose_regions():
    before = net()
    after = for_expressions(before)
    assert same_trunk(before, after) and isinstance(after.answer, Point)
    assert after(REFERRING.batch([0])).prediction.shape[1] == 12


@pytest.mark.parametrize("make", [lambda: for_questions(net(), 4), lambda: for_expressions(net())],
                         ids=["questions", "expressions"])  # fmt: skip
def test_they_keep_the_contract_and_come_back_from_disk(make, tmp_path):
    def again() -> VLBert:
        torch.manual_seed(0)
        return make()

    check_model(again, replace(batch(), region_mask=None, target=None))
    model = again().eval()
    model.save_pretrained(tmp_path / "model")
    read = VLBert.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(read(batch()).prediction, model(batch()).prediction)


# --- questions


def test_questions_about_scenes_see_the_boxes_of_things(tmp_path):
    data = Scenes("train", 0, 3, size=32, cache=tmp_path, workers=1)
    indices = [2, 0]
    asked = marked(data.batch(indices), BEGIN, END)
    one = [data.boxes(index) for index in indices]
    given = boxed(asked, [one[at] for at in asked.image_index])
    most = max(map(len, one))
    assert given.boxes.shape == (8, most, 4) and given.region_mask.shape == (8, most)
    for row, at in enumerate(given.image_index.tolist()):
        assert torch.equal(given.boxes[row][given.region_mask[row]], one[at])
    model = for_questions(net(), len(data.answers))
    loss = classification(model(given).prediction, given.labels).mean()
    loss.backward()
    assert loss.isfinite() and model.word.weight.grad.any()
    with pytest.raises(ValueError, match="2 lists of boxes for 8 samples"):
        boxed(asked, one)


def test_a_grid_lies_on_what_the_model_sees():
    given = gridded(replace(pairs().batch(range(2)), boxes=None, region_mask=None), (2, 4))
    assert given.region_mask.all() and given.boxes.shape == (2, 8, 4)
    assert given.boxes[0, 0].tolist() == [0, 0, 8, 16]
    assert given.boxes[0, -1].tolist() == [24, 16, 32, 32]
    half = replace(given, geometry=given.geometry.pad(32, 0, 0, 0))
    assert gridded(half, (2, 2)).region_mask.tolist() == [[False, False, True, True]] * 2


def test_cached_cells_need_no_photo():
    words = pairs().batch(range(2))
    given = Batch(words.ids, tokens=words.tokens, token_mask=words.token_mask,
                  features=torch.randn(2, 6, 5))  # fmt: skip
    torch.manual_seed(0)
    model = for_questions(VLBert(SIZES, GivenRegions(5), Classify(SIZES.width, 3)), 9)
    assert model(gridded(given, (2, 3))).prediction.shape == (2, 9)
    with pytest.raises(ValueError, match="6 cells do not fill a grid of 2 x 2"):
        gridded(given, (2, 2))
    with pytest.raises(ValueError, match="nothing to lay a grid on"):
        gridded(replace(given, features=None), (2, 3))


def grey(path: Path, size: tuple[int, int] = (6, 8), value: int = 100) -> Path:
    """A photo of one grey, in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), value, dtype=np.uint8)).save(path)
    return path


def test_vqa_v2_in_its_official_files_feeds_a_network(tmp_path):
    vqa_files.write(tmp_path, grey)
    data = Vqa(tmp_path, "train", replace(V2, questions={}), look=Look((12, 12), stretch))
    given = gridded(marked(data.batch(range(4)), BEGIN, END), (3, 3))
    torch.manual_seed(0)
    start = VLBert(replace(SIZES, vocabulary=data.reader.size), eye(), Classify(SIZES.width, 3))
    model = for_questions(start, len(data.classes), dropout=0.0)
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


def test_what_is_meant_is_known_whether_it_is_a_candidate_or_not():
    every, true, found = (
        REFERRING.batch(range(6)),
        ReferringScenes("train", 0, 6, 32, 12, keep=only_true).batch(range(6)),
        ReferringScenes("train", 0, 6, 32, 12, keep=only_detected).batch(range(6)),
    )
    assert torch.equal(meant(every), meant(true)) and torch.equal(meant(every), meant(found))
    rows = torch.arange(len(every))
    assert fitting(every)[rows, every.labels].all() and fitting(true)[rows, true.labels].all()
    assert not fitting(found)[rows, found.labels].any()
    assert torch.equal(fitting(true) | fitting(found), fitting(every))
    reachable = fitting(found).any(dim=-1).double().mean()
    assert 0.2 < float(reachable) < 1  # some things were not found well enough


def test_a_hidden_box_changes_nothing_and_cannot_be_chosen():
    found = ReferringScenes("train", 0, 6, 32, 12, keep=only_detected).batch(range(6))
    model = for_expressions(net()).eval()
    logits = model(found).prediction
    other = torch.where(found.region_mask[..., None], found.boxes, found.boxes.flip(-2))
    torch.testing.assert_close(model(replace(found, boxes=other)).prediction, logits)
    assert found.region_mask.gather(1, logits.argmax(dim=1, keepdim=True)).all()
    perfect = fitting(found).float()
    hit = located(perfect, found.boxes, meant(found), found.region_mask)
    torch.testing.assert_close(hit, fitting(found).any(dim=-1).to(hit.dtype))


def test_true_boxes_judge_as_the_choice_of_one():
    true = ReferringScenes("train", 0, 6, 32, 12, keep=only_true).batch(range(6))
    logits = torch.randn(len(true), 12, generator=torch.Generator().manual_seed(3))
    chosen = logits.masked_fill(~true.region_mask, -torch.inf).argmax(dim=1)
    hit = located(logits, true.boxes, meant(true), true.region_mask)
    overlapping = fitting(true).sum(dim=1) > 1
    right = (chosen == true.labels).to(hit.dtype)
    assert torch.equal(hit[~overlapping], right[~overlapping]) and (hit >= right).all()


def slow_proposed(given: Batch, detected: list, sample: int, word: int) -> list[float]:
    """Where a word should look among detected boxes, box by box."""
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


def test_detected_boxes_take_the_place_of_true_ones():
    given = ReferringScenes("train", 0, 3, 32, 12, keep=only_true).batch(range(3))
    generator = torch.Generator().manual_seed(1)
    detected = []
    for row in range(len(given)):
        true = given.boxes[row][given.region_mask[row]]
        noise = 3 * torch.randn(true.shape, generator=generator)
        detected.append((true + noise)[: 1 + row % 4])
    found = proposed(given, detected)
    assert found.boxes.shape == (len(given), 12 + 4, 4) and not found.region_mask[:, :12].any()
    assert torch.equal(meant(found), meant(given)) and found.target.queries is given.target.queries
    found.target.check()
    for row in range(len(given)):
        count = len(detected[row])
        assert torch.equal(found.boxes[row, 12 : 12 + count], detected[row])
        assert found.region_mask[row, 12:].tolist() == [at < count for at in range(4)]
        for word in range(given.tokens.shape[1]):
            weights = found.target.weights[row, 0, 0, word]
            assert not weights[:12].any() and not weights[12 + count :].any()
            assert weights[12 : 12 + count].tolist() == pytest.approx(
                slow_proposed(given, detected, row, word)
            )
    model = for_expressions(net())
    output = model(found)
    losses = [
        choice(output.prediction, fitting(found), found.region_mask),
        *direct(output.seen.log_block, found.target, words=output.features.words).values(),
    ]
    sum(loss.mean() for loss in losses).backward()
    assert model.word.weight.grad.isfinite().all()


def test_expressions_need_boxes_and_labels():
    given = REFERRING.batch([0])
    for less in (replace(given, boxes=None, target=None), replace(given, labels=None)):
        with pytest.raises(ValueError, match="boxes and labels that name the true ones"):
            meant(less)


def test_refcoco_in_its_files_feeds_a_network_with_true_and_detected_boxes(tmp_path):
    for photo in (7, 8):
        grey(tmp_path / "coco/train2014" / f"COCO_train2014_{photo:012d}.jpg", (8, 8))
    data = flat(tmp_path, look=Look((16, 16), stretch))
    given = marked(data.batch(range(4)), BEGIN, END)
    torch.manual_seed(0)
    model = for_expressions(
        VLBert(replace(SIZES, vocabulary=data.reader.size), eye(), Classify(SIZES.width, 3))
    )
    hit = located(model(given).prediction, given.boxes, meant(given), given.region_mask)
    assert hit.shape == (4,) and hit[3] == 1  # the only box of its photo
    entries = [
        {"image_id": 7, "box": [1, 2, 3, 3.5], "score": 0.9},
        {"image_id": 7, "box": [0, 0, 1, 1], "score": 0.1},
        {"image_id": 7, "box": [4, 0, 2, 2], "score": 0.8},
    ]
    boxes = read_detections(dump(tmp_path / "dets.json", entries), least=0.5)
    none = torch.zeros(0, 4)
    found = proposed(given, [boxes.get(one.photo, none) for one in data.expressions])
    assert fitting(found).any(dim=1).tolist() == [True, True, True, False]
    assert model(found).prediction.isfinite().all()
    hit = located(fitting(found).float(), found.boxes, meant(found), found.region_mask)
    assert hit[:3].tolist() == [1, 1, 1] and hit[3].isnan()  # nothing was found on the last
    loss = choice(model(found).prediction, fitting(found), found.region_mask)
    assert int(loss.count) == 3 and loss.total.isfinite()


def test_the_official_release_and_the_flat_file_agree(tmp_path):
    folder = tmp_path / "refcoco" / "refcoco+"
    dump(folder / "instances.json", {
        "images": [{"id": 7, "file_name": "COCO_train2014_000000000007.jpg"}],
        "annotations": [{"id": 1, "image_id": 7, "bbox": ENTRIES[0]["box"], "category_id": 1},
                        {"id": 2, "image_id": 7, "bbox": ENTRIES[1]["box"], "category_id": 1}],
        "categories": [{"id": 1, "name": "person"}],
    })  # fmt: skip
    dump(folder / "refs(unc).json", [
        {"split": "testA", "ann_id": number, "sentences": [{"sent_id": number, "sent": text}]}
        for number, text in ((1, "the man"), (2, "tall lady left"))
    ])  # fmt: skip
    official = refer(tmp_path, "testA", "refcoco+").batch([0, 1])
    dump(tmp_path / "refcoco" / "refcoco+_testA.json", ENTRIES[:2])
    plain = refcoco(tmp_path, count=None).batch([0, 1])
    assert torch.equal(meant(official), meant(plain))
    assert torch.equal(fitting(official), fitting(plain))


def test_a_few_steps_find_what_is_meant_better_than_before():
    """Training on true boxes raises accuracy at an overlap of a half on the same expressions."""
    true = ReferringScenes("train", 1, 3, 32, 12, keep=only_true).batch(range(3))
    torch.manual_seed(0)
    model = for_expressions(net())

    def accuracy() -> float:
        logits = model.eval()(true).prediction
        return float(located(logits, true.boxes, meant(true), true.region_mask).mean())

    before = accuracy()
    teach = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(40):
        teach.zero_grad()
        logits = model.train()(true).prediction
        choice(logits, fitting(true), true.region_mask).mean().backward()
        teach.step()
    assert accuracy() > before + 0.2
