"""A page with one chapter per method: each method next to its control, on the same samples.

A report compares runs of one task. This page puts several such comparisons on one page: a table of
tested differences first, then one chapter per method with the same images before and after.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from overt.metrics import statistics
from overt.metrics.scorecard.differences import Difference
from overt.viz.gallery import (
    Gallery,
    build_gallery,
    colour_scale_css,
    dimmed_photo_css,
    heat_palette,
)
from overt.viz.gallery_sample import GallerySample
from overt.viz.packed_maps import difference_scale_css
from overt.viz.results_table import (
    decimal_places,
    finite_number,
    format_interval,
    format_number,
)
from overt.viz.run_comparison import compare_other_items, compare_runs, describe_verdict
from overt.viz.run_reader import Run
from overt.viz.templates import render_template
from overt.viz.training_curves import COLOURS

SAMPLES = 3  # of each chapter
UNKNOWN = "–"


@dataclass(frozen=True)
class ChapterMetric:
    """A metric of a chapter.

    Args:
        key: Name of the metric in the results.
        words: What it measures, in a few words.
        items: What a sample of this metric is, in the plural, such as "questions".
    """

    key: str
    words: str
    items: str = "samples"


@dataclass(frozen=True)
class Chapter:
    """A method and its control.

    Args:
        name: Short name and anchor of the chapter, such as "LTPA"; letters, digits and hyphens.
        title: Title, such as that of a paper.
        idea: What the method does, in one sentence.
        control: The run without the method.
        method: The run with the method.
        metrics: What to compare; metrics that no run has are left out.
        more: Where to find more.
        command: Command of the same comparison at full length, with five seeds.
        report: Path of the full report of both runs, relative to the page.
    """

    name: str
    title: str
    idea: str
    control: Run
    method: Run
    metrics: tuple[ChapterMetric, ...]
    more: str = ""
    command: str = ""
    report: str = ""


@dataclass(frozen=True)
class ChapterLine:
    """One metric of a chapter as text: both values, their difference and its verdict."""

    metric: str
    arrow: str
    control: str
    method: str
    difference: str
    interval: str
    verdict: str
    sign: str
    n: str


def chapter_lines(chapters: Sequence[Chapter]) -> list[tuple[ChapterLine, ...]]:
    """Compare both runs of each chapter, corrected for all comparisons by Holm's method.

    A metric that only one run has gets a line with one value and no difference.

    Args:
        chapters: The chapters.

    Returns:
        The lines of each chapter, in the order of its metrics.

    Raises:
        UserError: The runs of a chapter share no sample.
    """
    found = [_differences(one) for one in chapters]
    corrected = iter(statistics.holm([one.p for some in found for one in some.values()]))
    tested = [
        {key: replace(one, holm=next(corrected)) for key, one in some.items()} for some in found
    ]
    return [
        tuple(
            _line(chapter, metric, some.get(metric.key))
            for metric in chapter.metrics
            if _value(chapter.control, metric.key) is not None
            or _value(chapter.method, metric.key) is not None
        )
        for chapter, some in zip(chapters, tested, strict=True)
    ]


def render_chapters(
    title: str, lead: str, chapters: Sequence[Chapter], samples: int = SAMPLES, foot: str = ""
) -> str:
    """Render the page: a table with a line per metric, then the chapters.

    Args:
        title: Title of the page.
        lead: One or two sentences below the title.
        chapters: The chapters.
        samples: Number of samples per chapter: the first ones of different images, not selected.
        foot: What a reader has to know about the numbers.

    Returns:
        One HTML file without network requests.

    Raises:
        UserError: The runs of a chapter share no sample.
    """
    galleries = [
        build_gallery([images_first(run.gallery) for run in (one.control, one.method)], samples)
        for one in chapters
    ]
    return render_template(
        "chapters.html.jinja",
        title=title,
        lead=lead,
        foot=foot,
        chapters=list(zip(chapters, chapter_lines(chapters), galleries, strict=True)),
        has=_shown_elements(galleries),
        colours=COLOURS,
        palette=heat_palette(),
        scale=colour_scale_css(),
        under=dimmed_photo_css(),
        change=difference_scale_css(),
    )


def images_first(gallery: Sequence[GallerySample]) -> list[GallerySample]:
    """Sort samples so that the first ones of all images precede further ones of the same image."""
    seen: Counter[bytes] = Counter()
    places = []
    for sample in gallery:
        image = b"" if sample.image is None else sample.image.tobytes()
        places.append(seen[image] if image else 0)
        seen[image] += 1
    return [sample for _, sample in sorted(zip(places, gallery, strict=True), key=itemgetter(0))]


def _differences(chapter: Chapter) -> dict[str, Difference]:
    """Return the differences, method minus control, of the metrics that both runs have."""
    pairs = compare_runs([chapter.control, chapter.method])  # none without per-sample results
    found = {one.key: one for pair in pairs for one in pair.differences}
    others = [one.key for one in chapter.metrics if one.key not in found]
    found |= {one.key: one for one in compare_other_items(chapter.control, chapter.method, others)}
    return {one.key: found[one.key] for one in chapter.metrics if one.key in found}


def _value(run: Run, key: str) -> float | None:
    ours = run.results.get("ours")
    entry = ours.get(key) if isinstance(ours, dict) else None
    return finite_number(entry.get("value")) if isinstance(entry, dict) else None


def _line(chapter: Chapter, metric: ChapterMetric, gap: Difference | None) -> ChapterLine:
    values = [_value(run, metric.key) for run in (chapter.control, chapter.method)]
    digits = decimal_places([value for value in values if value is not None])
    control, method = (UNKNOWN if one is None else format_number(one, digits) for one in values)
    if gap is None:
        return ChapterLine(metric.words, "", control, method, UNKNOWN, "", "not compared", "", "")
    finer = decimal_places([gap.mean, gap.low, gap.high])
    return ChapterLine(
        metric=metric.words,
        arrow={"higher": "↑", "lower": "↓"}.get(gap.direction, ""),
        control=control,
        method=method,
        difference=("+" if gap.mean > 0 else "") + format_number(gap.mean, finer),
        interval=format_interval(gap.low, gap.high, finer),
        verdict=describe_verdict(gap),
        sign=gap.verdict,
        n=f"{gap.n:,} {metric.items}",
    )


def _shown_elements(galleries: Sequence[Gallery]) -> dict[str, bool]:
    """Return which elements any gallery has, so that the legend explains these only."""
    names = galleries[0].has if galleries else {}
    return {name: any(one.has[name] for one in galleries) for name in names}
