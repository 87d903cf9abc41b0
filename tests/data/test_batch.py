import jaxtyping
import pytest
import torch

from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.geometry import PixelGeometry, TextGeometry

COUNT = 5


@pytest.fixture
def whole() -> Batch:
    """Five samples over three images, each field telling its sample's number."""
    number = torch.arange(COUNT)
    images = torch.arange(3.0).reshape(3, 1, 1, 1).expand(3, 3, 4, 4)
    sizes = [PixelGeometry.identity(1, (4 + i, 8)).resize((4, 4)) for i in range(3)]
    spans = number.reshape(COUNT, 1, 1).expand(COUNT, 2, 2)
    return Batch(
        ids=tuple(f"s{i}" for i in range(COUNT)),
        images=images,
        image_of=torch.tensor([0, 0, 2, 1, 2]),
        geometry=PixelGeometry.join(sizes),
        tokens=number[:, None].expand(COUNT, 2),
        token_mask=torch.ones(COUNT, 2, dtype=torch.bool),
        text=TextGeometry(tuple("abcde"), spans),
        boxes=number.float().reshape(COUNT, 1, 1).expand(COUNT, 2, 4),
        features=number.float().reshape(COUNT, 1, 1).expand(COUNT, 2, 3),
        region_mask=torch.ones(COUNT, 2, dtype=torch.bool),
        labels=number,
        answers=number.float()[:, None].expand(COUNT, 7),
        references=tuple((f"r{i}",) for i in range(COUNT)),
        groups=tuple(f"g{i}" for i in range(COUNT)),
        target=AttentionMap.from_cells(number.float()[:, None].expand(COUNT, 4), grid(2, 2)),
    )


@pytest.mark.parametrize("rows", [[4, 1], [2, 2, 0], [3], [], [0, 1, 2, 3, 4]])
def test_select_keeps_the_fields_of_each_sample_together(whole, rows):
    chosen = whole.select(torch.tensor(rows, dtype=torch.long))
    assert len(chosen) == len(rows)
    assert chosen.ids == tuple(f"s{row}" for row in rows)
    assert chosen.groups == tuple(f"g{row}" for row in rows)
    assert chosen.references == tuple((f"r{row}",) for row in rows)
    assert chosen.text.texts == tuple("abcde"[row] for row in rows)
    for name in ("tokens", "labels", "boxes", "features", "answers"):
        value = getattr(chosen, name)
        assert [float(one.flatten()[0]) for one in value] == rows
    assert chosen.target.values[:, 0, 0, 0, 0].tolist() == rows
    assert len(chosen.token_mask) == len(chosen.region_mask) == len(rows)

    looked_at = whole.image_of[rows].tolist()
    assert len(chosen.images) == len(set(looked_at)), "only the images somebody looks at"
    assert chosen.images[chosen.image_index][:, 0, 0, 0].tolist() == looked_at
    assert chosen.sample_geometry.size[:, 0].tolist() == [4 + i for i in looked_at]


def test_select_without_image_of(whole):
    plain = Batch(ids=("a", "b", "c"), images=whole.images, geometry=whole.geometry)
    assert plain.image_index.tolist() == [0, 1, 2]
    chosen = plain.select(torch.tensor([2, 0]))
    assert chosen.images[chosen.image_index][:, 0, 0, 0].tolist() == [2, 0]
    assert chosen.sample_geometry.size[:, 0].tolist() == [6, 4]


def test_select_without_images_still_selects_their_geometry(whole):
    """Features of photos that were encoded before: the photos are gone, their sizes are not."""
    for image_of in (None, torch.tensor([2, 1, 0])):
        plain = Batch(ids=("a", "b", "c"), geometry=whole.geometry, image_of=image_of)
        chosen = plain.select(torch.tensor([2, 0]))
        expected = [6, 4] if image_of is None else [4, 6]
        assert chosen.sample_geometry.size[:, 0].tolist() == expected
        assert len(chosen.geometry) == 2


def test_a_batch_of_text_has_no_images():
    batch = Batch(ids=("a", "b"), tokens=torch.zeros(2, 3, dtype=torch.long))
    chosen = batch.select(torch.tensor([1]))
    assert chosen.images is None and chosen.image_of is None and chosen.sample_geometry is None
    assert batch.image_index.tolist() == [0, 1]


def test_to_moves_every_tensor(whole):
    moved = whole.to("meta")
    for name in ("images", "image_of", "tokens", "boxes", "labels", "answers", "region_mask"):
        assert getattr(moved, name).device.type == "meta"
    assert moved.geometry.kept.device.type == "meta"
    assert moved.text.spans.device.type == "meta"
    assert moved.target.values.device.type == "meta"
    assert moved.ids == whole.ids and moved.groups == whole.groups


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"labels": torch.zeros(3).long()}, "labels has 3 rows for 2 samples"),
        ({"region_mask": torch.ones(1, 4).bool()}, "region_mask has 1 rows for 2 samples"),
        ({"groups": ("x",)}, "groups has 1 rows for 2 samples"),
        ({"references": (("x",),) * 3}, "references has 3 rows for 2 samples"),
        ({"text": TextGeometry(("x",), torch.zeros(1, 1, 2).long())}, "text has 1 rows"),
        ({"target": AttentionMap.from_cells(torch.ones(3, 4), grid(2, 2))}, "target has 3 rows"),
        ({"images": torch.zeros(3, 3, 2, 2)}, "images has 3 rows for 2 samples, and no image_of"),
        ({"image_of": torch.zeros(3).long()}, "image_of has 3 rows for 2 samples"),
        ({"geometry": PixelGeometry.identity(1, (2, 2))}, "geometry has 1 rows for 2 samples, and"),
        (
            {
                "images": torch.zeros(3, 3, 2, 2),
                "geometry": PixelGeometry.identity(2, (2, 2)),
                "image_of": torch.zeros(2).long(),
            },
            "3 images with the geometry of 2",
        ),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, sentence, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    with pytest.raises(ValueError, match=sentence):
        Batch(ids=("a", "b"), **fields)
