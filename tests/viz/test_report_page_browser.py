"""Report pages in a real browser: loading, filters, themes and no requests.

Screenshots for visual inspection go to the ignored folder `artefacts/`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from overt.viz.gallery_sample import GallerySample
from overt.viz.report_page import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

ARTEFACTS = Path(__file__).resolve().parents[2] / "artefacts"
Open = Callable[..., "sync_api.Page"]


def visible_cards(page: "sync_api.Page") -> list[int]:
    """The numbers of the visible samples in order."""
    cards = page.locator(".card:visible")
    return [int(number) for number in cards.evaluate_all("all => all.map(c => c.dataset.number)")]


def save_screenshot(page: "sync_api.Page", name: str, full: bool = True) -> None:
    ARTEFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTEFACTS / f"report-{name}.png", full_page=full)


@pytest.mark.long
def test_images_words_and_curves_are_loaded(
    tmp_path: Path, three_runs: list[Path], open_page: Open
) -> None:
    page = open_page(write_report(tmp_path / "page.html", three_runs))
    heats = page.locator("img.heat")
    assert heats.count() == 16 and page.locator(".view img.heat").count() == 16
    assert heats.evaluate_all("all => all.every(i => i.complete && i.naturalWidth > 0 && i.alt)")
    boxes = page.locator(".frame").evaluate_all(
        "all => all.map(f => f.getBoundingClientRect()).map(b => [b.width, b.height])"
    )
    assert all(width > 100 and abs(width - height) < 1 for width, height in boxes)
    word = page.locator("button.word", has_text="colour").first
    assert word.get_attribute("title").startswith("colour: 0.")
    levels = (
        page.locator(".card")
        .first.locator("button.word")
        .evaluate_all(
            "all => all.map(w => [+w.title.split(': ')[1], +getComputedStyle(w).opacity])"
        )
    )
    halves = [levels[: len(levels) // 2], levels[len(levels) // 2 :]]
    for words in halves:  # one per run: larger weights are more opaque
        assert [o for _, o in sorted(words)] == sorted(o for _, o in words)
    assert page.locator("svg.chart polyline").count() >= 8
    save_screenshot(page, "desktop")


@pytest.mark.long
def test_heat_and_outline_are_drawn_over_the_photo(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    """All attention and its outline are in the lower left quarter of a white photo."""
    import io

    import numpy as np
    from PIL import Image

    cells = np.array([[0.0, 0.0], [1.0, 0.0]])
    white = np.full((200, 200, 3), 255, np.uint8)
    sample = GallerySample(id="a", image=white, cells=cells, truth_cells=cells)
    page = open_page(write_report(tmp_path / "page.html", [run_folder(samples=[sample])]))
    frame = page.locator(".view .frame")
    pixels = np.asarray(Image.open(io.BytesIO(frame.screenshot())).convert("RGB")).astype(int)
    height, width = pixels.shape[:2]
    quarter = pixels[int(0.75 * height), int(0.25 * width)]
    assert quarter[0] > 180 and quarter[2] < quarter[0] - 40  # the last colours, not white
    assert (abs(pixels[int(0.2 * height), int(0.8 * width)] - 191) < 3).all()  # dimmed, no heat
    page.locator("#f-heat").uncheck()
    pixels = np.asarray(Image.open(io.BytesIO(frame.screenshot())).convert("RGB")).astype(int)
    assert (pixels[int(0.75 * height), int(0.25 * width)] > 250).all()
    dark = np.argwhere(pixels.sum(axis=-1) < 400)  # the edge of the outline
    assert dark[:, 0].min() > 0.45 * height and dark[:, 1].max() < 0.55 * width
    page.locator("#f-outline").uncheck()
    pixels = np.asarray(Image.open(io.BytesIO(frame.screenshot())).convert("RGB")).astype(int)
    inner = pixels[20:-20, 20:-20]
    assert (inner > 250).all()


@pytest.mark.long
def test_filters_select_the_matching_samples(
    tmp_path: Path,
    three_runs: list[Path],
    samples: Callable[..., list[GallerySample]],
    open_page: Open,
) -> None:
    page = open_page(write_report(tmp_path / "page.html", three_runs))
    runs = [samples(folder.name, 8) for folder in three_runs]
    everything = list(range(1, 9))

    def matching(test: Callable[[list[GallerySample]], bool]) -> list[int]:
        return [i for i in everything if test([run[i - 1] for run in runs])]

    def inside(sample: GallerySample) -> bool:
        return sample.scores["mass inside"] >= 0.5

    assert visible_cards(page) == everything
    answer = page.get_by_label("Answer", exact=True)
    run = page.get_by_label("Run", exact=True)
    answer.select_option("right")
    assert visible_cards(page) == matching(lambda row: all(one.right for one in row))
    answer.select_option("wrong")
    assert visible_cards(page) == matching(lambda row: not any(one.right for one in row))
    answer.select_option("runs differ")
    differ = matching(lambda row: 0 < sum(bool(one.right) for one in row) < 3)
    assert visible_cards(page) == differ and 0 < len(differ) < 8
    assert page.locator("#count").inner_text() == f"{len(differ)} of 8 shown"
    run.select_option("soft attention")
    answer.select_option("right")
    assert visible_cards(page) == matching(lambda row: bool(row[1].right))
    answer.select_option("")
    run.select_option("truth-supervised")
    page.get_by_label("Attention", exact=True).select_option("on the evidence")
    assert visible_cards(page) == matching(lambda row: inside(row[2]))
    page.get_by_label("Attention", exact=True).select_option("off the evidence")
    assert visible_cards(page) == matching(lambda row: not inside(row[2]))
    page.get_by_role("button", name="Reset").click()
    page.wait_for_function("document.getElementById('count').textContent.startsWith('8 ')")
    page.get_by_label("Group", exact=True).select_option("count")
    assert visible_cards(page) == matching(lambda row: row[0].group == "count") == [2, 6]
    run.select_option("no attention")
    page.get_by_label("Attention", exact=True).select_option("on the evidence")
    assert visible_cards(page) == [] and page.locator("#none").is_visible()


def test_order_follows_the_evidence_score(
    tmp_path: Path,
    run_folder: Callable[..., Path],
    samples: Callable[..., list[GallerySample]],
    open_page: Open,
) -> None:
    page = open_page(write_report(tmp_path / "page.html", [run_folder("soft attention")]))
    scores = [sample.scores["mass inside"] for sample in samples("soft attention", 8)]
    up = sorted(range(1, 9), key=lambda i: scores[i - 1])
    page.get_by_label("Order", exact=True).select_option("up")
    assert visible_cards(page) == up
    page.get_by_label("Order", exact=True).select_option("down")
    assert visible_cards(page) == up[::-1]
    page.get_by_label("Order", exact=True).select_option("original")
    assert visible_cards(page) == list(range(1, 9))


@pytest.mark.long
def test_twelve_samples_are_shown_before_more(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    path = write_report(tmp_path / "page.html", [run_folder(count=15)])
    page = open_page(path)
    assert visible_cards(page) == list(range(1, 13))
    assert page.locator("#count").inner_text() == "12 of 15 shown"
    page.get_by_role("button", name="3 more samples").click()
    assert visible_cards(page) == list(range(1, 16))
    assert not page.locator("#more-samples").is_visible()
    assert page.evaluate("document.activeElement.dataset.number") == "13"
    page.goto(path.as_uri() + "#sample-14")  # an address of a sample shows it
    page.reload()
    assert visible_cards(page) == list(range(1, 16))


@pytest.mark.long
def test_filters_work_by_keyboard(tmp_path: Path, three_runs: list[Path], open_page: Open) -> None:
    page = open_page(write_report(tmp_path / "page.html", three_runs))
    visited = []
    for _ in range(40):
        page.keyboard.press("Tab")
        visited.append(page.evaluate("document.activeElement.id"))
        if visited[-1] == "f-group":
            break
    assert {"theme", "f-run", "f-answer", "f-inside", "f-group"} <= set(visited)
    page.keyboard.type("count")
    assert page.get_by_label("Group", exact=True).input_value() == "count"
    page.wait_for_function("document.getElementById('count').textContent.startsWith('2 ')")
    assert visible_cards(page) == [2, 6]


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_theme_follows_the_system_and_the_button(
    tmp_path: Path, three_runs: list[Path], open_page: Open, scheme: str
) -> None:
    page = open_page(write_report(tmp_path / "page.html", three_runs), color_scheme=scheme)

    def current_theme() -> str:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        red = int(colour.split("(")[1].split(",")[0])
        return "dark" if red < 60 else "light"

    assert current_theme() == scheme
    save_screenshot(page, scheme, full=False)
    page.locator("#theme").click()
    other = "light" if scheme == "dark" else "dark"
    assert current_theme() == other
    page.reload()
    assert current_theme() == other  # the choice is stored
    page.locator("#theme").click()
    assert current_theme() == scheme


@pytest.mark.long
def test_phone_page_does_not_scroll_sideways(
    tmp_path: Path, three_runs: list[Path], open_page: Open
) -> None:
    page = open_page(write_report(tmp_path / "page.html", three_runs), width=390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    widths = page.locator(".frame").evaluate_all("all => all.map(f => f.offsetWidth)")
    assert min(widths) > 120
    sizes = page.locator("p:visible, dd:visible, td:visible, h3:visible").evaluate_all(
        "all => all.map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 11
    save_screenshot(page, "phone")


def test_page_is_readable_without_javascript(
    tmp_path: Path, three_runs: list[Path], open_page: Open
) -> None:
    page = open_page(write_report(tmp_path / "page.html", three_runs), java_script_enabled=False)
    assert page.locator(".card:visible").count() == 8
    assert not page.locator("#filters").is_visible() and not page.locator("#theme").is_visible()
    assert page.locator("svg.chart:visible").count() == 4


def test_text_only_samples_have_only_matching_filters(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    samples = [
        GallerySample(id=str(i), text=f"who is {i}?", prediction="me", truth=truth)
        for i, truth in enumerate(("me", "you"))
    ]
    page = open_page(write_report(tmp_path / "page.html", [run_folder(samples=samples)]))
    selects = page.locator("#filters select, #filters input")
    assert selects.evaluate_all("all => all.map(s => s.id)") == ["f-answer"]
    page.get_by_label("Answer", exact=True).select_option("wrong")
    assert visible_cards(page) == [2]


def test_script_in_a_question_does_not_run(
    tmp_path: Path, run_folder: Callable[..., Path], open_page: Open
) -> None:
    evil = "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
    sample = GallerySample(id=evil, text=evil, group=evil, prediction=evil, truth=evil)
    folder = run_folder(samples=[sample], title=evil, command=evil)
    page = open_page(write_report(tmp_path / "page.html", [folder]))
    assert page.evaluate("window.hit") is None
    assert page.locator(".card h3").inner_text() == evil


def test_csp_blocks_outside_requests(
    tmp_path: Path, three_runs: list[Path], browser: "sync_api.Browser"
) -> None:
    """The browser blocks requests even in a modified page."""
    path = write_report(tmp_path / "page.html", three_runs)
    leak = '<img id="leak" src="http://192.0.2.1/a.png"></main>'
    path.write_text(path.read_text().replace("</main>", leak, 1))
    page = browser.new_page()
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.goto(path.as_uri())
    page.close()
    assert any("Content Security Policy" in text for text in messages)
