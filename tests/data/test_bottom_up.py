"""Bottom-up features: reading the official TSV files."""

from pathlib import Path

import pytest
import torch

from overt import io
from overt.data.bottom_up import INDEX, BottomUpFeatures, coco_image_id, is_bottom_up
from overt.errors import CorruptFileError, UserError
from tests.papers.a2.small import write_bottom_up


def test_regions_of_several_files_are_read_and_padded(tmp_path: Path) -> None:
    write_bottom_up(tmp_path / "a.tsv", range(3))
    write_bottom_up(tmp_path / "b.tsv", range(3, 6))
    found = BottomUpFeatures(tmp_path)
    assert len(found) == 6 and 4 in found and 6 not in found and found.width == 8
    some = found.get([2, 3])  # 4 and 2 regions
    assert some.features.shape == (2, 4, 8) and some.boxes.shape == (2, 4, 4)
    assert some.present.tolist() == [[True] * 4, [True, True, False, False]]
    assert not some.features[1, 2:].any() and some.features[1, :2].all()
    alone = found.get([3])
    torch.testing.assert_close(alone.features[0], some.features[1, :2])


def test_line_offsets_are_indexed_once(tmp_path: Path) -> None:
    write_bottom_up(tmp_path / "a.tsv", range(3))
    first = BottomUpFeatures(tmp_path).get([1])
    kept = (tmp_path / INDEX).stat().st_mtime_ns
    torch.testing.assert_close(BottomUpFeatures(tmp_path).get([1]).features, first.features)
    assert (tmp_path / INDEX).stat().st_mtime_ns == kept
    write_bottom_up(tmp_path / "a.tsv", range(5))  # a changed file is indexed again
    assert len(BottomUpFeatures(tmp_path)) == 5


def test_missing_or_corrupt_features_raise(tmp_path: Path) -> None:
    assert not is_bottom_up(tmp_path)
    with pytest.raises(UserError, match=r"no \*.tsv"):
        BottomUpFeatures(tmp_path)
    write_bottom_up(tmp_path / "a.tsv", range(2))
    assert is_bottom_up(tmp_path)
    with pytest.raises(UserError, match=r"features.*photo 9"):
        BottomUpFeatures(tmp_path).get([9])
    lines = (tmp_path / "a.tsv").read_text().splitlines()
    (tmp_path / "a.tsv").write_text("\n".join([lines[0], lines[1][:-40]]) + "\n")
    with pytest.raises(CorruptFileError, match=r"download.*again"):
        BottomUpFeatures(tmp_path).get([1])
    (tmp_path / "a.tsv").write_text("no tabs at all\n")
    with pytest.raises(CorruptFileError, match=r"byte 0.*6 fields"):
        BottomUpFeatures(tmp_path)
    (tmp_path / "a.tsv").write_text("")
    with pytest.raises(CorruptFileError, match="are empty"):
        BottomUpFeatures(tmp_path)


def test_different_feature_widths_raise(tmp_path: Path) -> None:
    write_bottom_up(tmp_path / "a.tsv", range(2))
    write_bottom_up(tmp_path / "b.tsv", range(2, 4), width=6)
    with pytest.raises(CorruptFileError, match=r"photo 2 .*6 .* 8"):
        BottomUpFeatures(tmp_path).get([0, 2])


def test_coco_image_id_is_read_from_the_file_name() -> None:
    assert coco_image_id("val2014/COCO_val2014_000000391895.jpg") == 391895
    with pytest.raises(UserError, match="COCO image id"):
        coco_image_id("dog.jpg")


def test_duplicate_photo_raises_with_both_files(tmp_path: Path) -> None:
    write_bottom_up(tmp_path / "a.tsv", range(2))
    write_bottom_up(tmp_path / "b.tsv", range(1, 3))
    with pytest.raises(CorruptFileError, match=r"b\.tsv.*byte 0.*photo 1 .*a\.tsv"):
        BottomUpFeatures(tmp_path)


@pytest.mark.parametrize(
    "at", [{"0": ["../a.tsv", 0]}, {"0": ["a.tsv", -1]}, {"x": ["a.tsv", 0]}, 3]
)
def test_invalid_index_is_rebuilt(tmp_path: Path, at: object) -> None:
    write_bottom_up(tmp_path / "a.tsv", range(2))
    first = BottomUpFeatures(tmp_path).get([0])
    index = io.read_json(tmp_path / INDEX)
    io.write_json(tmp_path / INDEX, {**index, "at": at})
    torch.testing.assert_close(BottomUpFeatures(tmp_path).get([0]).features, first.features)
