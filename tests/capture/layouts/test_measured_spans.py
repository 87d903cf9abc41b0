"""The tokens that a patch of a photo changes most are those whose boxes cover it, in any family.

All models are tiny and have random weights; their attention is on. See `vision_language`.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from overt.attention import Span
from overt.capture import watch
from overt.capture.layouts.hf_layouts import layout_of, layouts_of
from overt.capture.layouts.influence import language_model_states
from overt.capture.layouts.measured_spans import mark_spans, marked_span, span_mask

transformers = pytest.importorskip("transformers", reason="models come from transformers")

from tests.capture.layouts.vision_language import (  # noqa: E402
    FAMILIES,
    IMAGE,
    REFUSED,
    VIDEO,
    VIDEO_FAMILIES,
    batch,
    clip,
    family,
    photo,
    video_batch,
)

SIZES = [(60, 100), (90, 50)]
PLACED = [one for one in FAMILIES if one.spans]
RESAMPLED = [one for one in FAMILIES if not one.spans]
QUICK = ("InternVL", "Mllama")


def quick(names, chosen=QUICK):
    """Parameters, all but a few of them for the long tests."""
    return [
        pytest.param(one, id=str(one), marks=[] if str(one) in chosen else pytest.mark.long)
        for one in names
    ]


def positions(span, samples):
    if isinstance(span.index, slice):
        return torch.arange(span.index.start, span.index.stop).expand(samples, -1)
    return span.index


def boxes_of(span, samples):
    """Position and box (x0, y0, x1, y1) of each cell of a span."""
    return positions(span, samples), span.geometry.cells(span.shape)


def change_of(model, before, after, keys=False):
    """How much each token differs that the language model reads, or the keys beside it."""
    states = [language_model_states(model, inputs) for inputs in (before, after)]
    one, other = (next(iter(s.beside.values())) if keys else s.sequence for s in states)
    return (one - other).reshape(len(before["input_ids"]), -1, one.shape[-1]).norm(dim=-1)


def covered(box, of):
    """Share of each box that another box covers."""
    low, high = torch.maximum(box[:2], of[:, :2]), torch.minimum(box[2:], of[:, 2:])
    area = (of[:, 2:] - of[:, :2]).clamp_min(1e-9).prod(dim=1)
    return (high - low).clamp_min(0).prod(dim=1) / area


def check_change(change, spans, sample, samples, box):
    """Hold the change of every token against the boxes: largest where `box` covers a cell.

    `spans` show the changed image; the tokens of all other spans must change less.
    """
    others = torch.arange(samples) != sample
    assert (change[others] < 1e-3 * change.max()).all()
    inside, near = (torch.zeros(change.shape[1]).bool() for _ in range(2))
    box = torch.tensor(box).double()
    wide = box + torch.tensor([-6.0, -6.0, 6.0, 6.0])  # filters blur an edge
    for index, cells in (boxes_of(span, samples) for span in spans):
        there = index[sample] >= 0
        inside[index[sample][there][covered(box, cells[sample])[there] > 0.5]] = True
        near[index[sample][there][covered(wide, cells[sample])[there] > 0]] = True
    assert inside.any()
    assert near[change[sample].argmax()]
    assert change[sample][inside].min() > change[sample][~near].max()


def draw_cell(draw, span, sample, samples):
    """A random cell of a span that is not all padding, as whole pixels."""
    index, cells = boxes_of(span, samples)
    there = (index[sample] >= 0) & ((cells[sample][:, 2:] - cells[sample][:, :2]).amin(dim=1) > 3)
    cell = cells[sample][there][draw.integers(int(there.sum()))]
    return int(cell[0].ceil()), int(cell[1].ceil()), int(cell[2]), int(cell[3])


@pytest.mark.parametrize("one", quick(PLACED))
def test_a_patch_changes_most_the_tokens_whose_boxes_cover_it(one):
    model, images = one.build()
    photos = [[photo(size)] for size in SIZES]
    inputs = batch(one, model, images, photos)
    found = layouts_of(model, inputs, processor=images, images=photos)
    keys = "vision" if one.name == "Mllama" else ""
    layout = found[keys or "language"]
    placed = [span for span in layout.spans if span.geometry is not None]
    assert [span.name for span in placed] == list(one.spans)
    draw = np.random.default_rng(0)
    for sample, size in enumerate(SIZES):
        for span in placed:
            box = draw_cell(draw, span, sample, 2)
            drawn = list(photos)
            drawn[sample] = [photo(size, box)]
            change = change_of(model, inputs, batch(one, model, images, drawn), bool(keys))
            check_change(change, placed, sample, 2, box)


@pytest.mark.parametrize("name", quick(VIDEO_FAMILIES, ("Qwen2.5-VL",)))
def test_a_patch_of_a_frame_changes_most_its_tokens(name):
    model, videos = VIDEO_FAMILIES[name]()
    clips = [clip(4, size) for size in SIZES]
    inputs = video_batch(model, videos, clips)
    layout = layout_of(model, inputs, processor=videos, videos=clips)
    video = layout.find("video")
    steps = video.shape[0]
    assert steps == (2 if name.startswith("Qwen") else 4)
    draw = np.random.default_rng(0)
    for sample, frame in ((0, 1), (1, 2), (0, 3)):
        # The cells of the step that has the frame.
        time = frame * steps // 4
        index = positions(video, 2).reshape(2, steps, -1)[:, time]
        step = Span("step", video.shape[1:], index, video.geometry)
        box = draw_cell(draw, step, sample, 2)
        drawn = list(clips)
        drawn[sample] = clip(4, SIZES[sample], frame, box)
        change = change_of(model, inputs, video_batch(model, videos, drawn))
        check_change(change, [step], sample, 2, box)


@pytest.mark.parametrize("one", quick(RESAMPLED, ("BLIP-2",)))
def test_tokens_of_a_resampler_have_no_place(one):
    model, images = one.build()
    photos = [[photo(size)] for size in SIZES]
    inputs = batch(one, model, images, photos)
    found = layouts_of(model, inputs, processor=images, images=photos)
    language = found["language"]
    queries = language.find("queries")
    assert queries.geometry is None
    where = inputs["input_ids"] == IMAGE
    assert torch.equal(span_mask([queries], *where.shape), where)
    with pytest.raises(ValueError, match="no span 'image'"):
        language.find("image")


def test_the_queries_of_blip_2_attend_to_a_grid_that_has_places():
    one = family("BLIP-2")
    model, images = one.build()
    photos = [[photo(size)] for size in SIZES]
    inputs = batch(one, model, images, photos)
    keys = layouts_of(model, inputs, processor=images, images=photos)["vision"]
    with torch.no_grad(), watch(model) as trace:
        model(**inputs)
    cross = [call for call in trace if call.cross]
    assert {call.shape[3] for call in cross} == {len(keys)}
    assert keys.find("image").geometry.cells((4, 4))[0, 5].tolist() == pytest.approx(
        [25, 15, 50, 30]
    )


@pytest.mark.parametrize("one", quick(REFUSED, ()))
def test_tokens_that_depend_on_overlapping_areas_are_refused(one):
    model, images = one.build()
    photos = [[photo(size)] for size in SIZES]
    inputs = batch(one, model, images, photos)
    with pytest.raises(ValueError, match="grid of cells"):
        layouts_of(model, inputs, processor=images, images=photos)


@pytest.mark.parametrize("side", ["left", "right"])
def test_several_images_and_padding_on_either_side(side):
    one = family("InternVL")
    model, images = one.build()
    photos = [[photo((60, 100)), photo((40, 40))], [photo((90, 50))], [photo((50, 120))]]
    inputs = batch(one, model, images, photos, side)
    layout = layout_of(model, inputs, processor=images, images=photos)
    first = ["image 1", "detail 1", "image 2"]
    assert [span.name for span in layout.spans if span.geometry is not None] == first
    second = layout.find("image 2")
    assert (positions(second, 3)[1:] == -1).all()
    assert second.geometry.cells(second.shape)[1:].abs().sum() == 0
    taken = span_mask([layout.find(name) for name in first], *inputs["input_ids"].shape)
    assert torch.equal(taken, inputs["input_ids"] == IMAGE)
    # Without another photo in the first sample, the second one stays where it is.
    drawn = [[photos[0][0], photo((40, 40), (21, 21, 39, 39))], *photos[1:]]
    change = change_of(model, inputs, batch(one, model, images, drawn, side))
    check_change(change, [second], 0, 3, (21, 21, 39, 39))


@pytest.mark.parametrize("name", quick(("InternVL", "Gemma 3, pan and scan"), ("InternVL",)))
def test_a_sample_without_images_has_text_only(name):
    one = family(name)
    model, images = one.build()
    photos = [[photo((60, 100))], [], [photo((90, 50))]]
    inputs = batch(one, model, images, photos)
    layout = layout_of(model, inputs, processor=images, images=photos)
    for span in layout.spans:
        if span.geometry is not None:
            assert (positions(span, 3)[1] == -1).all()
            assert span.geometry.cells(span.shape)[1].abs().sum() == 0
    ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
    assert torch.equal(span_mask([layout.find("text")], *ids.shape)[1], real[1])


def test_keys_of_empty_tiles_are_padding():
    one = family("Mllama")
    model, images = one.build()
    photos = [[photo((30, 30))], [photo((60, 100))]]
    inputs = batch(one, model, images, photos)
    layout = layout_of(model, inputs, processor=images, images=photos, part="vision")
    padding = span_mask([layout.find("padding")], 2, len(layout))
    assert padding.sum(dim=1).tolist() == [3 * 16, 0]
    assert positions(layout.find("image"), 2)[0].ge(0).sum() == 16


@pytest.mark.long
def test_images_and_videos_in_one_sample():
    one = family("Qwen2-VL")
    model, images = one.build()
    _, videos = VIDEO_FAMILIES["Qwen2-VL"]()
    both = SimpleNamespace(image_processor=images, video_processor=videos)
    photos, clips = [[photo(size)] for size in SIZES], [clip(4, size) for size in SIZES]
    parts = batch(one, model, images, photos, "right"), video_batch(model, videos, clips, "right")
    inputs = {**parts[0], **parts[1]}
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        inputs[name] = torch.cat([part[name] for part in parts], dim=1)
    layout = layout_of(model, inputs, processor=both, images=photos, videos=clips)
    ids = inputs["input_ids"]
    for name, token in (("image", IMAGE), ("video", VIDEO)):
        assert torch.equal(span_mask([layout.find(name)], *ids.shape), ids == token)
    with pytest.raises(ValueError, match="pixel_values_videos"):
        layouts_of(model, inputs, processor=both, images=photos)


def test_images_of_the_wrong_sample_or_settings_are_refused():
    one = family("InternVL")
    model, images = one.build()
    photos = [[photo((60, 100))], [photo((60, 100))]]
    inputs = batch(one, model, images, photos)
    with pytest.raises(ValueError, match="given for sample 0"):
        layouts_of(model, inputs, processor=images, images=[[(60, 100), (60, 100)], []])
    with pytest.raises(ValueError, match="same ones"):
        layouts_of(model, inputs, processor=images, images=[(60, 100), (60, 60)])
    with pytest.raises(ValueError, match=r"processor=.*images="):
        layouts_of(model, {**inputs, "pixel_values": inputs["pixel_values"][None]})


def test_the_measurement_leaves_the_model_as_it_was():
    one = family("Mistral 3")
    model, images = one.build()
    model.train()
    photos = [[photo(size)] for size in SIZES]
    inputs = batch(one, model, images, photos)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    layouts_of(model, inputs, processor=images, images=photos)
    assert model.training and torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not inputs["pixel_values"].requires_grad


# --- marks between the cells


def grid_span(rows):
    index = torch.tensor(rows)[None]
    return Span("image", tuple(index.shape[1:]), index.flatten(1))


def test_a_newline_follows_every_row_and_another_mark_is_a_separator():
    # Two rows of cells that end in 7, an end (8), one more grid of two rows without newlines.
    ids = torch.tensor([[1, 9, 9, 7, 9, 9, 8, 5, 9, 9, 9, 9, 8, 2]])
    spans = [grid_span([[1, 2], [4, 5]]), grid_span([[8, 9], [10, 11]])]
    marked = torch.isin(ids, torch.tensor([7, 8]))
    found = {span.name: span.index for span in mark_spans(spans, marked, ids)}
    assert found == {"newline": slice(3, 4), "separator": slice(6, 7)}
    # The mark after the last row is a newline if it is the same as the others.
    ids[0, 6] = 7
    found = {span.name: positions(span, 1).tolist() for span in mark_spans(spans, marked, ids)}
    assert found == {"newline": [[3, 6]]}
    # Text between is neither.
    assert mark_spans(spans, torch.zeros_like(marked), ids) == []


def test_marked_positions_make_a_span():
    which = torch.tensor([[False, True, True], [True, False, False]])
    (span,) = marked_span("padding", which)
    assert span.index.tolist() == [[1, 2], [0, -1]]
    assert torch.equal(span_mask([span], 2, 3), which)
    assert marked_span("padding", which & False) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Pixtral", {"newline"}), ("Aya Vision", {"separator"}), ("LLaVA-OneVision", {"newline"})],
)
def test_marks_of_families(name, expected):
    one = family(name)
    model, images = one.build()
    tokenizer = MarksTokenizer()
    photos = [[photo(size)] for size in SIZES]
    inputs = batch(one, model, images, photos)
    layout = layout_of(model, inputs, processor=images, images=photos, tokenizer=tokenizer)
    assert expected == {"newline", "separator"} & {span.name for span in layout.spans}
    real = inputs["attention_mask"].bool()
    assert torch.equal(span_mask(layout.spans, *real.shape), real)
    text = span_mask([layout.find("text")], *real.shape)
    assert torch.equal(text, real & torch.isin(inputs["input_ids"], torch.tensor([5, 7, 8, 9])))


class MarksTokenizer:
    """Knows only which ids are special."""

    all_special_ids = (0, 90, 91, 92, 93)
    unk_token_id = cls_token_id = None


def test_the_page_lists_every_family_that_is_tested():
    page = (Path(__file__).parents[3] / "docs" / "vision-language.md").read_text()
    table = page.split("## Families")[1].split("## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    listed = {kind.strip(): text.strip() for _, kind, text, _ in rows}
    names = [one.name for one in (*FAMILIES, *REFUSED)] + list(VIDEO_FAMILIES)
    for name in names:
        assert any(name.split(", uneven")[0].split(", overlap")[0] in t for t in listed.values())
    placed = [one for one in FAMILIES if one.spans]
    assert len(placed) >= 15
    for one in placed:
        assert any(one.name in listed[kind] for kind in listed if kind.startswith("images"))
    assert all(one.name in listed["images by a resampler, as queries"] for one in RESAMPLED)
    assert all(one.name in listed["not placed, an error"] for one in REFUSED)


# --- random combinations


def draw_photos(draw, one):
    """Photos of random sizes, none or several per sample unless the family takes one."""
    photos = []
    for _ in range(draw.integers(1, 4)):
        count = 1 if one.single else int(draw.integers(1, 4))
        sizes = draw.integers(30, 140, (count, 2)).tolist()
        photos.append([photo(tuple(size)) for size in sizes])
    return photos


def spans_of(layout, number, several):
    """The spans that show the image of this number."""
    if not several:
        return [span for span in layout.spans if span.geometry is not None]
    names = [f"image {number + 1}", f"detail {number + 1}"]
    return [
        span
        for span in layout.spans
        if span.name in names or span.name.startswith(f"image {number + 1} tile")
    ]


def check_combination(seed):
    """Return whether a random batch was placed; a wrong label fails."""
    draw = np.random.default_rng(seed)
    one = (*PLACED, *RESAMPLED, *REFUSED)[seed % (len(PLACED) + len(RESAMPLED) + len(REFUSED))]
    model, images = one.build()
    photos = draw_photos(draw, one)
    side = ["left", "right"][draw.integers(2)]
    sizes = [[each.size for each in row] for row in photos]
    print(f"seed {seed}: {one}, sizes {sizes}, padding on the {side}")  # shown on failure
    try:
        inputs = batch(one, model, images, photos, side)
        with torch.no_grad():
            language_model_states(model, inputs)
    except Exception:  # the family itself does not take this batch
        return "not run"
    try:
        found = layouts_of(
            model, inputs, processor=images, images=photos, tokenizer=MarksTokenizer()
        )
    except ValueError:
        return "refused"
    text = found["language"]
    ids, real = inputs["input_ids"], inputs["attention_mask"].bool()
    assert torch.equal(span_mask(text.spans, *ids.shape), real), one
    words = torch.isin(ids, torch.tensor([5, 7, 8, 9])) & real
    assert torch.equal(span_mask([text.find("text")], *ids.shape), words), one
    if one in RESAMPLED:
        assert all(span.geometry is None for span in text.spans), one
        return "placed"
    keys = one.name == "Mllama"
    layout = found["vision"] if keys else text
    sample = int(draw.integers(len(photos)))
    number = int(draw.integers(len(photos[sample])))
    shown = spans_of(layout, number, max(map(len, photos)) > 1)
    assert shown, one
    shown_here = [span for span in shown if (positions(span, len(photos))[sample] >= 0).any()]
    span = shown_here[draw.integers(len(shown_here))]
    box = draw_cell(draw, span, sample, len(photos))
    drawn = [list(row) for row in photos]
    drawn[sample][number] = photo(photos[sample][number].size[::-1], box)
    change = change_of(model, inputs, batch(one, model, images, drawn, side), keys)
    check_change(change, shown, sample, len(photos), box)
    return "placed"


@pytest.mark.long
def test_no_random_combination_is_mislabeled():
    found = [check_combination(seed) for seed in range(200)]
    assert found.count("placed") >= 150, {each: found.count(each) for each in found}
