"""The inspector in a real browser, against a running server: what a person does, step by step."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from PIL import Image

from overt.serve.app import make
from overt.serve.running import listen
from overt.serve.shelf import Shelf, offer
from tests.serve.conftest import PHOTO, write_run

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
FLAGS = (
    "--no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SHOTS = Path(__file__).parents[2] / "build" / "shots"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    write_run(folder / "average", attends=False)
    write_run(folder / "soft")
    with listen("127.0.0.1", 0) as taken:
        app = make(Shelf(offer([str(folder)])))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.skip("no chromium is installed: the inspector was not opened in a browser")
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=found, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, opened; at the end a screenshot is kept, and errors and foreign requests fail."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(20_000)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on(
        "request",
        lambda asked: (
            None if asked.url.startswith((address, "data:", "blob:")) else wrong.append(asked.url)
        ),
    )
    opened.goto(address)
    opened.wait_for_selector("#shelf button")
    yield opened
    SHOTS.mkdir(parents=True, exist_ok=True)
    opened.screenshot(path=SHOTS / f"{request.node.name}.png")
    context.close()
    assert wrong == []


@pytest.fixture
def answered(page: Any) -> Callable[[], Any]:
    """Press the button and wait for the answer."""

    def go() -> Any:
        page.click("#go")
        expect(page.locator("#busy")).to_contain_text("Answered", timeout=20_000)
        return page

    return go


def upload(page: Any, tmp_path: Path) -> None:
    Image.fromarray(PHOTO).save(tmp_path / "photo.png")
    page.set_input_files("#file", tmp_path / "photo.png")
    page.wait_for_selector("#preview:not([hidden])")


def first_chance(page: Any) -> str:
    return page.locator(".reply .chances li").first.inner_text()


def test_an_example_is_asked_by_one_click(page: Any):
    page.locator("#shelf button").first.click()
    page.wait_for_selector(".reply .panel canvas.heat")
    assert page.locator(".reply .chances li").count() == 3
    assert page.locator(".reply .panel").count() == 2


def test_a_picture_and_a_question_of_ones_own(page: Any, answered, tmp_path: Path):
    upload(page, tmp_path)
    page.fill("#text", "what colour is the ball")
    answered()
    assert page.locator(".reply h2").first.inner_text() == "soft"
    assert "%" in first_chance(page)


def test_a_word_and_a_part_of_the_picture_can_be_taken_away(page: Any, answered, tmp_path: Path):
    upload(page, tmp_path)
    page.fill("#text", "what colour is the ball")
    answered()
    page.check("#removing")
    page.locator(".reply .text .token", has_text="colour").click()
    page.wait_for_selector(".reply .token.gone")
    page.wait_for_selector(".reply .change")
    page.locator(".reply .picture").first.click()  # in its middle
    page.wait_for_selector(".reply .picture .gone")
    assert "1 part of the picture and 1 word" in page.inner_text("#removed")
    page.click("#restore")
    expect(page.locator(".reply .gone")).to_have_count(0, timeout=20_000)


def test_head_and_map_can_be_chosen(page: Any, answered, tmp_path: Path):
    upload(page, tmp_path)
    page.fill("#text", "what colour is the ball")
    answered()
    page.locator(".reply select.head").first.select_option("1")
    assert "head 1" in page.locator(".reply .now").first.inner_text()
    page.select_option("#map", "gradient")
    answered()
    page.wait_for_selector("text=the picture, by gradient")


def test_two_models_stand_side_by_side(page: Any, answered, tmp_path: Path):
    upload(page, tmp_path)
    page.fill("#text", "what colour is the ball")
    page.select_option("#other", "average")
    answered()
    expect(page.locator(".reply")).to_have_count(2)
    boxes = [page.locator(".reply").nth(n).bounding_box() for n in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]


def test_code_and_picture_can_be_taken_along(page: Any, answered, tmp_path: Path):
    upload(page, tmp_path)
    page.fill("#text", "what colour is the ball")
    answered()
    page.click("text=Copy as Python")
    assert "looking.view" in page.inner_text(".reply pre")
    with page.expect_download() as waiting:
        page.click("text=Download picture")
    waiting.value.save_as(tmp_path / "attention.png")
    assert Image.open(tmp_path / "attention.png").size[0] > 400


def test_by_keyboard_alone(page: Any, tmp_path: Path):
    page.focus("#shelf button")
    page.keyboard.press("Enter")
    page.wait_for_selector(".reply .panel")
    page.focus("#removing")
    page.keyboard.press("Space")
    page.focus(".reply .picture")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".reply .picture .gone")


def test_a_bad_upload_is_told_and_nothing_is_lost(page: Any, answered, tmp_path: Path):
    upload(page, tmp_path)
    page.fill("#text", "what colour is the ball")
    answered()
    (tmp_path / "bad.png").write_bytes(b"no picture at all")
    page.set_input_files("#file", tmp_path / "bad.png")
    page.click("#go")
    page.wait_for_selector("#problem:not([hidden])")
    assert "not a JPEG, PNG or WEBP" in page.inner_text("#problem")
    assert page.locator(".reply").count() == 1
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


def test_it_fits_a_phone(browser: Any, address: str):
    context = browser.new_context(viewport={"width": 380, "height": 800}, color_scheme="dark")
    page = context.new_page()
    page.goto(address)
    page.locator("#shelf button").first.click()
    page.wait_for_selector(".reply .panel")
    assert page.evaluate("document.documentElement.scrollWidth") <= 380
    context.close()
