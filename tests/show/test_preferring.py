import html
import json
import re

import numpy as np
import pytest
import torch

from overt.errors import BadInput, Damaged
from overt.measure.preference import preferred
from overt.show.preferring import (
    ASPECTS,
    FORMAT,
    Pair,
    pairs_of,
    preference_page,
    read_judgements,
)
from overt.show.sample import Sample

GREY = np.full((40, 60, 3), 128, dtype=np.uint8)
PAIRS = [Pair(f"p{n}", GREY, f"a dog <{n}>", f"a brown dog & {n}") for n in range(12)]


@pytest.fixture
def written(tmp_path):
    page, key = tmp_path / "page.html", tmp_path / "key.json"
    preference_page(page, key, [*PAIRS, Pair("same", GREY, "a cat", "a cat ")], seed=3)
    return page.read_text(encoding="utf-8"), key


def answered(tmp_path, name, answers):
    entries = [{"pair": p, "aspect": a, "answer": said} for (p, a), said in answers.items()]
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"format": FORMAT, "answers": entries}), encoding="utf-8")
    return path


def test_the_page_shows_both_captions_and_hides_whose_they_are(written):
    page, key = written
    sides = json.loads(key.read_text(encoding="utf-8"))["first"]
    assert set(sides) == {pair.id for pair in PAIRS}  # equal captions are left out
    assert set(sides.values()) == {"left", "right"}
    shown = re.findall(r"<b>left</b> (.*?)</p>\s*<p><b>right</b> (.*?)</p>", page)
    names = re.findall(r'name="naturalness (p\d+)"', page)[::3]
    for name, (left, right) in zip(names, shown, strict=True):
        pair = next(one for one in PAIRS if one.id == name)
        said = [html.unescape(left), html.unescape(right)]
        expected = [pair.first, pair.second]
        assert said == (expected if sides[name] == "left" else expected[::-1])
    assert "first" not in page.split("<body>")[1].split("<script>")[0]
    assert names != sorted(names) and "http" not in re.sub(r"http-equiv", "", page)
    assert page.count('type="radio"') == 12 * 3 * len(ASPECTS)
    assert FORMAT in page and "default-src 'none'" in page


def test_judgements_come_back_by_pair_and_judge(written, tmp_path):
    _, key = written
    sides = json.loads(key.read_text(encoding="utf-8"))["first"]
    other = {"left": "right", "right": "left"}
    fan = {(pair, "richness"): other[side] for pair, side in sides.items()}
    doubter = {(pair, "richness"): "neither" for pair in list(sides)[:5]}
    doubter[list(sides)[5], "richness"] = sides[list(sides)[5]]
    found = read_judgements(
        key, [answered(tmp_path, "fan", fan), answered(tmp_path, "doubter", doubter)]
    )
    assert set(found) == set(ASPECTS) and found["naturalness"].isnan().all()
    assert torch.equal(found["richness"][:, 0], torch.ones(12))
    assert found["richness"][:6, 1].tolist() == [0, 0, 0, 0, 0, -1]
    assert found["richness"][6:, 1].isnan().all()
    table = preferred(found["richness"])
    assert (table.win, table.tie, table.lose) == (12 / 18, 5 / 18, 1 / 18)


def test_two_runs_make_pairs_of_the_pictures_they_share():
    def told(name, text, image=GREY):
        return Sample(id=name, image=image, text="", prediction=text)

    first = [told("a", "a dog"), told("b", "a cat"), told("c", "no picture", None)]
    second = [told("b", "a black cat"), told("c", "none"), told("d", "a bird")]
    (pair,) = pairs_of(first, second)
    assert (pair.id, pair.first, pair.second) == ("b", "a cat", "a black cat")


def test_bad_input_is_refused(written, tmp_path):
    _, key = written
    page, other = tmp_path / "page.html", tmp_path / "other.json"
    for pairs, aspects, problem in (
        ([PAIRS[0], PAIRS[0]], ASPECTS, "id of its own"),
        ([Pair("a", GREY, "a", "a")], ASPECTS, "nothing to prefer"),
        (PAIRS, {}, "no question"),
    ):
        with pytest.raises(BadInput, match=problem):
            preference_page(page, other, pairs, aspects)
    with pytest.raises(BadInput, match="does not ask"):
        read_judgements(key, [answered(tmp_path, "x", {("p99", "richness"): "left"})])
    with pytest.raises(BadInput, match="does not ask"):
        read_judgements(key, [answered(tmp_path, "x", {("p1", "richness"): "up"})])
    with pytest.raises(Damaged, match="no answers"):
        read_judgements(key, [key])


def test_a_judge_answers_in_a_browser_and_saves(written, tmp_path, open_page):
    _, key = written
    opened = open_page(tmp_path / "page.html", accept_downloads=True)
    assert "0 of 36 answered" in opened.inner_text("#rest")
    for answer in ("left", "right"):  # the second click takes the first back
        opened.check(f'input[data-pair="p3"][data-aspect="relevance"][value="{answer}"]')
    assert "1 of 36 answered" in opened.inner_text("#rest")
    with opened.expect_download() as started:
        opened.click("#save")
    started.value.save_as(tmp_path / "answers.json")
    found = read_judgements(key, [tmp_path / "answers.json"])
    sides = json.loads(key.read_text(encoding="utf-8"))["first"]
    row = list(sides).index("p3")
    assert float(found["relevance"][row, 0]) == (-1 if sides["p3"] == "right" else 1)
    assert sum(int((~one.isnan()).sum()) for one in found.values()) == 1
