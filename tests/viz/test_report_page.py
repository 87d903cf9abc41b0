"""Report pages: contents, missing parts, escaping, size limits and no outside requests."""

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from overt.errors import UserError
from overt.viz.gallery_sample import GallerySample, save_gallery
from overt.viz.report_page import write_report
from overt.viz.templates import POLICY

EVIL = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7*7 }}"
VOID = {"meta", "link", "img", "input", "br", "path", "circle", "line", "polyline", "rect"}


class Reader(HTMLParser):
    """Tags, URLs and visible text of a page; fails on tags that do not nest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and tag != "option":
            while self.open[-1] == "option":
                self.open.pop()
            assert self.open.pop() == tag, self.getpos()
        elif tag == "option":
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in {"style", "script"}:
            self.text += data

    def count(self, tag: str, kind: str = "") -> int:
        return sum(
            name == tag and (not kind or kind in (about.get("class") or "").split())
            for name, about in self.tags
        )


def visible_words(reader: Reader) -> str:
    return " ".join(reader.text.split())


def test_page_contains_settings_data_and_results(tmp_path: Path, three_runs: list[Path]) -> None:
    path = write_report(tmp_path / "page.html", three_runs)
    page = Reader(path.read_text())
    text = visible_words(page)
    assert path == tmp_path / "page.html"
    for phrase in (
        "No attention, soft attention and truth-supervised",
        "scenes (test, 2,000 items)",
        "overt run scenes.soft_attention --out runs/demo --seed 0",
        "9f2c9f2c9f2c",
        "5b35ec9d0c3f",
        "train.epochs",
        "2.13.0",
        "Accuracy ↑",
        "0.641",
        "0.468 to 0.510",
        "paper 0.589",
        "Yang et al. 2016, table 2",
        "query colour n = 500",
        "chance 0.125",
        "what colour is the disc on the",
        "812.0 MiB",
        "412,345",
    ):
        assert phrase in text, phrase
    assert page.count("img", "heat") == 16 and page.count("article", "card") == 8
    assert page.count("svg", "chart") == 4
    assert page.count("td", "best") == 0  # values that no test compares are not marked
    assert "Accuracy&nbsp;<span" in path.read_text()  # an arrow stays beside its word
    assert page.count("p", "note") == 0


@pytest.mark.parametrize(
    ("title", "heading"),
    [("scenes-soft", "Scenes, soft attention"), ("my run", "My run")],
)
def test_one_run_without_a_name_is_titled_by_its_description(
    tmp_path: Path, run_folder: Callable[..., Path], title: str, heading: str
) -> None:
    run = run_folder(
        "soft attention", title=title, recipe="scenes-soft", about="scenes, soft attention"
    )
    page = write_report(tmp_path / "report.html", [run]).read_text()
    assert f"<title>{heading} · overt report</title>" in page


def test_page_makes_no_outside_requests(tmp_path: Path, three_runs: list[Path]) -> None:
    text = write_report(tmp_path / "page.html", three_runs).read_text()
    assert f'content="{POLICY}"'.replace("'", "&#39;") in text
    for tag, about in Reader(text).tags:
        assert tag not in {"iframe", "object", "embed", "base"}
        for name in ("src", "href", "data", "action", "srcset", "poster"):
            assert (about.get(name) or "#").startswith(("#", "data:")), (tag, about)
    addresses = set(re.findall(r"https?://[^\s\"'<>)]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"url\((.{7})", text)) <= {'"data:i', "&#34;da"}


def test_data_is_escaped(
    tmp_path: Path, run_folder: Callable[..., Path], samples: Callable[..., list[GallerySample]]
) -> None:
    spans = np.array([[0, 9], [9, 60]])
    sample = GallerySample(
        id=EVIL,
        image=np.zeros((8, 8, 3), np.uint8),
        text=EVIL,
        spans=spans,
        word_weights=np.array([0.4, 0.6]),
        group=EVIL,
        prediction=EVIL,
        truth=EVIL,
        cells=np.eye(2),
        scores={EVIL: 1.0},
    )
    entry = {"value": 0.5, "unit": EVIL, "direction": EVIL, "split": EVIL, "n": 3, "source": EVIL}
    folder = run_folder(
        samples=[sample],
        title=EVIL,
        recipe=EVIL,
        command=EVIL,
        commit=EVIL,
        status=EVIL,
        settings={EVIL: {EVIL: EVIL}},
        versions={EVIL: EVIL},
        data=[{"name": EVIL, "split": EVIL, "hash": EVIL, "n": 1}],
        ours={EVIL: entry},
        paper={EVIL: entry},
        groups={EVIL: {EVIL: {"value": 0.5, "n": 3, "chance": 0.1}}},
    )
    row = {"stage": EVIL, "step": 1, "split": EVIL, "losses": {EVIL: 1.0}}
    (folder / "log.jsonl").write_text(json.dumps(row) + "\n")
    page = Reader(write_report(tmp_path / "page.html", [folder]).read_text())
    assert page.count("script") == 1  # the script of the page
    assert page.count("img") == 1  # the heat map
    assert not any(name.startswith("on") for _, about in page.tags for name in about)
    assert visible_words(page).count("{{ 7*7 }}") > 10  # shown literally


@pytest.mark.parametrize("part", ["results.json", "log.jsonl", "gallery"])
def test_page_without_one_part_has_a_note(
    tmp_path: Path, three_runs: list[Path], part: str
) -> None:
    for folder in three_runs:
        path = folder / part
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = Reader(write_report(str(tmp_path), [str(run) for run in three_runs]).read_text())
    assert page.count("p", "note") == 3 and f"has no {part}" in visible_words(page)
    assert (part == "results.json") == ("No run has results yet" in visible_words(page))
    assert (part == "gallery") == ("No run has a gallery yet" in visible_words(page))
    assert (part == "log.jsonl") == (page.count("svg", "chart") == 0)


def test_unfinished_run_has_a_note(tmp_path: Path, run_folder: Callable[..., Path]) -> None:
    folder = run_folder(status="running", ours={}, groups={}, seconds=None)
    shutil.rmtree(folder / "gallery")
    text = visible_words(Reader(write_report(tmp_path, [folder]).read_text()))
    assert "soft attention has not finished" in text
    assert "; it has no gallery." in text
    assert (
        "One run of scenes.soft_attention, evaluated on scenes (test, 2,000 items), not finished."
        in text
    )


def test_empty_results_give_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "results.json").write_text("{}")
    page = Reader(write_report(tmp_path, [folder]).read_text())
    assert "Bare" in visible_words(page)


@pytest.mark.parametrize(
    "malformed",
    [
        {"ours": [1], "paper": 3, "groups": "x", "data": {"a": 1}, "settings": [1], "versions": 2},
        {"seconds": "long", "parameters": "many", "peak_memory": [1], "epochs": "two", "flops": {}},
        {"command": ["overt", "run", "a b"], "title": "\u2028", "seed": None},
        {"title": "\ud800"},  # a lone surrogate is not valid JSON, so the results cannot be read
        {"ours": {"accuracy": {"value": 1e300, "n": "x", "low": "a", "high": None}}, "data": [1]},
    ],
)
def test_malformed_results_give_a_page(
    tmp_path: Path, run_folder: Callable[..., Path], malformed: dict
) -> None:
    folder = run_folder(count=1)
    results = {**json.loads((folder / "results.json").read_text()), **malformed}
    (folder / "results.json").write_text(json.dumps(results))
    text = visible_words(Reader(write_report(tmp_path, [folder]).read_text()))
    assert "Gallery" in text
    if "command" in malformed:
        assert "overt run 'a b'" in text


@pytest.mark.long
def test_page_of_64_samples_and_three_runs_is_under_5_mb(tmp_path: Path) -> None:
    """Photos of noise, the worst case for compression, of medium size."""
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (300, 400, 3)).astype(np.uint8) for _ in range(64)]
    folders = []
    for run in range(3):
        folder = tmp_path / f"run {run}"
        save_gallery(
            folder / "gallery",
            [
                GallerySample(
                    id=str(i), image=image, cells=rng.random((14, 14)), text="what is it?"
                )
                for i, image in enumerate(images)
            ],
        )
        folders.append(folder)
    path = write_report(tmp_path / "page.html", folders)
    assert path.stat().st_size < 5_000_000
    page = Reader(path.read_text())
    assert page.count("img", "heat") == 192 + 128  # plus the changes from the first run
    assert sum("data-cells" in about for _, about in page.tags) == 192


def test_page_counts_samples_beyond_the_limit(
    tmp_path: Path, run_folder: Callable[..., Path]
) -> None:
    page = Reader(write_report(tmp_path, [run_folder(count=6)], max_samples=4).read_text())
    assert page.count("article", "card") == 4 and "4 of 6 samples" in visible_words(page)


def test_invalid_run_folder_raises_and_writes_no_page(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"not.*run folder"):
        write_report(tmp_path / "page.html", [tmp_path / "empty"])
    assert not (tmp_path / "page.html").exists()


def test_page_is_deterministic(tmp_path: Path, three_runs: list[Path]) -> None:
    first = write_report(tmp_path / "a.html", three_runs).read_bytes()
    assert write_report(tmp_path / "b.html", three_runs).read_bytes() == first
