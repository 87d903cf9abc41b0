"""The page tells all it knows, admits what it does not, and lets nothing in from outside."""

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from overt.errors import BadInput
from overt.show.page import POLICY, report
from overt.show.sample import Sample, save_gallery

EVIL = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>{{ 7*7 }}"
VOID = {"meta", "link", "img", "input", "br", "path", "circle", "line", "polyline", "rect"}


class Reader(HTMLParser):
    """Tags, addresses and visible text of a page; fails on tags that do not nest."""

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


def words(reader: Reader) -> str:
    return " ".join(reader.text.split())


def test_the_page_says_what_was_run_and_how_it_went(tmp_path: Path, three_runs: list[Path]) -> None:
    path = report(tmp_path / "page.html", three_runs)
    page = Reader(path.read_text())
    text = words(page)
    assert path == tmp_path / "page.html"
    for said in (
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
        assert said in text, said
    assert page.count("img", "heat") == 16 and page.count("article", "card") == 8
    assert page.count("svg", "chart") == 4
    assert page.count("td", "best") == 6
    assert page.count("p", "note") == 0


def test_nothing_on_the_page_leads_outside(tmp_path: Path, three_runs: list[Path]) -> None:
    text = report(tmp_path / "page.html", three_runs).read_text()
    assert f'content="{POLICY}"'.replace("'", "&#39;") in text
    for tag, about in Reader(text).tags:
        assert tag not in {"iframe", "object", "embed", "base"}
        for name in ("src", "href", "data", "action", "srcset", "poster"):
            assert (about.get(name) or "#").startswith(("#", "data:")), (tag, about)
    addresses = set(re.findall(r"https?://[^\s\"'<>)]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"url\((.{7})", text)) <= {'"data:i', "&#34;da"}


def test_what_comes_from_data_cannot_run(
    tmp_path: Path, run_folder: Callable[..., Path], samples: Callable[..., list[Sample]]
) -> None:
    spans = np.array([[0, 9], [9, 60]])
    sample = Sample(
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
    page = Reader(report(tmp_path / "page.html", [folder]).read_text())
    assert page.count("script") == 1  # ours
    assert page.count("img") == 1  # the heat
    assert not any(name.startswith("on") for _, about in page.tags for name in about)
    assert words(page).count("{{ 7*7 }}") > 10  # shown as it is


@pytest.mark.parametrize("part", ["results.json", "log.jsonl", "gallery"])
def test_a_page_is_made_without_any_one_part(
    tmp_path: Path, three_runs: list[Path], part: str
) -> None:
    for folder in three_runs:
        path = folder / part
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = Reader(report(str(tmp_path), [str(run) for run in three_runs]).read_text())
    assert page.count("p", "note") == 3 and f"has no {part}" in words(page)
    assert (part == "results.json") == ("No run has measured anything yet" in words(page))
    assert (part == "gallery") == ("No run has a gallery yet" in words(page))
    assert (part == "log.jsonl") == (page.count("svg", "chart") == 0)


def test_an_unfinished_run_says_so_in_a_sentence(
    tmp_path: Path, run_folder: Callable[..., Path]
) -> None:
    folder = run_folder(status="running", ours={}, groups={}, seconds=None)
    shutil.rmtree(folder / "gallery")
    text = words(Reader(report(tmp_path, [folder]).read_text()))
    assert "soft attention has not ended: it is still going, or was killed" in text
    assert "; it has no gallery, so none of its samples are shown." in text
    assert (
        "One run of scenes.soft_attention, measured on scenes (test, 2,000 items), not finished."
        in text
    )


def test_bare_results_are_enough(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "results.json").write_text("{}")
    page = Reader(report(tmp_path, [folder]).read_text())
    assert "Bare" in words(page)


@pytest.mark.parametrize(
    "strange",
    [
        {"ours": [1], "paper": 3, "groups": "x", "data": {"a": 1}, "settings": [1], "versions": 2},
        {"seconds": "long", "parameters": "many", "peak_memory": [1], "epochs": "two", "flops": {}},
        {"command": ["overt", "run", "a b"], "title": "\ud800", "seed": None},
        {"ours": {"accuracy": {"value": 1e300, "n": "x", "low": "a", "high": None}}, "data": [1]},
    ],
)
def test_strange_results_still_make_a_page(
    tmp_path: Path, run_folder: Callable[..., Path], strange: dict
) -> None:
    folder = run_folder(count=1)
    results = {**json.loads((folder / "results.json").read_text()), **strange}
    (folder / "results.json").write_text(json.dumps(results))
    text = words(Reader(report(tmp_path, [folder]).read_text()))
    assert "Gallery" in text
    if "command" in strange:
        assert "overt run 'a b'" in text


def test_64_samples_of_three_runs_stay_under_5_megabytes(tmp_path: Path) -> None:
    """Photos of noise, which compress worst, at a size between thumbnail and poster."""
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (300, 400, 3)).astype(np.uint8) for _ in range(64)]
    folders = []
    for run in range(3):
        folder = tmp_path / f"run {run}"
        save_gallery(
            folder / "gallery",
            [
                Sample(id=str(i), image=image, cells=rng.random((14, 14)), text="what is it?")
                for i, image in enumerate(images)
            ],
        )
        folders.append(folder)
    path = report(tmp_path / "page.html", folders)
    assert path.stat().st_size < 5_000_000
    page = Reader(path.read_text())
    assert page.count("img", "heat") == 192 + 128  # and what changed since the first run
    assert sum("data-cells" in about for _, about in page.tags) == 192


def test_more_samples_than_fit_are_counted(tmp_path: Path, run_folder: Callable[..., Path]) -> None:
    page = Reader(report(tmp_path, [run_folder(count=6)], most=4).read_text())
    assert page.count("article", "card") == 4 and "4 of 6 samples" in words(page)


def test_a_folder_that_is_no_run_leaves_no_page(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="holds no run"):
        report(tmp_path / "page.html", [tmp_path / "empty"])
    assert not (tmp_path / "page.html").exists()


def test_the_same_runs_give_the_same_page(tmp_path: Path, three_runs: list[Path]) -> None:
    first = report(tmp_path / "a.html", three_runs).read_bytes()
    assert report(tmp_path / "b.html", three_runs).read_bytes() == first
