"""Chapter pages: paired differences corrected together, missing metrics, escaping, one file."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from overt import io
from overt.errors import UserError
from overt.viz.chapter_page import (
    Chapter,
    ChapterMetric,
    chapter_lines,
    images_first,
    render_chapters,
)
from overt.viz.gallery_sample import GallerySample
from overt.viz.run_reader import read_runs
from tests.viz.test_report_page import EVIL, Reader, visible_words

METRICS = (
    ChapterMetric("accuracy", "accuracy", "questions"),
    ChapterMetric("pointing", "largest weight on the evidence", "questions"),
)
MakeChapter = Callable[..., Chapter]


def paired_values(gap: float, n: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Values of a control and of a method, whose mean difference is near `gap`."""
    rng = np.random.default_rng(seed)
    control = rng.normal(0.5, 0.1, n)
    return control, control + gap + rng.normal(0, 0.05, n)


@pytest.fixture
def make_chapter(run_folder: Callable[..., Path]) -> MakeChapter:
    """Return `make_chapter("han", accuracy=0.1)`: a chapter with these mean differences."""

    def make(name: str = "han", n: int = 40, **gaps: float) -> Chapter:
        values = {key: paired_values(gap, n, at) for at, (key, gap) in enumerate(gaps.items())}
        folders = []
        for side, title in enumerate((f"{name} control", f"{name} method")):
            ours = {
                key: {"value": float(both[side].mean()), "higher_is_better": True, "n": n}
                for key, both in values.items()
            }
            folder = run_folder(title, ours=ours)
            ids = {"id": np.array([f"q{at}" for at in range(n)])}
            io.write_arrays(folder / "samples.npz", ids | {k: v[side] for k, v in values.items()})
            folders.append(folder)
        control, method = read_runs(folders)
        return Chapter(name, f"Paper {name}", "One idea.", control, method, METRICS)

    return make


def change_results(chapter: Chapter, side: str, **changes: Any) -> Chapter:
    """Return the chapter with other results of one run."""
    run = getattr(chapter, side)
    return replace(chapter, **{side: replace(run, results={**run.results, **changes})})


def without_metric(chapter: Chapter, side: str, key: str) -> Chapter:
    """Return the chapter with a run that lacks one metric."""
    run = getattr(chapter, side)
    ours = {name: one for name, one in run.results["ours"].items() if name != key}
    samples = {name: one for name, one in run.samples.items() if name != key}
    changed = replace(run, results={**run.results, "ours": ours}, samples=samples)
    return replace(chapter, **{side: changed})


# Lines


def test_differences_agree_with_a_paired_t_test_of_scipy(make_chapter: MakeChapter) -> None:
    ((line, _),) = chapter_lines([make_chapter(accuracy=0.1, pointing=0.0)])
    control, method = paired_values(0.1)
    tested = stats.ttest_rel(method, control)
    low, high = tested.confidence_interval()
    assert line.difference == f"+{(method - control).mean():.3f}"
    assert line.interval == f"{low:.3f} to {high:.3f}"
    assert (line.control, line.method) == (f"{control.mean():.3f}", f"{method.mean():.3f}")
    assert (line.verdict, line.sign, line.arrow) == ("better", "better", "↑")


def test_a_line_counts_the_compared_samples_and_names_them(make_chapter: MakeChapter) -> None:
    ((first, second),) = chapter_lines([make_chapter(n=1200, accuracy=0.1, pointing=0.1)])
    assert first.n == second.n == "1,200 questions"


def test_verdicts_are_corrected_over_all_chapters(make_chapter: MakeChapter) -> None:
    """A p-value of 0.04 is a verdict alone, and none beside another comparison."""
    chapter = make_chapter("one", accuracy=0.0035)
    control, method = paired_values(0.0035)
    assert 0.025 < stats.ttest_rel(method, control).pvalue < 0.05
    ((alone,),) = chapter_lines([chapter])
    assert alone.verdict == "better"
    (both, _) = chapter_lines([chapter, make_chapter("two", accuracy=0.0)])
    assert both[0].verdict == "no difference shown" and both[0].difference == alone.difference


def test_a_worse_method_is_said_to_be_worse(make_chapter: MakeChapter) -> None:
    ((line,),) = chapter_lines([make_chapter(accuracy=-0.1)])
    assert line.verdict == "worse" and line.difference.startswith("−")


def test_a_metric_of_one_run_has_no_difference(make_chapter: MakeChapter) -> None:
    chapter = without_metric(make_chapter(accuracy=0.1, pointing=0.1), "control", "pointing")
    ((_, line),) = chapter_lines([chapter])
    assert (line.control, line.difference, line.interval) == ("–", "–", "")
    assert line.method != "–" and line.verdict == "not compared" and line.n == ""


def test_a_metric_of_no_run_has_no_line(make_chapter: MakeChapter) -> None:
    ((line,),) = chapter_lines([make_chapter(accuracy=0.1)])
    assert line.metric == "accuracy"


def test_runs_without_values_per_sample_are_not_compared(make_chapter: MakeChapter) -> None:
    chapter = make_chapter(accuracy=0.1)
    chapter = replace(chapter, control=replace(chapter.control, samples={}))
    ((line,),) = chapter_lines([chapter])
    assert line.verdict == "not compared" and line.control != "–"


