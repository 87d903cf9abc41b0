"""The inspector in a real browser, against a running server."""

import base64
import http.server
import json
import runpy
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from overt.inspect.server import app as serving
from overt.inspect.server.app import create_app
from overt.inspect.server.model_cache import ModelCache, find_models
from overt.inspect.server.request_queue import RequestQueue
from tests.experiments import foreign
from tests.inspect.server.conftest import PHOTO, write_boxes, write_captioner, write_hard, write_run
from tests.inspect.server.live_server import QUEUE_TIMEOUT, TIMEOUT, live_server

pytestmark = pytest.mark.long
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = sync_api.expect
LIMIT = 1000 * TIMEOUT
FLAGS = (
    "--no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SHOTS = Path(__file__).parents[2] / "build" / "shots"
QUESTION = "what colour is the ball"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    write_run(root / "average", attends=False)
    write_run(root / "soft")
    for write, name in ((write_hard, "hard"), (write_boxes, "boxes"), (write_captioner, "teller")):
        write(root / "others" / name)
    foreign.gpt2(root / "gpt2")
    foreign.llava(root / "llava")
    return root


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    names = (folder, folder / "others", folder / "gpt2", folder / "llava")
    cache = ModelCache(find_models([str(name) for name in names]))
    with live_server(create_app(cache, line=RequestQueue(patience=QUEUE_TIMEOUT))) as at:
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
    """The opened page; afterwards save a screenshot, and fail on errors and external requests."""
    wrong: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(LIMIT)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on(
        "request",
        lambda sent: (
            None if sent.url.startswith((address, "data:", "blob:")) else wrong.append(sent.url)
        ),
    )
    opened.goto(address, timeout=LIMIT)
    expect(
        opened.locator(".reply .panel").first
    ).to_be_visible()  # the first example is shown automatically
    yield opened
    SHOTS.mkdir(parents=True, exist_ok=True)
    opened.screenshot(path=SHOTS / f"{request.node.name}.png", timeout=LIMIT)
    context.close()
    assert wrong == []


Do = Callable[[], None]


def wait_for_answer(page: Any, do: Do) -> None:
    """Do something that sends a question, and wait for its answer."""
    with page.expect_response("**/api/ask", timeout=LIMIT) as waiting:
        do()
    assert waiting.value.ok, waiting.value.text()
    expect(page.locator("#busy")).to_contain_text("Answered")


def upload(page: Any, tmp_path: Path) -> None:
    Image.fromarray(PHOTO).save(tmp_path / "photo.png")
    page.set_input_files("#file", tmp_path / "photo.png")
    expect(page.locator("#preview")).to_be_visible()


def submit_own_question(page: Any, tmp_path: Path) -> None:
    """Upload an image, enter a question, and wait for its answer."""
    upload(page, tmp_path)
    page.fill("#text", QUESTION)
    wait_for_answer(page, lambda: page.click("#go"))


def choose_model(page: Any, model: str) -> None:
    """Choose a model and its first example, and wait for the answer."""
    with page.expect_response("**/api/examples*", timeout=LIMIT):
        page.select_option("#model", model)
    expect(page.locator("#shelf button")).to_have_count(1)
    wait_for_answer(page, page.locator("#shelf button").first.click)
    expect(page.locator(".reply h2").first).to_have_text(model)


def test_the_page_starts_with_an_answered_example(page: Any):
    expect(page.locator(".reply .chances li")).to_have_count(3)
    expect(page.locator(".reply .panel")).to_have_count(2)
    expect(page.locator(".reply .said")).to_contain_text("It answers")
    wait_for_answer(page, lambda: page.locator("#shelf button").nth(1).click())


def test_an_uploaded_image_and_question_are_answered(page: Any, tmp_path: Path):
    submit_own_question(page, tmp_path)
    expect(page.locator(".reply h2").first).to_have_text("soft")
    expect(page.locator(".reply .chances li").first).to_contain_text("%")


def test_an_image_can_be_dropped(page: Any, tmp_path: Path):
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
    wait_for_answer(page, lambda: page.click("#go"))


def test_a_word_and_an_image_region_can_be_removed(page: Any, tmp_path: Path):
    submit_own_question(page, tmp_path)
    page.check("#removing")
    word = page.locator(".reply .text .token", has_text="colour")
    wait_for_answer(page, word.click)
    expect(page.locator(".reply .token.gone")).to_have_count(1)
    expect(page.locator(".reply .change").first).to_be_visible()
    wait_for_answer(page, page.locator(".reply .picture").first.click)  # in its middle
    expect(page.locator(".reply .picture .gone")).to_have_count(1)
    expect(page.locator("#removed")).to_contain_text("1 part of the image and 1 word")
    wait_for_answer(page, lambda: page.click("#restore"))
    expect(page.locator(".reply .gone")).to_have_count(0)


def test_head_and_method_can_be_chosen(page: Any, tmp_path: Path):
    submit_own_question(page, tmp_path)
    page.locator(".reply select.head").first.select_option("1")
    expect(page.locator(".reply .now").first).to_contain_text("head 1")
    for method, title in (("gradient", "by gradient"), ("search", "by search")):
        page.select_option("#map", method)
        wait_for_answer(page, lambda: page.click("#go"))
        expect(page.locator(".reply .panel h2").first).to_contain_text(title)


def test_two_models_are_shown_side_by_side(page: Any, tmp_path: Path):
    upload(page, tmp_path)
    page.fill("#text", QUESTION)
    page.select_option("#other", "model average")
    page.click("#go")
    expect(page.locator(".reply")).to_have_count(2)
    boxes = [page.locator(".reply").nth(n).bounding_box() for n in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]


def test_two_methods_of_one_model_are_shown_side_by_side(page: Any, tmp_path: Path):
    upload(page, tmp_path)
    page.fill("#text", QUESTION)
    page.select_option("#other", "method gradient")
    wait_for_answer(page, lambda: page.click("#go"))
    titles = ["attention", "gradient of the answer"]
    expect(page.locator(".reply .heading h2")).to_have_text(titles)
    firsts = [page.locator(".reply").nth(n).locator(".panel").first for n in range(2)]
    assert len({panel.bounding_box()["y"] for panel in firsts}) == 1
    page.select_option("#map", "gradient")  # it cannot be compared with itself
    expect(page.locator("#other")).to_have_value("")


def test_code_and_image_can_be_copied_and_downloaded(
    page: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    submit_own_question(page, tmp_path)
    page.click("text=Copy as Python")
    expect(page.locator(".reply pre")).to_be_visible()
    with page.expect_download(timeout=LIMIT) as waiting:
        page.click("text=Download image")
    waiting.value.save_as(tmp_path / "attention.png")
    assert waiting.value.suggested_filename == "attention.png"
    assert Image.open(tmp_path / "attention.png").size[0] > 400
    with page.expect_download(timeout=LIMIT) as waiting:
        page.click("text=Save photo.png")
    waiting.value.save_as(tmp_path / "photo.png")
    (tmp_path / "shown.py").write_text(page.inner_text(".reply pre"))
    monkeypatch.chdir(tmp_path)
    view = runpy.run_path("shown.py")["view"]  # the five copied lines
    chance = page.locator(".reply .chances li").first.inner_text()
    assert f"{100 * view.answers[0][1]:.1f} %" in chance and view.answers[0][0] in chance


def test_hard_attention_shows_the_kept_cells(page: Any):
    choose_model(page, "hard")
    expect(page.locator(".reply .now").first).to_contain_text("attends to 5 of 64 cells")
    canvas = page.locator(".reply canvas.kept")
    dark = canvas.evaluate(
        """(one) => {
          const all = one.getContext("2d").getImageData(0, 0, one.width, one.height).data;
          let found = 0;
          for (let n = 3; n < all.length; n += 4) found += all[n] > 0;
          return found / (all.length / 4);
        }"""
    )
    assert dark == pytest.approx(59 / 64, abs=1e-3)  # cells that are not kept are covered


def test_boxes_can_be_drawn_and_words_are_grounded_in_them(page: Any):
    choose_model(page, "boxes")
    expect(page.locator(".reply .region")).to_have_count(16)
    expect(page.locator(".reply .chances li")).to_have_count(3)
    page.locator(".reply .text .token", has_text="ball").first.click()
    expect(page.locator(".reply .now").first).to_contain_text("“ball” attends most to “box")
    frame = page.locator("#preview").bounding_box()
    for left, right in ((0.1, 0.4), (0.5, 0.9)):
        page.mouse.move(frame["x"] + left * frame["width"], frame["y"] + 0.2 * frame["height"])
        page.mouse.down()
        page.mouse.move(frame["x"] + right * frame["width"], frame["y"] + 0.8 * frame["height"])
        page.mouse.up()
    expect(page.locator("#drawn div")).to_have_count(2)
    wait_for_answer(page, lambda: page.click("#go"))
    expect(page.locator(".reply .region")).to_have_count(2)
    page.check("#removing")
    wait_for_answer(page, page.locator(".reply .region").first.click)
    expect(page.locator(".reply .picture .gone")).to_have_count(1)
    page.fill("#boxes", "10 20 30")
    page.click("#go")
    expect(page.locator("#problem")).to_contain_text("four numbers")


def test_a_captioner_shows_one_map_per_word(page: Any):
    choose_model(page, "teller")
    expect(page.locator(".reply .said")).to_contain_text("It writes")
    words = page.locator(".reply .text .token")
    caption = page.locator(".reply .said b").inner_text()
    assert caption == " ".join(words.all_inner_texts())
    words.nth(1).click()
    expect(page.locator(".reply .now").first).to_contain_text(
        f"“{caption.split()[1]}” attends most"
    )
    page.fill("#text", "the red ball")
    wait_for_answer(page, lambda: page.click("#go"))
    expect(page.locator(".reply .text .token")).to_have_count(3)


def test_the_page_works_by_keyboard_only(page: Any):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("#shelf button")
    wait_for_answer(page, lambda: page.keyboard.press("Enter"))
    page.focus("#removing")
    page.keyboard.press("Space")
    page.focus(".reply .picture")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    wait_for_answer(page, lambda: page.keyboard.press("Enter"))
    expect(page.locator(".reply .picture .gone")).to_have_count(1)
    page.focus(".reply .text .token")
    wait_for_answer(page, lambda: page.keyboard.press("Enter"))
    expect(page.locator(".reply .token.gone")).to_have_count(1)
    page.focus("#text")
    wait_for_answer(page, lambda: page.keyboard.press("Enter"))  # sends the question


def test_an_invalid_upload_shows_an_error_and_keeps_the_reply(page: Any, tmp_path: Path):
    submit_own_question(page, tmp_path)
    (tmp_path / "bad.png").write_bytes(b"no picture at all")
    page.set_input_files("#file", tmp_path / "bad.png")
    page.click("#go")
    expect(page.locator("#problem")).to_contain_text("use JPEG, PNG or WEBP")
    expect(page.locator(".reply")).to_have_count(1)
    (tmp_path / "notes.txt").write_text("hello")
    page.set_input_files("#file", tmp_path / "notes.txt")
    expect(page.locator("#problem")).to_contain_text("use a JPEG, PNG or WEBP")


def test_fifty_concurrent_questions_are_all_answered(page: Any, address: str, ask):
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
def test_the_page_fits_a_phone(browser: Any, address: str, scheme: str):
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


def test_the_map_is_above_the_fold_of_a_laptop(page: Any):
    page.set_viewport_size({"width": 1280, "height": 720})
    box = page.locator(".reply .picture").first.bounding_box()
    assert box["y"] < 720 * 0.6 and box["height"] > 240


def test_models_of_a_path_are_named_by_their_folder(page: Any):
    names = page.locator("#model option").all_inner_texts()
    assert names[-2:] == ["gpt2", "llava"]
    values = page.locator("#model option").evaluate_all("all => all.map((one) => one.value)")
    assert all("/" in value for value in values[-2:])


def test_an_answer_to_an_earlier_input_is_marked_until_the_next_one(page: Any):
    page.fill("#text", QUESTION)
    expect(page.locator("#columns")).to_have_class("columns outdated")
    expect(page.locator("#busy")).to_contain_text("The input has changed")
    wait_for_answer(page, lambda: page.click("#go"))
    expect(page.locator("#columns")).to_have_class("columns")


def test_a_phone_scrolls_to_the_answer(browser: Any, address: str):
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto(address, timeout=LIMIT)
    expect(page.locator(".reply .panel").first).to_be_visible()
    assert page.evaluate("scrollY") == 0
    wait_for_answer(page, lambda: page.click("#go"))
    assert page.locator(".reply .said").bounding_box()["y"] < 400
    context.close()


def test_words_of_hub_models_are_removed_one_after_another(page: Any):
    """The first word is missing in the shown text; the second removal must still be correct."""
    name = page.locator("#model option", has_text="gpt2").get_attribute("value")
    page.select_option("#model", name)
    page.fill("#text", "the small red ball")
    wait_for_answer(page, lambda: page.click("#go"))
    page.check("#removing")
    for word, unsaid in (("small", [[4, 9]]), ("ball", [[4, 9], [14, 18]])):
        button = page.locator(".reply .token", has_text=word).first
        with page.expect_request("**/api/ask", timeout=LIMIT) as sent:
            wait_for_answer(page, button.click)
        assert sent.value.post_data_json["unsaid"] == unsaid
        expect(page.locator(".reply .token", has_text=word)).to_have_count(0)


class ForeignPage(http.server.BaseHTTPRequestHandler):
    """A page of another origin on this machine."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<p>elsewhere</p>")

    def log_message(self, *given: Any) -> None:
        """Log nothing."""


@pytest.fixture
def elsewhere() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ForeignPage) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(TIMEOUT)


def test_a_page_of_another_origin_cannot_send_questions(
    browser: Any, elsewhere: str, folder: Path, ask, monkeypatch: pytest.MonkeyPatch
):
    """Send every kind of request that a browser sends without a preflight."""
    calls: list[str] = []
    monkeypatch.setattr(serving, "build_response", lambda *given: calls.append("ask") or {})
    with live_server(create_app(ModelCache(find_models([str(folder)])))) as at:
        page = browser.new_context().new_page()
        page.goto(elsewhere, timeout=LIMIT)
        page.evaluate(
            """async ([url, body]) => {
              const kinds = ["", "text/plain", "application/x-www-form-urlencoded"];
              for (const type of kinds) {
                const sent = {method: "POST", mode: "no-cors", body: new Blob([body], {type})};
                await fetch(url, sent).catch(() => null);
                navigator.sendBeacon(url, sent.body);
              }
              const json = {"Content-Type": "application/json"};
              await fetch(url, {method: "POST", headers: json, body}).catch(() => null);
            }""",
            [f"{at}/api/ask", json.dumps(ask())],
        )
        page.goto(at, timeout=LIMIT)
        expect(page.locator(".reply, #problem:not([hidden])").first).to_be_visible()
        page.context.close()
    assert calls == ["ask"]  # from its own page, which starts with an example


def test_a_corrupt_run_is_listed_on_the_page(browser: Any, tmp_path: Path):
    write_run(tmp_path / "average", attends=False)
    write_run(tmp_path / "soft")
    (tmp_path / "average" / "model" / "spoken.json").write_text("{")
    with live_server(
        create_app(
            ModelCache(find_models([str(tmp_path)])), line=RequestQueue(patience=QUEUE_TIMEOUT)
        )
    ) as at:
        page = browser.new_context().new_page()
        page.goto(at, timeout=LIMIT)
        expect(page.locator(".reply .panel").first).to_be_visible()
        expect(page.locator("#broken")).to_contain_text("average cannot be loaded: ")
        expect(page.locator("#model option")).to_have_count(1)
        page.context.close()


def test_a_region_is_removed_and_words_of_the_answer_show_the_change(page: Any, tmp_path: Path):
    page.select_option("#model", page.locator("#model option", has_text="llava").inner_text())
    upload(page, tmp_path)
    page.fill("#text", "what is this")
    wait_for_answer(page, lambda: page.click("#go"))
    panel = page.locator(".reply .panel").first
    words = panel.locator(".token.written")
    written = page.locator(".reply .said b").inner_text()
    assert written.split() == [each.split("\n")[0] for each in words.all_inner_texts()]
    frame = panel.locator(".picture")
    box = frame.bounding_box()
    for x in (0.4, 0.6):
        frame.click(position={"x": x * box["width"], "y": 0.5 * box["height"]})
    wait_for_answer(page, panel.locator(".again").click)
    expect(page.locator("#removed")).to_contain_text("2 parts of the image")
    panel = page.locator(".reply .panel").first
    expect(panel.locator(".picture .gone")).to_have_count(2)
    expect(panel.locator(".token.written .change")).to_have_count(words.count())
    expect(page.locator(".reply .was")).to_contain_text(written)
