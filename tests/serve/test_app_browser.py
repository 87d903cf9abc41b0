"""The inspector in a real browser, against a running server: what a person does, step by step."""

import base64
import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from overt.serve.app import make
from overt.serve.line import Line
from overt.serve.shelf import Shelf, offer
from tests.recipes import foreign
from tests.serve.conftest import PHOTO, write_boxes, write_captioner, write_hard, write_run
from tests.serve.running import LONG, PATIENCE, served

pytestmark = pytest.mark.long
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
LIMIT = 1000 * PATIENCE
FLAGS = (
    "--no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SHOTS = Path(__file__).parents[2] / "build" / "shots"
QUESTION = "what colour is the ball"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("served")
    write_run(made / "average", attends=False)
    write_run(made / "soft")
    for write, name in ((write_hard, "hard"), (write_boxes, "boxes"), (write_captioner, "teller")):
        write(made / "others" / name)
    foreign.gpt2(made / "gpt2")
    return made


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    shelf = Shelf(offer([str(folder), str(folder / "others"), str(folder / "gpt2")]))
    with served(make(shelf, line=Line(patience=LONG))) as at:
        yield at


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.skip("no chromium is installed: the inspector was not opened in a browser")
    expect.set_options(timeout=LIMIT)
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=found, args=FLAGS, timeout=LIMIT)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, opened; at the end a screenshot is kept, and errors and foreign requests fail."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(LIMIT)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on(
        "request",
        lambda asked: (
            None if asked.url.startswith((address, "data:", "blob:")) else wrong.append(asked.url)
        ),
    )
    opened.goto(address, timeout=LIMIT)
    expect(opened.locator(".reply .panel").first).to_be_visible()  # the first example, by itself
    yield opened
    SHOTS.mkdir(parents=True, exist_ok=True)
    opened.screenshot(path=SHOTS / f"{request.node.name}.png", timeout=LIMIT)
    context.close()
    assert wrong == []


Do = Callable[[], None]


def answered(page: Any, do: Do) -> None:
    """Do something that asks, and wait for the answer to it."""
    with page.expect_response("**/api/ask", timeout=LIMIT) as waiting:
        do()
    assert waiting.value.ok, waiting.value.text()
    expect(page.locator("#busy")).to_contain_text("Answered")


def upload(page: Any, tmp_path: Path) -> None:
    Image.fromarray(PHOTO).save(tmp_path / "photo.png")
    page.set_input_files("#file", tmp_path / "photo.png")
    expect(page.locator("#preview")).to_be_visible()


def own(page: Any, tmp_path: Path) -> None:
    """A picture and a question of one's own, asked."""
    upload(page, tmp_path)
    page.fill("#text", QUESTION)
    answered(page, lambda: page.click("#go"))


def choose(page: Any, model: str) -> None:
    """Another model and its first example, which is asked."""
    with page.expect_response("**/api/examples*", timeout=LIMIT):
        page.select_option("#model", model)
    expect(page.locator("#shelf button")).to_have_count(1)
    answered(page, page.locator("#shelf button").first.click)
    expect(page.locator(".reply h2").first).to_have_text(model)


def test_the_page_begins_with_an_answered_example(page: Any):
    expect(page.locator(".reply .chances li")).to_have_count(3)
    expect(page.locator(".reply .panel")).to_have_count(2)
    expect(page.locator(".reply .said")).to_contain_text("It answers")
    answered(page, lambda: page.locator("#shelf button").nth(1).click())


def test_a_picture_and_a_question_of_ones_own(page: Any, tmp_path: Path):
    own(page, tmp_path)
    expect(page.locator(".reply h2").first).to_have_text("soft")
    expect(page.locator(".reply .chances li").first).to_contain_text("%")


