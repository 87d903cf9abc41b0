import numpy as np
import pytest
import torch
from PIL import Image

from overt.data.voc import KINDS, VOID, colour_of, read_things, voc_boxes, voc_masks
from overt.errors import CorruptFileError, UserError

XML = """<annotation><folder>VOC2007</folder><filename>{name}.jpg</filename>
<size><width>8</width><height>6</height><depth>3</depth></size>{objects}</annotation>"""
OBJECT = """\
<object><name>{}</name><pose>Left</pose><truncated>1</truncated><difficult>{}</difficult>
<bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"""


def make_object(name, box, difficult=0):
    return OBJECT.format(name, difficult, *box)


@pytest.fixture
def root(tmp_path, write_photo):
    for year in ("2007", "2012"):
        folder = tmp_path / "VOCdevkit" / f"VOC{year}"
        for kind in ("Annotations", "SegmentationClass"):
            (folder / kind).mkdir(parents=True)
        for task in ("Main", "Segmentation"):
            for split in ("val", "test"):
                path = folder / "ImageSets" / task / f"{split}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("000001\n000002\n")
        objects = {
            "000001": make_object("dog", (1, 1, 4, 6)) + make_object("person", (5, 1, 8, 3), 1),
            "000002": make_object("dog", (1, 1, 4, 3)) + make_object("dog", (5, 4, 8, 6)),
        }
        for name, objects_xml in objects.items():
            write_photo(folder / "JPEGImages" / f"{name}.jpg", (6, 8))
            text = XML.format(name=name, objects=objects_xml)
            (folder / "Annotations" / f"{name}.xml").write_text(text)
            write_mask(folder / "SegmentationClass" / f"{name}.png")
    return tmp_path


def write_mask(path):
    """A palette mask: a dog above, void below it, a person at the lower right."""
    kinds = np.zeros((6, 8), dtype=np.uint8)
    kinds[:3, :4] = 1 + KINDS.index("dog")
    kinds[3, :4] = 255
    kinds[4:, 4:] = 1 + KINDS.index("person")
    image = Image.fromarray(kinds, mode="P")
    palette = [0] * 768
    for number in (KINDS.index("dog"), KINDS.index("person")):
        palette[3 * number + 3 : 3 * number + 6] = colour_of(number)
    palette[765:] = VOID
    image.putpalette(palette)
    image.save(path)


SMALL = {"size": (4, 4), "cells": (2, 2)}


def test_boxes_match_hand_computed_values(root):
    found = voc_boxes(root, **SMALL)
    batch = found.batch(range(3))
    assert batch.ids == tuple(
        f"voc2007-boxes/{name}"
        for name in ("000001.jpg/dog", "000001.jpg/person", "000002.jpg/dog")
    )
    assert batch.boxes[2].tolist() == [[0, 0, 4, 3], [4, 3, 8, 6]]  # edges, counted from 0
    torch.testing.assert_close(
        batch.target.weights[:, 0, 0, 0],
        torch.tensor([[0.5, 0, 0.5, 0], [0, 1, 0, 0], [0.5, 0, 0, 0.5]]),
    )


def test_masks_match_hand_computed_values(root):
    batch = voc_masks(root, **SMALL).batch([0, 1])
    torch.testing.assert_close(
        batch.target.weights[:, 0, 0, 0], torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1.0]])
    )


def test_class_colours_match_the_published_palette():
    published = {"aeroplane": (128, 0, 0), "bicycle": (0, 128, 0), "dog": (64, 0, 128)}
    published |= {"person": (192, 128, 128), "tvmonitor": (0, 64, 128), "car": (128, 128, 128)}
    for name, colour in published.items():
        assert colour_of(KINDS.index(name)) == colour
    assert colour_of(254) == VOID and len(set(map(colour_of, range(20)))) == 20


@pytest.mark.parametrize(
    "text",
    [
        "<annotation><object>",
        XML.format(name="a", objects=make_object("unicorn", (1, 1, 2, 2))),
        XML.format(name="a", objects=make_object("dog", (3, 1, 2, 2))),
        XML.format(name="a", objects=make_object("dog", (0, 1, 2, 2))),
        XML.format(name="a", objects="<object><name>dog</name></object>"),
        '<!DOCTYPE a [<!ENTITY x "xxxx">]><annotation>&x;</annotation>',
    ],
    ids=["cut off", "kind", "edges", "from 1", "no box", "entities"],
)
def test_invalid_annotation_raises_with_its_file(tmp_path, text):
    path = tmp_path / "000001.xml"
    path.write_text(text)
    with pytest.raises(CorruptFileError, match=r"000001\.xml"):
        read_things(path)


def test_missing_files_and_unknown_names_raise(root):
    folder = root / "VOCdevkit" / "VOC2012"
    (folder / "SegmentationClass" / "000002.png").unlink()
    with pytest.raises(CorruptFileError, match=r"000002.png.*missing"):
        voc_masks(root, **SMALL)
    (folder / "Annotations" / "000001.xml").unlink()
    with pytest.raises(CorruptFileError, match=r"000001.xml.*missing"):
        voc_boxes(root, year="2012", **SMALL)
    (folder / "ImageSets" / "Main" / "val.txt").write_text("../../etc\n")
    with pytest.raises(CorruptFileError, match=r"not.*photo id"):
        voc_boxes(root, "val", "2012", **SMALL)
    with pytest.raises(UserError, match=r"voc.*trainval"):
        voc_boxes(root, "all")
