"""The attributes of cells are those of the things on them."""

import torch

from overt.data.scenes.cell_attributes import (
    ABSENT,
    LEAST_SHARE,
    CellAttributes,
    attribute_classes,
)
from overt.data.scenes.dataset import Scenes
from overt.data.scenes.world import VALUES

SCENES = Scenes("val", seed=0, count=3, size=32, questions=1, cells=(4, 4))


def test_a_cell_has_the_attributes_of_the_thing_that_covers_most_of_it() -> None:
    found = CellAttributes(SCENES).batch([2, 0])
    for at, row in enumerate((2, 0)):
        scene, _ = SCENES.scene_and_questions(row)
        masks = SCENES.masks(row).float()
        for cell in range(16):
            top, left = cell // 4 * 8, cell % 4 * 8
            shares = masks[:, top : top + 8, left : left + 8].mean(dim=(1, 2))
            labels = found["attributes"][at, cell].tolist()
            if float(shares.max()) < LEAST_SHARE:
                assert labels == [ABSENT] * 4
                continue
            thing = scene.things[int(shares.argmax())]
            wanted = [getattr(thing, name) for name in VALUES]
            assert [VALUES[name][n - 1] for name, n in zip(VALUES, labels, strict=True)] == wanted
    images = SCENES.batch([2, 0]).images
    assert images is not None and torch.equal(found["images"], images)
    assert bool((found["attributes"] == ABSENT).any() and (found["attributes"] > 0).any())


def test_labels_are_below_the_number_of_classes() -> None:
    labels = CellAttributes(SCENES).batch([0, 1, 2])["attributes"].flatten(0, 1)
    assert labels.max(dim=0).values.lt(torch.tensor(attribute_classes())).all()


def test_coverage_is_the_share_of_each_cell() -> None:
    shares = SCENES.coverage([1])[0]
    masks = SCENES.masks(1).float()
    by_hand = masks.unflatten(2, (4, 8)).unflatten(1, (4, 8)).mean(dim=(2, 4)).flatten(1)
    torch.testing.assert_close(shares[: len(masks)], by_hand)
    assert not shares[len(masks) :].any()
