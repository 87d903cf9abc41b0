import html
import json
import re

import numpy as np
import pytest
import torch

from overt.errors import CorruptFileError, UserError
from overt.metrics.preference import summarize_preferences
from overt.viz.gallery_sample import GallerySample
from overt.viz.preferences import (
    ASPECTS,
    FORMAT,
    CaptionPair,
    caption_pairs,
    read_judgements,
    write_preference_page,
)

GREY = np.full((40, 60, 3), 128, dtype=np.uint8)
PAIRS = [CaptionPair(f"p{n}", GREY, f"a dog <{n}>", f"a brown dog & {n}") for n in range(12)]


@pytest.fixture
def page_and_key(tmp_path):
    page, key = tmp_path / "page.html", tmp_path / "key.json"
    write_preference_page(page, key, [*PAIRS, CaptionPair("same", GREY, "a cat", "a cat ")], seed=3)
    return page.read_text(encoding="utf-8"), key


def write_answers(tmp_path, name, answers):
    entries = [{"pair": p, "aspect": a, "answer": answer} for (p, a), answer in answers.items()]
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"format": FORMAT, "answers": entries}), encoding="utf-8")
    return path


def test_page_shows_both_captions_without_their_source(page_and_key):
    page, key = page_and_key
    sides = json.loads(key.read_text(encoding="utf-8"))["first"]
    assert set(sides) == {pair.id for pair in PAIRS}  # equal captions are left out
    assert set(sides.values()) == {"left", "right"}
    shown = re.findall(r"<b>left</b> (.*?)</p>\s*<p><b>right</b> (.*?)</p>", page)
    names = re.findall(r'name="naturalness (p\d+)"', page)[::3]
    for name, (left, right) in zip(names, shown, strict=True):
        pair = next(one for one in PAIRS if one.id == name)
        captions = [html.unescape(left), html.unescape(right)]
        expected = [pair.first, pair.second]
        assert captions == (expected if sides[name] == "left" else expected[::-1])
    assert "first" not in page.split("<body>")[1].split("<script>")[0]
    assert names != sorted(names) and "http" not in re.sub(r"http-equiv", "", page)
    assert page.count('type="radio"') == 12 * 3 * len(ASPECTS)
    assert FORMAT in page and "default-src 'none'" in page


def test_judgements_are_read_by_pair_and_judge(page_and_key, tmp_path):
    _, key = page_and_key
    sides = json.loads(key.read_text(encoding="utf-8"))["first"]
    other = {"left": "right", "right": "left"}
    fan = {(pair, "richness"): other[side] for pair, side in sides.items()}
    doubter = {(pair, "richness"): "neither" for pair in list(sides)[:5]}
    doubter[list(sides)[5], "richness"] = sides[list(sides)[5]]
    found = read_judgements(
        key, [write_answers(tmp_path, "fan", fan), write_answers(tmp_path, "doubter", doubter)]
    )
    assert set(found) == set(ASPECTS) and found["naturalness"].isnan().all()
    assert torch.equal(found["richness"][:, 0], torch.ones(12))
    assert found["richness"][:6, 1].tolist() == [0, 0, 0, 0, 0, -1]
    assert found["richness"][6:, 1].isnan().all()
    table = summarize_preferences(found["richness"])
    assert (table.win, table.tie, table.lose) == (12 / 18, 5 / 18, 1 / 18)


def test_caption_pairs_contain_the_shared_images_of_two_runs():
    def make_sample(name, text, image=GREY):
        return GallerySample(id=name, image=image, text="", prediction=text)

    first = [
        make_sample("a", "a dog"),
        make_sample("b", "a cat"),
        make_sample("c", "no picture", None),
    ]
    second = [make_sample("b", "a black cat"), make_sample("c", "none"), make_sample("d", "a bird")]
    (pair,) = caption_pairs(first, second)
    assert (pair.id, pair.first, pair.second) == ("b", "a cat", "a black cat")


def test_invalid_pairs_and_answers_raise(page_and_key, tmp_path):
    _, key = page_and_key
    page, other = tmp_path / "page.html", tmp_path / "other.json"
    for pairs, aspects, problem in (
        ([PAIRS[0], PAIRS[0]], ASPECTS, "unique ids"),
        ([CaptionPair("a", GREY, "a", "a")], ASPECTS, "different captions"),
        (PAIRS, {}, "aspects is empty"),
    ):
        with pytest.raises(UserError, match=problem):
            write_preference_page(page, other, pairs, aspects)
    with pytest.raises(UserError, match="not belong"):
        read_judgements(key, [write_answers(tmp_path, "x", {("p99", "richness"): "left"})])
    with pytest.raises(UserError, match="not belong"):
        read_judgements(key, [write_answers(tmp_path, "x", {("p1", "richness"): "up"})])
    with pytest.raises(CorruptFileError, match=r"file.*answers"):
        read_judgements(key, [key])


@pytest.mark.long
def test_answers_are_given_and_saved_in_a_browser(page_and_key, tmp_path, open_page):
    _, key = page_and_key
    page = open_page(tmp_path / "page.html", accept_downloads=True)
    assert "0 of 36 answered" in page.inner_text("#rest")
    for answer in ("left", "right"):  # the second click replaces the first
        page.check(f'input[data-pair="p3"][data-aspect="relevance"][value="{answer}"]')
    assert "1 of 36 answered" in page.inner_text("#rest")
    with page.expect_download() as started:
        page.click("#save")
    started.value.save_as(tmp_path / "answers.json")
    found = read_judgements(key, [tmp_path / "answers.json"])
    sides = json.loads(key.read_text(encoding="utf-8"))["first"]
    row = list(sides).index("p3")
    assert float(found["relevance"][row, 0]) == (-1 if sides["p3"] == "right" else 1)
    assert sum(int((~one.isnan()).sum()) for one in found.values()) == 1
