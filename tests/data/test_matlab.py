import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.io import loadmat, savemat

from overt.data.matlab import Wanted, read_arrays
from overt.errors import BadInput, Damaged

HEAD = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"
TABLE = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
WANTED = {"a": Wanted((2, 3, 4), ("uint8",)), "b": Wanted((2, 1))}


def write(path: Path, compressed: bool = True, **changes: object) -> Path:
    arrays = {"other": "words", "a": TABLE, "b": np.array([[1.5], [-2.0]]), **changes}
    savemat(path, arrays, do_compression=compressed)
    return path


def element(kind: int, data: bytes) -> bytes:
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


def matrix(data: bytes, shape: tuple[int, ...] = (2, 3, 4), flags: int = 9) -> bytes:
    """An array named a as the format's description says, by hand."""
    sizes = struct.pack(f"<{len(shape)}i", *shape)
    name = struct.pack("<HH", 1, 1) + b"a\0\0\0"
    return element(14, element(6, struct.pack("<II", flags, 0)) + element(5, sizes) + name + data)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize(
    "kind", "uint8 int8 uint16 int16 uint32 int32 uint64 int64 float32 float64".split()
)
def test_arrays_agree_with_scipy(tmp_path, compressed, kind):
    values = np.random.default_rng(0).integers(0, 100, (5, 2, 3)).astype(kind)
    path = write(tmp_path / "x.mat", compressed, values=values, one=np.ones((1, 1), kind))
    name = {"float32": "single", "float64": "double"}.get(kind, kind)
    wanted = {"one": Wanted((1, 1), (name,)), "values": Wanted((5, 2, 3), (name,))}
    found = read_arrays(path, wanted)
    foreign = loadmat(path)
    assert list(found) == ["values", "one"] and found["values"].dtype == np.dtype(kind)
    for each in wanted:
        np.testing.assert_array_equal(found[each], foreign[each])


def test_an_element_made_by_hand_is_read(tmp_path):
    path = tmp_path / "x.mat"
    path.write_bytes(HEAD + matrix(element(2, TABLE.tobytes(order="F"))))
    np.testing.assert_array_equal(read_arrays(path, {"a": WANTED["a"]})["a"], TABLE)


def test_the_other_order_of_bytes_is_read(tmp_path):
    def big(kind: int, data: bytes) -> bytes:
        return struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8)

    values = np.array([[258.0, -1.0]])
    name = struct.pack(">HH", 1, 1) + b"a\0\0\0"
    described = big(6, struct.pack(">II", 6, 0)) + big(5, struct.pack(">ii", 1, 2)) + name
    path = tmp_path / "x.mat"
    head = HEAD[:124] + b"\x01\x00MI"
    path.write_bytes(head + big(14, described + big(3, values.astype(">i2").tobytes())))
    found = read_arrays(path, {"a": Wanted((1, 2), ("double",))})["a"]
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(found, loadmat(path)["a"])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"a": TABLE[:1]}, r"a is uint8 of 1 x 3 x 4, not uint8 of 2 x 3 x 4"),
        ({"a": TABLE.astype(np.int16)}, r"a is int16 of"),
        ({"a": TABLE * 1j}, r"a is complex of"),
        ({"a": "text"}, r"a is something else of"),
        ({"a": np.array([1, "two"], dtype=object)}, r"a is something else of"),
        ({"a": {"field": 1}}, r"a is something else of"),
        ({"b": np.ones((2, 2))}, r"b is double of 2 x 2"),
    ],
)
def test_an_array_of_another_kind_or_shape_is_refused(tmp_path, changes, match):
    with pytest.raises(Damaged, match=match):
        read_arrays(write(tmp_path / "x.mat", **changes), WANTED)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (element(2, bytes(23)), "23 bytes of data, not 24"),
        (element(2, bytes(24))[:20], "shorter than it says"),
        (element(9, bytes(8 * 24)), "float64, which uint8 cannot hold"),
        (element(14, bytes(24)), "no kind of numbers"),
        (struct.pack("<II", 2, 0xFFFFFFF0), "bytes of data, not 24"),
        (struct.pack("<HH", 2, 24) + bytes(4), "broken"),
    ],
)
def test_data_that_does_not_fit_its_description_is_refused(tmp_path, data, match):
    path = tmp_path / "x.mat"
    path.write_bytes(HEAD + matrix(data))
    with pytest.raises(Damaged, match=match):
        read_arrays(path, {"a": WANTED["a"]})


def test_a_bomb_is_not_unpacked(tmp_path):
    """Data that claims two gigabytes, behind a name that is wanted and one that is not."""
    zeros = zlib.compressobj()
    packed = zeros.compress(matrix(element(2, bytes(24)))[:-32] + struct.pack("<II", 2, 1 << 31))
    packed += b"".join(zeros.compress(bytes(1 << 20)) for _ in range(64)) + zeros.flush()
    path = tmp_path / "x.mat"
    path.write_bytes(HEAD + struct.pack("<II", 15, len(packed)) + packed)
    with pytest.raises(Damaged, match="2147483648 bytes of data, not 24"):
        read_arrays(path, {"a": WANTED["a"]})
    with pytest.raises(Damaged, match="no array z"):
        read_arrays(path, {"z": WANTED["a"]})


def test_a_compressed_element_must_end_with_its_checksum(tmp_path):
    whole = zlib.compress(matrix(element(2, TABLE.tobytes())))
    long = zlib.compress(matrix(element(2, TABLE.tobytes())) + bytes(100))
    path = tmp_path / "x.mat"
    for packed, match in [
        (whole[:-1] + bytes([whole[-1] ^ 1]), "check"),
        (whole[:-4], "ends early"),
        (long, "longer than it says"),
        (zlib.compress(bytes(64)), "not an array"),
        (b"nonsense", "x.mat: "),
    ]:
        path.write_bytes(HEAD + struct.pack("<II", 15, len(packed)) + packed)
        with pytest.raises(Damaged, match=match):
            read_arrays(path, {"a": WANTED["a"]})


def test_files_that_are_missing_or_of_another_format(tmp_path):
    path = tmp_path / "x.mat"
    with pytest.raises(BadInput, match="missing"):
        read_arrays(path, WANTED)
    later = b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(400)
    for content in (
        b"",
        b"GIF89a",
        bytes(500),
        b"\x89HDF\r\n\x1a\n" + bytes(500),
        later,
        HEAD[:127],
    ):
        path.write_bytes(content)
        with pytest.raises(Damaged, match="not a MATLAB 5 file"):
            read_arrays(path, WANTED)
    path.write_bytes(HEAD)
    with pytest.raises(Damaged, match="no array a"):
        read_arrays(path, WANTED)


@pytest.mark.parametrize("compressed", [True, False])
def test_a_file_cut_anywhere_is_one_sentence(tmp_path, compressed):
    path = write(tmp_path / "x.mat", compressed)
    data = path.read_bytes()
    for cut in range(len(data) - 8):
        path.write_bytes(data[:cut])
        with pytest.raises(Damaged) as caught:
            read_arrays(path, WANTED)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=300)
@given(place=st.integers(120, 10_000), value=st.integers(0, 255), compressed=st.booleans())
def test_a_changed_byte_gives_arrays_or_a_sentence(tmp_path_factory, place, value, compressed):
    path = write(tmp_path_factory.mktemp("mat") / "x.mat", compressed)
    data = bytearray(path.read_bytes())
    data[120 + place % (len(data) - 120)] = value
    path.write_bytes(data)
    try:
        found = read_arrays(path, WANTED)
    except Damaged:
        return
    assert found["a"].shape == (2, 3, 4) and found["b"].shape == (2, 1)
