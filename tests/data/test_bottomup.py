"""Bottom-up features in the official files."""

from pathlib import Path

import pytest
import torch

from overt import files
from overt.data.bottomup import INDEX, BottomUp, is_bottom_up, photo_number
from overt.errors import BadInput, Damaged
from tests.recipes.a2.small import write_bottom_up


def test_regions_of_several_files_are_found_and_padded(tmp_path: Path) -> None:
    write_bottom_up(tmp_path / "a.tsv", range(3))
    write_bottom_up(tmp_path / "b.tsv", range(3, 6))
    found = BottomUp(tmp_path)
    assert len(found) == 6 and 4 in found and 6 not in found and found.width == 8
    some = found.get([2, 3])  # 4 and 2 regions
    assert some.features.shape == (2, 4, 8) and some.boxes.shape == (2, 4, 4)
    assert some.present.tolist() == [[True] * 4, [True, True, False, False]]
    assert not some.features[1, 2:].any() and some.features[1, :2].all()
    alone = found.get([3])
    torch.testing.assert_close(alone.features[0], some.features[1, :2])


def test_where_lines_begin_is_found_once(tmp_path: Path) -> None:
    write_bottom_up(tmp_path / "a.tsv", range(3))
    first = BottomUp(tmp_path).get([1])
    kept = (tmp_path / INDEX).stat().st_mtime_ns
    torch.testing.assert_close(BottomUp(tmp_path).get([1]).features, first.features)
    assert (tmp_path / INDEX).stat().st_mtime_ns == kept
    write_bottom_up(tmp_path / "a.tsv", range(5))  # another file: found anew
    assert len(BottomUp(tmp_path)) == 5


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    assert not is_bottom_up(tmp_path)
    with pytest.raises(BadInput, match=r"no \*.tsv"):
        BottomUp(tmp_path)
    write_bottom_up(tmp_path / "a.tsv", range(2))
    assert is_bottom_up(tmp_path)
    with pytest.raises(BadInput, match="no features of photo 9"):
        BottomUp(tmp_path).get([9])
    lines = (tmp_path / "a.tsv").read_text().splitlines()
    (tmp_path / "a.tsv").write_text("\n".join([lines[0], lines[1][:-40]]) + "\n")
    with pytest.raises(Damaged, match="get the file again"):
        BottomUp(tmp_path).get([1])
    (tmp_path / "a.tsv").write_text("no tabs at all\n")
    with pytest.raises(Damaged, match="byte 0: not a line of 6 fields"):
        BottomUp(tmp_path)
    (tmp_path / "a.tsv").write_text("")
    with pytest.raises(Damaged, match="are empty"):
        BottomUp(tmp_path)


def test_widths_that_differ_are_refused(tmp_path: Path) -> None:
    write_bottom_up(tmp_path / "a.tsv", range(2))
    write_bottom_up(tmp_path / "b.tsv", range(2, 4), width=6)
    with pytest.raises(Damaged, match="photo 2 has 6 numbers a region, others 8"):
        BottomUp(tmp_path).get([0, 2])


def test_the_number_of_a_photo_is_in_its_name() -> None:
    assert photo_number("val2014/COCO_val2014_000000391895.jpg") == 391895
    with pytest.raises(BadInput, match="does not end in the number"):
        photo_number("dog.jpg")


def test_a_photo_that_comes_twice_is_named(tmp_path: Path) -> None:
    write_bottom_up(tmp_path / "a.tsv", range(2))
    write_bottom_up(tmp_path / "b.tsv", range(1, 3))
    with pytest.raises(Damaged, match=r"b\.tsv, byte 0: photo 1 comes twice, first in .*a\.tsv"):
        BottomUp(tmp_path)


@pytest.mark.parametrize(
    "at", [{"0": ["../a.tsv", 0]}, {"0": ["a.tsv", -1]}, {"x": ["a.tsv", 0]}, 3]
)
def test_an_index_that_somebody_changed_is_made_again(tmp_path: Path, at: object) -> None:
    write_bottom_up(tmp_path / "a.tsv", range(2))
    first = BottomUp(tmp_path).get([0])
    said = files.read_json(tmp_path / INDEX)
    files.write_json(tmp_path / INDEX, {**said, "at": at})
    torch.testing.assert_close(BottomUp(tmp_path).get([0]).features, first.features)