def test_a_picture_can_be_dropped(page: Any, tmp_path: Path):
    Image.fromarray(PHOTO[:, ::-1]).save(tmp_path / "dropped.png")
    data = base64.b64encode((tmp_path / "dropped.png").read_bytes()).decode()
    before = page.get_attribute("#preview", "src")
    page.evaluate(
        """(data) => {
          const bytes = Uint8Array.from(atob(data), (sign) => sign.charCodeAt(0));
          const moved = new DataTransfer();
          moved.items.add(new File([bytes], "dropped.png", { type: "image/png" }));
          const drop = document.getElementById("drop");
          const about = { dataTransfer: moved, bubbles: true, cancelable: true };
          drop.dispatchEvent(new DragEvent("drop", about));
        }""",
        data,
    )
    expect(page.locator("#preview")).not_to_have_attribute("src", before)
    assert page.get_attribute("#preview", "src").endswith(data)
    answered(page, lambda: page.click("#go"))


def test_a_word_and_a_part_of_the_picture_can_be_taken_away(page: Any, tmp_path: Path):
    own(page, tmp_path)
    page.check("#removing")
    word = page.locator(".reply .text .token", has_text="colour")
    answered(page, word.click)
    expect(page.locator(".reply .token.gone")).to_have_count(1)
    expect(page.locator(".reply .change").first).to_be_visible()
    answered(page, page.locator(".reply .picture").first.click)  # in its middle
    expect(page.locator(".reply .picture .gone")).to_have_count(1)
    expect(page.locator("#removed")).to_contain_text("1 part of the picture and 1 word")
    answered(page, lambda: page.click("#restore"))
    expect(page.locator(".reply .gone")).to_have_count(0)


def test_head_and_method_can_be_chosen(page: Any, tmp_path: Path):
    own(page, tmp_path)
    page.locator(".reply select.head").first.select_option("1")
    expect(page.locator(".reply .now").first).to_contain_text("head 1")
    for method, title in (("gradient", "by gradient"), ("search", "by search")):
        page.select_option("#map", method)
        answered(page, lambda: page.click("#go"))
        expect(page.locator(".reply .panel h2").first).to_contain_text(title)


def test_two_models_stand_side_by_side(page: Any, tmp_path: Path):
    upload(page, tmp_path)
    page.fill("#text", QUESTION)
    page.select_option("#other", "average")
    page.click("#go")
    expect(page.locator(".reply")).to_have_count(2)
    boxes = [page.locator(".reply").nth(n).bounding_box() for n in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]


