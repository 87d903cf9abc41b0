import jaxtyping
import pytest
import torch

from overt.attention import AttentionMap, grid
from overt.data.batch import Batch
from overt.geometry import PixelGeometry, TextGeometry

COUNT = 5


@pytest.fixture
def batch() -> Batch:
    """Five samples over three images; each field contains the number of its sample."""
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
def test_select_keeps_the_fields_of_each_sample_together(batch, rows):
    chosen = batch.select(torch.tensor(rows, dtype=torch.long))
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

    image_numbers = batch.image_of[rows].tolist()
    assert len(chosen.images) == len(set(image_numbers)), "only the images of the selected samples"
    assert chosen.images[chosen.image_index][:, 0, 0, 0].tolist() == image_numbers
    assert chosen.sample_geometry.size[:, 0].tolist() == [4 + i for i in image_numbers]


def test_select_without_image_of(batch):
    plain = Batch(ids=("a", "b", "c"), images=batch.images, geometry=batch.geometry)
    assert plain.image_index.tolist() == [0, 1, 2]
    chosen = plain.select(torch.tensor([2, 0]))
    assert chosen.images[chosen.image_index][:, 0, 0, 0].tolist() == [2, 0]
    assert chosen.sample_geometry.size[:, 0].tolist() == [6, 4]


def test_select_without_images_selects_the_geometry(batch):
    """Features that were encoded before: the batch has photo sizes, and no photos."""
    for image_of in (None, torch.tensor([2, 1, 0])):
        plain = Batch(ids=("a", "b", "c"), geometry=batch.geometry, image_of=image_of)
        chosen = plain.select(torch.tensor([2, 0]))
        expected = [6, 4] if image_of is None else [4, 6]
        assert chosen.sample_geometry.size[:, 0].tolist() == expected
        assert len(chosen.geometry) == 2


def test_a_batch_of_text_has_no_images():
    batch = Batch(ids=("a", "b"), tokens=torch.zeros(2, 3, dtype=torch.long))
    chosen = batch.select(torch.tensor([1]))
    assert chosen.images is None and chosen.image_of is None and chosen.sample_geometry is None
    assert batch.image_index.tolist() == [0, 1]


def test_to_moves_every_tensor(batch):
    moved = batch.to("meta")
    for name in ("images", "image_of", "tokens", "boxes", "labels", "answers", "region_mask"):
        assert getattr(moved, name).device.type == "meta"
    assert moved.geometry.kept.device.type == "meta"
    assert moved.text.spans.device.type == "meta"
    assert moved.target.values.device.type == "meta"
    assert moved.ids == batch.ids and moved.groups == batch.groups


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": torch.zeros(3).long()}, "labels .*3.* 2"),
        ({"region_mask": torch.ones(1, 4).bool()}, "region_mask .*1.* 2"),
        ({"groups": ("x",)}, "groups .*1.* 2"),
        ({"references": (("x",),) * 3}, "references .*3.* 2"),
        ({"text": TextGeometry(("x",), torch.zeros(1, 1, 2).long())}, "text has 1 rows"),
        ({"target": AttentionMap.from_cells(torch.ones(3, 4), grid(2, 2))}, "target has 3 rows"),
        ({"images": torch.zeros(3, 3, 2, 2)}, "images .*3.* 2 .*image_of"),
        ({"image_of": torch.zeros(3).long()}, "image_of .*3.* 2"),
        ({"geometry": PixelGeometry.identity(1, (2, 2))}, "geometry .*1.* 2 .*image_of"),
        (
            {
                "images": torch.zeros(3, 3, 2, 2),
                "geometry": PixelGeometry.identity(2, (2, 2)),
                "image_of": torch.zeros(2).long(),
            },
            "images .*3.*geometry .*2",
        ),
    ],
)
def test_fields_with_the_wrong_number_of_rows_raise(fields, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    with pytest.raises(ValueError, match=message):
        Batch(ids=("a", "b"), **fields)


def test_with_own_images_gives_each_sample_its_image(batch):
    separate = batch.with_own_images()
    assert separate.image_of is None and separate.images[:, 0, 0, 0].tolist() == [0, 0, 2, 1, 2]
    assert torch.equal(separate.images[separate.image_index], batch.images[batch.image_index])
    assert separate.geometry.size[:, 0].tolist() == [4, 4, 6, 5, 6] and separate.ids == batch.ids
    assert separate.with_own_images() is separate
    assert Batch(ids=("a",)).with_own_images().images is None