def test_runs_of_other_samples_raise(make_chapter: MakeChapter) -> None:
    chapter = make_chapter(accuracy=0.1)
    samples = {**chapter.method.samples, "id": np.array([f"x{at}" for at in range(40)])}
    with pytest.raises(UserError, match="share no samples"):
        chapter_lines([replace(chapter, method=replace(chapter.method, samples=samples))])


def other_items(chapter: Chapter, names: Mapping[str, list[str]]) -> Chapter:
    """Return the chapter with a metric of captions, whose images have these names by run."""
    for side, at in (("control", 0), ("method", 1)):
        run = without_metric(chapter, side, "pointing")
        run = getattr(run, side)
        ours = {**run.results["ours"], "pointing": {"value": 0.5, "direction": "higher"}}
        values = {"pointing": paired_values(0.1)[at], "pointing.id": np.array(names[side])}
        changed = replace(run, results={**run.results, "ours": ours}, elsewhere=values)
        chapter = replace(chapter, **{side: changed})
    return chapter


def test_items_of_one_image_are_one_cluster(make_chapter: MakeChapter) -> None:
    pairs = [f"image {at // 2}" for at in range(40)]
    chapter = make_chapter(accuracy=0.1)
    ((_, line),) = chapter_lines([other_items(chapter, {"control": pairs, "method": pairs})])
    control, method = paired_values(0.1)
    means = (method - control).reshape(20, 2).mean(axis=1)
    low, high = stats.ttest_1samp(means, 0).confidence_interval()
    assert line.interval == f"{low:.3f} to {high:.3f}" and line.n == "40 questions"


def test_items_with_other_names_are_not_compared(make_chapter: MakeChapter) -> None:
    names = {side: [f"{side} {at}" for at in range(40)] for side in ("control", "method")}
    ((_, line),) = chapter_lines([other_items(make_chapter(accuracy=0.1), names)])
    assert line.verdict == "not compared"


# The page


def test_page_has_a_table_and_a_chapter_per_method(make_chapter: MakeChapter) -> None:
    chapters = [make_chapter(name, accuracy=0.1, pointing=0.0) for name in ("one", "two")]
    chapters[0] = replace(chapters[0], command="overt table one --seeds 5", report="one.html")
    page = render_chapters("Papers", "A lead.", chapters, samples=2, foot="One seed.")
    reader = Reader(page)
    text = visible_words(reader)
    for phrase in ("Papers", "A lead.", "One seed.", "Paper two", "n = 40 questions", "better"):
        assert phrase in text
    assert "overt table one --seeds 5" in text
    sections = [about.get("id") for tag, about in reader.tags if tag == "section"]
    assert sections[-2:] == ["one", "two"]
    links = [about.get("href") for tag, about in reader.tags if tag == "a"]
    assert "one.html" in links and {"#one", "#two"} <= set(links)
    assert reader.count("article", "card") == 4  # two samples of each


def test_ids_of_the_page_are_unique_and_photos_are_defined(make_chapter: MakeChapter) -> None:
    page = render_chapters("T", "L", [make_chapter(name, accuracy=0.1) for name in ("a", "b")])
    tags = Reader(page).tags
    names = [about["id"] for _, about in tags if about.get("id")]
    assert len(names) == len(set(names))
    photos = {
        word
        for tag, about in tags
        if tag == "article"
        for word in (about["class"] or "").split()
        if word.startswith("photo-")
    }
    assert photos and all(f".{one} {{ --photo: url(" in page for one in photos)


def test_both_maps_and_their_change_are_on_a_card(make_chapter: MakeChapter) -> None:
    (chapter,) = (make_chapter(accuracy=0.1),)
    reader = Reader(render_chapters("T", "L", [chapter], samples=1))
    assert reader.count("figure", "original") == 1
    assert reader.count("figure", "view") == 2 and reader.count("figure", "shift") == 1


def test_samples_of_different_images_come_first() -> None:
    """Three questions about one image, then one about another; a sample without image stays."""
    white, black = np.full((2, 2, 3), 255, np.uint8), np.zeros((2, 2, 3), np.uint8)
    images = {"a": white, "b": white, "c": None, "d": white, "e": black, "f": None}
    gallery = [GallerySample(id=name, image=image) for name, image in images.items()]
    assert "".join(one.id for one in images_first(gallery)) == "acefbd"


def test_texts_are_escaped(make_chapter: MakeChapter) -> None:
    chapter = make_chapter(accuracy=0.1)
    chapter = replace(
        chapter,
        title=EVIL,
        idea=EVIL,
        more=EVIL,
        command=EVIL,
        report=EVIL,
        control=replace(chapter.control, name=EVIL),
        metrics=(ChapterMetric("accuracy", EVIL, EVIL),),
    )
    page = render_chapters(EVIL, EVIL, [chapter], foot=EVIL)
    reader = Reader(page)
    assert "alert(1)" not in "".join(about.get("onerror") or "" for _, about in reader.tags)
    assert not any(about.get("src") == "x" for _, about in reader.tags)
    assert reader.count("script") == 1 and "{{ 7*7 }}" in reader.text


def test_chapters_without_gallery_or_metrics_are_said_to_have_none(
    make_chapter: MakeChapter,
) -> None:
    chapter = replace(make_chapter(accuracy=0.1), metrics=())
    for side in ("control", "method"):
        chapter = replace(chapter, **{side: replace(getattr(chapter, side), gallery=())})
    text = visible_words(Reader(render_chapters("T", "L", [chapter])))
    assert "These runs have no gallery." in text
    assert visible_words(Reader(render_chapters("T", "L", [])))