def test_code_and_picture_can_be_taken_along(
    page: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own(page, tmp_path)
    page.click("text=Copy as Python")
    expect(page.locator(".reply pre")).to_be_visible()
    with page.expect_download(timeout=LIMIT) as waiting:
        page.click("text=Download picture")
    waiting.value.save_as(tmp_path / "attention.png")
    assert waiting.value.suggested_filename == "attention.png"
    assert Image.open(tmp_path / "attention.png").size[0] > 400
    with page.expect_download(timeout=LIMIT) as waiting:
        page.click("text=Save photo.png")
    waiting.value.save_as(tmp_path / "photo.png")
    (tmp_path / "shown.py").write_text(page.inner_text(".reply pre"))
    monkeypatch.chdir(tmp_path)
    seen = runpy.run_path("shown.py")["seen"]  # the five lines, as they were copied
    chance = page.locator(".reply .chances li").first.inner_text()
    assert f"{100 * seen.answers[0][1]:.1f} %" in chance and seen.answers[0][0] in chance


def test_hard_attention_shows_the_cells_it_keeps(page: Any):
    choose(page, "hard")
    expect(page.locator(".reply .now").first).to_contain_text("looks at 5 of 64 cells")
    canvas = page.locator(".reply canvas.kept")
    dark = canvas.evaluate(
        """(one) => {
          const all = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
          let found = 0;
          for (let n = 3; n < all.length; n += 4) found += all[n] > 0;
          return found / (all.length / 4);
        }"""
    )
    assert dark == pytest.approx(59 / 64, abs=1e-3)  # what is not kept is covered


def test_boxes_can_be_drawn_and_a_word_points_at_them(page: Any):
    choose(page, "boxes")
    expect(page.locator(".reply .region")).to_have_count(16)
    expect(page.locator(".reply .chances li")).to_have_count(3)
    page.locator(".reply .text .token", has_text="ball").first.click()
    expect(page.locator(".reply .now").first).to_contain_text("“ball” looks most at “box")
    frame = page.locator("#preview").bounding_box()
    for left, right in ((0.1, 0.4), (0.5, 0.9)):
        page.mouse.move(frame["x"] + left * frame["width"], frame["y"] + 0.2 * frame["height"])
        page.mouse.down()
        page.mouse.move(frame["x"] + right * frame["width"], frame["y"] + 0.8 * frame["height"])
        page.mouse.up()
    expect(page.locator("#drawn div")).to_have_count(2)
    answered(page, lambda: page.click("#go"))
    expect(page.locator(".reply .region")).to_have_count(2)
    page.check("#removing")
    answered(page, page.locator(".reply .region").first.click)
    expect(page.locator(".reply .picture .gone")).to_have_count(1)
    page.fill("#boxes", "10 20 30")
    page.click("#go")
    expect(page.locator("#problem")).to_contain_text("A box is four numbers")


def test_a_captioner_writes_and_each_word_has_its_map(page: Any):
    choose(page, "teller")
    expect(page.locator(".reply .said")).to_contain_text("It writes")
    words = page.locator(".reply .text .token")
    said = page.locator(".reply .said b").inner_text()
    assert said == " ".join(words.all_inner_texts())
    words.nth(1).click()
    expect(page.locator(".reply .now").first).to_contain_text(f"“{said.split()[1]}” looks most")
    page.fill("#text", "the red ball")
    answered(page, lambda: page.click("#go"))
    expect(page.locator(".reply .text .token")).to_have_count(3)


def test_by_keyboard_alone(page: Any):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("#shelf button")
    answered(page, lambda: page.keyboard.press("Enter"))
    page.focus("#removing")
    page.keyboard.press("Space")
    page.focus(".reply .picture")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    answered(page, lambda: page.keyboard.press("Enter"))
    expect(page.locator(".reply .picture .gone")).to_have_count(1)
    page.focus(".reply .text .token")
    answered(page, lambda: page.keyboard.press("Enter"))
    expect(page.locator(".reply .token.gone")).to_have_count(1)
    page.focus("#text")
    answered(page, lambda: page.keyboard.press("Enter"))  # asks


def test_a_bad_upload_is_told_and_nothing_is_lost(page: Any, tmp_path: Path):
    own(page, tmp_path)
    (tmp_path / "bad.png").write_bytes(b"no picture at all")
    page.set_input_files("#file", tmp_path / "bad.png")
    page.click("#go")
    expect(page.locator("#problem")).to_contain_text("not a JPEG, PNG or WEBP")
    expect(page.locator(".reply")).to_have_count(1)
    (tmp_path / "notes.txt").write_text("hello")
    page.set_input_files("#file", tmp_path / "notes.txt")
    expect(page.locator("#problem")).to_contain_text("That is not a JPEG")


def test_fifty_questions_at_once_are_all_answered(page: Any, address: str, ask):
    found = page.evaluate(
        """async (body) => {
          const one = async () => (await fetch("/api/ask", {method: "POST",
            headers: {"Content-Type": "application/json"}, body: JSON.stringify(body)})).status;
          return Promise.all(Array.from({length: 50}, one));
        }""",
        ask(),
    )
    assert found == [200] * 50


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser: Any, address: str, scheme: str):
    context = browser.new_context(viewport={"width": 380, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.goto(address, timeout=LIMIT)
    expect(page.locator(".reply .panel").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    bright = np.mean([int(one) for one in ground.strip("rgb()").split(",")[:3]])
    assert (bright > 128) == (scheme == "light")
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"phone-{scheme}.png", timeout=LIMIT)
    context.close()


def test_words_of_other_peoples_models_are_removed_one_after_another(page: Any):
    """The first word is gone from the text that is shown; the second is still the one clicked."""
    name = page.locator("#model option", has_text="gpt2").get_attribute("value")
    page.select_option("#model", name)
    page.fill("#text", "the small red ball")
    answered(page, lambda: page.click("#go"))
    page.check("#removing")
    for word, unsaid in (("small", [[4, 9]]), ("ball", [[4, 9], [14, 18]])):
        button = page.locator(".reply .token", has_text=word).first
        with page.expect_request("**/api/ask", timeout=LIMIT) as asked:
            answered(page, button.click)
        assert asked.value.post_data_json["unsaid"] == unsaid
        expect(page.locator(".reply .token", has_text=word)).to_have_count(0)
