import base64
import io
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from overt.data.scenes.balanced_questions import generate_scene
from overt.data.scenes.browse_page import SAMPLES, describe_scene, outline, phrased, write_gallery
from overt.data.scenes.captions import make_captions
from overt.data.scenes.referring_expressions import make_expressions
from overt.data.scenes.render import render
from overt.data.scenes.sentences import make_sentence
from overt.errors import UserError

EMPTY = {"meta", "br", "image", "path", "circle", "use"}


class PageParser(HTMLParser):
    """Checks that every opened tag is closed, and stores the tags and the text."""

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
    write_gallery(path, "test", 0, 2, size=64)
    return path.read_text()


@pytest.fixture(scope="module")
def parsed(page):
    found = PageParser()
    found.feed(page)
    assert found.open == []
    return found


def test_page_is_self_contained(page, parsed):
    assert not {"script", "link", "iframe", "a", "img"} & {tag for tag, _ in parsed.tags}
    links = [
        value for _, attrs in parsed.tags for n, value in attrs.items() if n in ("href", "src")
    ]
    assert links and all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    assert "url(" not in page and "@import" not in page and "default-src 'none'" in page


def test_page_is_accessible_and_has_a_dark_mode(page, parsed):
    assert 'name="viewport"' in page and "prefers-color-scheme: dark" in page
    assert ("html", {"lang": "en"}) in parsed.tags
    drawings = [attrs for tag, attrs in parsed.tags if tag == "svg"]
    assert drawings and all(d["role"] == "img" and d["aria-label"].strip() for d in drawings)


def test_page_contains_questions_captions_and_expressions(page, parsed):
    text = " ".join("".join(parsed.lines).split())
    for index in range(2):
        shown, questions = generate_scene("test", 0, index)
        assert page.count(describe_scene(shown)) == 1
        for question in questions:
            assert f"{' '.join(question.words)}? {question.answer}" in text
        for caption in (*make_captions(shown), *make_expressions(shown)):
            assert phrased(caption.text, caption.spans, caption.phrases) in page
    assert make_sentence("test", 0, 0).text in text


def test_images_equal_the_rendered_scenes(parsed):
    images = [attrs for tag, attrs in parsed.tags if tag == "image"]
    # each scene with its negative, and the scenes with a dominant object
    assert len(images) == 2 * 2 + SAMPLES
    named = {attrs["id"]: attrs["href"] for attrs in images if "id" in attrs}
    assert set(named) == {"test-0-000000", "test-0-000001"}
    for index in range(2):
        data = base64.b64decode(named[f"test-0-00000{index}"].split(",")[1])
        shown, _ = generate_scene("test", 0, index)
        np.testing.assert_array_equal(
            np.asarray(Image.open(io.BytesIO(data))), render(shown, 64).image
        )
    used = [attrs["href"].removeprefix("#") for tag, attrs in parsed.tags if tag == "use"]
    assert set(used) == set(named)


def test_outline_matches_hand_computed_lines():
    mask = np.zeros((4, 5), bool)
    mask[1:3, 1:4] = True
    lines = {line.strip() for line in outline(mask).split("M")[1:]}
    assert lines == {"1 1h3", "1 3h3", "1 1v2", "4 1v2"}


def test_outline_has_the_length_of_the_mask_border():
    for mask in render(generate_scene("test", 0, 0)[0], 48).masks:
        padded = np.pad(mask, 1).astype(int)
        border = np.abs(np.diff(padded, axis=0)).sum() + np.abs(np.diff(padded, axis=1)).sum()
        parts = outline(mask).replace("v", "h").split("M")[1:]
        assert sum(int(part.split("h")[1]) for part in parts) == border


def test_text_is_escaped_and_the_page_is_deterministic(tmp_path, page):
    assert phrased("<b> & c", ((0, 3), (4, 5), (6, 7)), ()) == "&lt;b&gt; &amp; c"
    write_gallery(tmp_path / "again.html", "test", 0, 2, size=64)
    assert (tmp_path / "again.html").read_text() == page


def test_empty_gallery_raises_and_writes_no_page(tmp_path):
    with pytest.raises(UserError):
        write_gallery(tmp_path / "none.html", "test", 0, 0)
    assert not (tmp_path / "none.html").exists()
