import base64
import io
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from overt.data.scenes.captions import captions
from overt.data.scenes.gallery import SAMPLES, gallery, outline, overview, phrased
from overt.data.scenes.posing import pose
from overt.data.scenes.referring import expressions
from overt.data.scenes.render import render
from overt.data.scenes.sentences import sentence
from overt.errors import BadInput

EMPTY = {"meta", "br", "image", "path", "circle", "use"}


class Reading(HTMLParser):
    """Checks that what opens closes, and keeps the tags and the text."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.lines = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.lines.append(data)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "scenes.html"
    gallery(path, "test", 0, 2, size=64)
    return path.read_text()


@pytest.fixture(scope="module")
def reading(page):
    found = Reading()
    found.feed(page)
    assert found.open == []
    return found


def test_the_page_stands_alone(page, reading):
    assert not {"script", "link", "iframe", "a", "img"} & {tag for tag, _ in reading.tags}
    links = [
        value for _, attrs in reading.tags for n, value in attrs.items() if n in ("href", "src")
    ]
    assert links and all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    assert "url(" not in page and "@import" not in page and "default-src 'none'" in page


def test_it_suits_phones_dark_rooms_and_readers(page, reading):
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page
    assert ("html", {"lang": "en"}) in reading.tags
    drawings = [attrs for tag, attrs in reading.tags if tag == "svg"]
    assert drawings and all(d["role"] == "img" and d["aria-label"].strip() for d in drawings)


def test_all_that_is_known_of_a_scene_is_there(page, reading):
    text = " ".join("".join(reading.lines).split())
    for index in range(2):
        shown, questions = pose("test", 0, index)
        assert page.count(overview(shown)) == 1
        for question in questions:
            assert f"{' '.join(question.words)}? {question.answer}" in text
        for said in (*captions(shown), *expressions(shown)):
            assert phrased(said.text, said.spans, said.phrases) in page
    assert sentence("test", 0, 0).text in text


def test_images_are_the_scenes_to_the_pixel(reading):
    images = [attrs for tag, attrs in reading.tags if tag == "image"]
    assert len(images) == 2 * 2 + SAMPLES  # a scene and its negative, and the dominant ones
    named = {attrs["id"]: attrs["href"] for attrs in images if "id" in attrs}
    assert set(named) == {"test-0-000000", "test-0-000001"}
    for index in range(2):
        data = base64.b64decode(named[f"test-0-00000{index}"].split(",")[1])
        shown, _ = pose("test", 0, index)
        np.testing.assert_array_equal(
            np.asarray(Image.open(io.BytesIO(data))), render(shown, 64).image
        )
    used = [attrs["href"].removeprefix("#") for tag, attrs in reading.tags if tag == "use"]
    assert set(used) == set(named)


def test_an_outline_by_hand():
    mask = np.zeros((4, 5), bool)
    mask[1:3, 1:4] = True
    lines = {line.strip() for line in outline(mask).split("M")[1:]}
    assert lines == {"1 1h3", "1 3h3", "1 1v2", "4 1v2"}


def test_the_outline_is_as_long_as_the_border_of_the_mask():
    for mask in render(pose("test", 0, 0)[0], 48).masks:
        padded = np.pad(mask, 1).astype(int)
        border = np.abs(np.diff(padded, axis=0)).sum() + np.abs(np.diff(padded, axis=1)).sum()
        parts = outline(mask).replace("v", "h").split("M")[1:]
        assert sum(int(part.split("h")[1]) for part in parts) == border


def test_marks_are_escaped_and_the_page_is_the_same_again(tmp_path, page):
    assert phrased("<b> & c", ((0, 3), (4, 5), (6, 7)), ()) == "&lt;b&gt; &amp; c"
    gallery(tmp_path / "again.html", "test", 0, 2, size=64)
    assert (tmp_path / "again.html").read_text() == page


def test_no_scenes_make_no_page(tmp_path):
    with pytest.raises(BadInput):
        gallery(tmp_path / "none.html", "test", 0, 0)
    assert not (tmp_path / "none.html").exists()
